"""Tiny models that real vLLM can serve, experts quantized and everything else not: `serve_models.py DIR [NAME ...]`.

Experts come from the tests' generator, in the layouts that real producers write; this adds real configs and the other
tensors. Without NAME all of `MODELS` are written.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.support.checkpoints import RawTensor, Tensors, bf16, make_checkpoint

HIDDEN, INTERMEDIATE, LAYERS, VOCAB = 512, 512, 2, 4096
HEADS, KV_HEADS, HEAD_DIM = 8, 4, 64
Config = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Model:
    """One model: family and experts' format of the tests' generator, its options, and environment for vLLM."""

    family: str
    format: str
    options: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    dtype: str = "bfloat16"


MODELS: dict[str, Model] = {
    "qwen3-fp8-block": Model("qwen3_moe", "fp8_block"),
    "gpt-oss-mxfp4": Model("gpt_oss", "mxfp4_gpt_oss"),
    "mixtral-awq": Model("mixtral", "awq", {"group_size": 128}, dtype="float16"),
    "qwen3-ct-int4": Model("qwen3_moe", "ct_int4", {"group_size": 128}),
    "qwen3-nvfp4": Model("qwen3_moe", "ct_nvfp4"),
    "deepseek-fp8-block": Model("deepseek_v3", "fp8_block", environment={"VLLM_MLA_DISABLE": "1"}),
}


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


def _attention(writer: Writer, head: str, *, bias: bool = False) -> None:
    for name, rows, columns in (
        ("q_proj", HEADS * HEAD_DIM, HIDDEN),
        ("k_proj", KV_HEADS * HEAD_DIM, HIDDEN),
        ("v_proj", KV_HEADS * HEAD_DIM, HIDDEN),
        ("o_proj", HIDDEN, HEADS * HEAD_DIM),
    ):
        writer.add(f"{head}.self_attn.{name}.weight", rows, columns)
        if bias:
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


_LAYER: dict[str, Callable[[Writer, str, int], None]] = {
    "qwen3_moe": _qwen3,
    "mixtral": _mixtral,
    "gpt_oss": _gpt_oss,
    "deepseek_v3": _deepseek,
}

_COMMON: Config = {
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

_FAMILY: dict[str, Config] = {
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
}


def _unquantized(tensors: Tensors) -> list[str]:
    """The modules that hold the tensors that are not quantized, and can be."""
    return sorted(name.removesuffix(".weight") for name, tensor in tensors.items() if tensor.array.ndim == 2)


def write_model(folder: Path, name: str, *, experts: int = 8) -> Path:
    """Write `MODELS[name]` into `folder` and return it; `experts` routed experts a layer."""
    model = MODELS[name]

    def edit(tensors: Tensors, config: Config) -> None:
        for key in [key for key in tensors if ".experts." not in key]:
            del tensors[key]
        writer = Writer(model.dtype, seed=1)
        writer.add("model.embed_tokens.weight", VOCAB, HIDDEN, scale=1.0)
        for layer in range(LAYERS):
            head = f"model.layers.{layer}"
            writer.norm(f"{head}.input_layernorm.weight", HIDDEN)
            writer.norm(f"{head}.post_attention_layernorm.weight", HIDDEN)
            _LAYER[model.family](writer, head, experts)
        writer.norm("model.norm.weight", HIDDEN)
        writer.add("lm_head.weight", VOCAB, HIDDEN)
        tensors.update(writer.tensors)
        config.update(_COMMON | _FAMILY[model.family] | {"torch_dtype": model.dtype, "dtype": model.dtype})
        if model.family == "deepseek_v3":
            del config["head_dim"]
        section = config["quantization_config"]
        ignored = "ignore" if section["quant_method"] == "compressed-tensors" else "modules_to_not_convert"
        section[ignored] = _unquantized(writer.tensors)

    make_checkpoint(
        folder,
        model.family,
        model.format,
        layers=LAYERS,
        experts=experts,
        hidden=HIDDEN,
        intermediate=INTERMEDIATE,
        seed=7,
        edit=edit,
        side_files=False,
        **model.options,
    )
    (folder / "generation_config.json").write_text(json.dumps({"bos_token_id": 1, "eos_token_id": 2}))
    return folder


def main() -> None:
    """Write the models asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--experts", type=int, default=8)
    options = parser.parse_args()
    for name in options.names or MODELS:
        print(write_model(options.folder / name, name, experts=options.experts))


if __name__ == "__main__":
    main()
