"""Everything but the routed experts of the tiny models: tensors under their hub names, and config.json's fields."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from tests.support.checkpoints import RawTensor, Tensors, bf16

HIDDEN, INTERMEDIATE, LAYERS, VOCAB = 512, 512, 2, 4096
HEADS, KV_HEADS, HEAD_DIM = 8, 4, 64
Config = dict[str, Any]


class Writer:
    """Random unquantized tensors of a model's dtype, under their hub names."""

    def __init__(self, dtype: str, seed: int) -> None:
        self.tensors: Tensors = {}
        self._dtype = dtype
        self._rng = np.random.default_rng(seed)

    def add(self, name: str, *shape: int, scale: float = 0.05, mean: float = 0.0) -> None:
        """One tensor of normal values."""
        values = self._rng.standard_normal(shape, dtype=np.float32) * scale + mean
        is_half = self._dtype == "float16"
        self.tensors[name] = RawTensor("F16", values.astype(np.float16)) if is_half else bf16(values)

    def norm(self, name: str, size: int) -> None:
        """A norm's weight, near one."""
        self.add(name, size, scale=0.02, mean=1.0)


def _attention(writer: Writer, head: str, *, bias: bool = False, qkv_bias: bool = False) -> None:
    for name, rows, columns in (
        ("q_proj", HEADS * HEAD_DIM, HIDDEN),
        ("k_proj", KV_HEADS * HEAD_DIM, HIDDEN),
        ("v_proj", KV_HEADS * HEAD_DIM, HIDDEN),
        ("o_proj", HIDDEN, HEADS * HEAD_DIM),
    ):
        writer.add(f"{head}.self_attn.{name}.weight", rows, columns)
        if bias or (qkv_bias and name != "o_proj"):
            writer.add(f"{head}.self_attn.{name}.bias", rows)


def _qwen3(writer: Writer, head: str, experts: int) -> None:
    _attention(writer, head)
    writer.norm(f"{head}.self_attn.q_norm.weight", HEAD_DIM)
    writer.norm(f"{head}.self_attn.k_norm.weight", HEAD_DIM)
    writer.add(f"{head}.mlp.gate.weight", experts, HIDDEN)


def _mixtral(writer: Writer, head: str, experts: int) -> None:
    _attention(writer, head)
    writer.add(f"{head}.block_sparse_moe.gate.weight", experts, HIDDEN)


def _gpt_oss(writer: Writer, head: str, experts: int) -> None:
    _attention(writer, head, bias=True)
    writer.add(f"{head}.self_attn.sinks", HEADS, scale=1.0)
    writer.add(f"{head}.mlp.router.weight", experts, HIDDEN)
    writer.add(f"{head}.mlp.router.bias", experts)


def _deepseek(writer: Writer, head: str, experts: int) -> None:
    attention = f"{head}.self_attn"
    writer.add(f"{attention}.q_a_proj.weight", 128, HIDDEN)
    writer.norm(f"{attention}.q_a_layernorm.weight", 128)
    writer.add(f"{attention}.q_b_proj.weight", HEADS * 128, 128)
    writer.add(f"{attention}.kv_a_proj_with_mqa.weight", 128 + 64, HIDDEN)
    writer.norm(f"{attention}.kv_a_layernorm.weight", 128)
    writer.add(f"{attention}.kv_b_proj.weight", HEADS * 128, 128)
    writer.add(f"{attention}.o_proj.weight", HIDDEN, HEADS * 64)
    _dense_or_shared(writer, head, experts)


def _dense_or_shared(writer: Writer, head: str, experts: int) -> None:
    """Layer 0 dense; the others a router with a correction bias, and shared experts."""
    prefix = f"{head}.mlp"
    if not head.endswith(".0"):
        writer.add(f"{prefix}.gate.weight", experts, HIDDEN)
        correction = np.linspace(-0.1, 0.1, experts, dtype=np.float32)
        writer.tensors[f"{prefix}.gate.e_score_correction_bias"] = RawTensor("F32", correction)
        prefix += ".shared_experts"
    for name, shape in (
        ("gate_proj", (INTERMEDIATE, HIDDEN)),
        ("up_proj", (INTERMEDIATE, HIDDEN)),
        ("down_proj", (HIDDEN, INTERMEDIATE)),
    ):
        writer.add(f"{prefix}.{name}.weight", *shape)


def _glm4(writer: Writer, head: str, experts: int) -> None:
    _attention(writer, head, qkv_bias=True)
    writer.norm(f"{head}.self_attn.q_norm.weight", HEAD_DIM)
    writer.norm(f"{head}.self_attn.k_norm.weight", HEAD_DIM)
    _dense_or_shared(writer, head, experts)


def add_glm4_mtp(tensors: Tensors, writer: Writer, experts: int) -> None:
    """The layer behind the last one that predicts a further token: quantized experts and all, as the hub's have it."""
    last, head = f"model.layers.{LAYERS - 1}.", f"model.layers.{LAYERS}"
    for name in [name for name in tensors if name.startswith(last)]:
        tensors[f"{head}.{name.removeprefix(last)}"] = tensors[name]
    _glm4(writer, head, experts)
    for name in ("input_layernorm", "post_attention_layernorm", "enorm", "hnorm", "shared_head.norm"):
        writer.norm(f"{head}.{name}.weight", HIDDEN)
    writer.add(f"{head}.eh_proj.weight", HIDDEN, 2 * HIDDEN)
    writer.add(f"{head}.embed_tokens.weight", VOCAB, HIDDEN)
    writer.add(f"{head}.shared_head.head.weight", VOCAB, HIDDEN)


LAYER_TENSORS: dict[str, Callable[[Writer, str, int], None]] = {
    "qwen3_moe": _qwen3,
    "mixtral": _mixtral,
    "gpt_oss": _gpt_oss,
    "deepseek_v3": _deepseek,
    "glm4_moe": _glm4,
}

COMMON_CONFIG: Config = {
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "vocab_size": VOCAB,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.02,
    "attention_dropout": 0.0,
}

FAMILY_CONFIG: dict[str, Config] = {
    "qwen3_moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "intermediate_size": 1024,
        "rope_theta": 1e6,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "attention_bias": False,
    },
    "mixtral": {"architectures": ["MixtralForCausalLM"], "rope_theta": 1e6, "sliding_window": None},
    "gpt_oss": {
        "architectures": ["GptOssForCausalLM"],
        "attention_bias": True,
        "swiglu_limit": 7.0,
        "rope_theta": 150000,
        "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"],
        "experts_per_token": 2,
        "initial_context_length": 1024,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 1024,
        },
    },
    "deepseek_v3": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "intermediate_size": INTERMEDIATE,
        "num_key_value_heads": HEADS,
        "q_lora_rank": 128,
        "kv_lora_rank": 128,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 64,
        "v_head_dim": 64,
        "n_group": 2,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "rope_theta": 10000.0,
        "num_nextn_predict_layers": 0,
        "hidden_act": "silu",
        "attention_bias": False,
    },
    "glm4_moe": {
        "architectures": ["Glm4MoeForCausalLM"],
        "intermediate_size": INTERMEDIATE,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "num_nextn_predict_layers": 1,
        "hidden_act": "silu",
        "attention_bias": True,
        "use_qk_norm": True,
    },
}
