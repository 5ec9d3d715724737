"""The families' table, continued: rows whose names, sizes or activations are less usual."""

from __future__ import annotations

from humming_convert.family import PREFIXES, Family
from humming_convert.layer_rules import (
    enumerated_layers,
    every_layer,
    interleaved_layers,
    interval_layers,
    layers_after_dense,
    layers_after_num_dense,
    layers_from_first,
    pattern_layers,
    swiglustep_layers,
)

_BLOCK = {"block_sparse_moe": "block_sparse_moe"}
_FFN = {"ffn": "ffn"}
_OWN = ("moe_intermediate_size",)
_DEEPSEEK = ("n_routed_experts", "num_local_experts")
_QWEN = ("num_experts", "num_local_experts")
_STEP = ("moe_num_experts", "n_routed_experts")
# These wrappers keep their language model under `model.` on disk.
_WRAPPED = {**PREFIXES, "model.": "language_model.model."}

MORE_FAMILIES: tuple[Family, ...] = (
    Family(
        # SiLU is clamped by swiglu_limit of the config, which vLLM reads itself.
        name="deepseek_v4",
        model_types=("deepseek_v4",),
        experts=_DEEPSEEK,
        intermediate=_OWN,
        is_moe_layer=layers_after_dense,
        parents=_FFN,
        predicts_tokens=True,
    ),
    Family(
        name="deepseek_v41",
        model_types=("deepseek_v41",),
        experts=_DEEPSEEK,
        intermediate=_OWN,
        is_moe_layer=layers_after_dense,
        parents=_FFN,
        prefixes={**_WRAPPED, "": "language_model.model."},
        predicts_tokens=True,
    ),
    Family(
        name="kimi_linear",
        model_types=("kimi_linear",),
        experts=_QWEN,
        intermediate=_OWN,
        is_moe_layer=layers_after_dense,
        parents=_BLOCK,
    ),
    Family(
        # Experts work on a latent of their own size; vLLM may pad the intermediate size, which its layer then shows.
        name="kimi_k3",
        model_types=("kimi_k3",),
        experts=_QWEN,
        intermediate=_OWN,
        hidden=("routed_expert_hidden_size", "hidden_size"),
        is_moe_layer=layers_after_dense,
        parents=_BLOCK,
        activation="situ",
        predicts_tokens=True,
    ),
    Family(
        # Gate rows, then up rows, unlike gpt-oss.
        name="minimax_m3",
        model_types=("minimax_m3_vl", "minimax_m3", "minimax_m3_text", "minimax_m3_vl_text"),
        experts=("num_local_experts",),
        intermediate=("intermediate_size",),
        is_moe_layer=layers_after_dense,
        parents=_BLOCK,
        activation="swigluoai_uninterleave",
        activation_field="",
        predicts_tokens=True,
        prediction_field="num_mtp_modules",
    ),
    Family(
        # Through vLLM's Transformers backend, which takes the names of transformers' modules.
        name="minimax",
        model_types=("minimax",),
        experts=("num_local_experts",),
        intermediate=("intermediate_size",),
        is_moe_layer=every_layer,
        parents={"block_sparse_moe": "mlp"},
    ),
    Family(
        # vLLM multiplies the input of its experts with the router's weight, which the loader's kernels do not do
        # (`apply_router_weight_on_input`): converted layers are refused when they are served.
        name="llama4",
        model_types=("llama4", "llama4_text"),
        experts=("num_local_experts",),
        intermediate=("intermediate_size",),
        is_moe_layer=interleaved_layers,
        parents={"feed_forward": "feed_forward"},
        routers=("router",),
    ),
    Family(
        name="ernie4_5_moe",
        model_types=("ernie4_5_moe",),
        experts=("moe_num_experts", "num_experts"),
        intermediate=_OWN,
        is_moe_layer=interval_layers,
    ),
    Family(
        # One list of experts on disk: the text's, then the vision's, which are smaller.
        name="ernie4_5_vl_moe",
        model_types=("ernie4_5_moe_vl", "ernie4_5_vl_moe"),
        experts=("moe_num_experts",),
        intermediate=_OWN,
        is_moe_layer=interval_layers,
        prefixes=_WRAPPED,
        groups=("text_experts", "vision_experts"),
    ),
    Family(
        name="hunyuan_v1_moe",  # through the Transformers backend
        model_types=("hunyuan_v1_moe",),
        experts=_QWEN,
        intermediate=("moe_intermediate_size", "intermediate_size"),
        is_moe_layer=every_layer,
        routers=("gate.wg", "gate"),
    ),
    Family(
        name="hy_v3",
        model_types=("hy_v3",),
        experts=_QWEN,
        intermediate=("moe_intermediate_size", "expert_hidden_dim"),
        is_moe_layer=layers_after_dense,
        routers=("router.gate", "router", "gate"),
        predicts_tokens=True,
    ),
    Family(
        name="hy_v4",
        model_types=("hy_v4",),
        experts=_DEEPSEEK,
        intermediate=_OWN,
        is_moe_layer=layers_after_dense,
        routers=("router.gate", "router", "gate"),
        predicts_tokens=True,
    ),
    Family(
        name="nemotron_h",
        model_types=("nemotron_h",),
        experts=_DEEPSEEK,
        intermediate=_OWN,
        hidden=("moe_latent_size", "hidden_size"),
        layers=("num_hidden_layers", "layers_block_type", "hybrid_override_pattern"),
        is_moe_layer=pattern_layers,
        parents={"mixer": "mixer"},
        prefixes={
            "backbone.": "model.",
            "model.": "model.",
            "language_model.backbone.": "language_model.model.",
            "language_model.model.": "language_model.model.",
        },
        activation="relu2",
        activation_field="mlp_hidden_act",
        is_gated=False,
    ),
    Family(
        name="step3",
        model_types=("step3_vl", "step3_text"),
        experts=_STEP,
        intermediate=_OWN,
        is_moe_layer=enumerated_layers,
        parents={"moe": "moe"},
        prefixes=_WRAPPED,
        predicts_tokens=True,
    ),
    Family(
        name="step3p5",
        model_types=("step3p5",),
        experts=_STEP,
        intermediate=_OWN,
        is_moe_layer=enumerated_layers,
        parents={"moe": "moe"},
        layer_activation=swiglustep_layers,
        predicts_tokens=True,
    ),
    Family(
        name="step3p7",
        model_types=("step3p7",),
        experts=_STEP,
        intermediate=_OWN,
        is_moe_layer=enumerated_layers,
        parents={"moe": "moe"},
        prefixes=_WRAPPED,
        layer_activation=swiglustep_layers,
        predicts_tokens=True,
    ),
    Family(
        name="bailing_moe",
        model_types=("bailing_moe", "bailing_moe_v2", "bailing_hybrid"),
        experts=_QWEN,
        intermediate=_OWN,
        is_moe_layer=layers_after_dense,
        predicts_tokens=True,
    ),
    Family(
        name="grok",
        model_types=("grok-1", "git"),
        experts=("num_experts", "num_local_experts"),
        intermediate=("moe_intermediate_size", "intermediate_size"),
        is_moe_layer=every_layer,
        parents={"moe_block": "moe_block", "block_sparse_moe": "block_sparse_moe"},
        activation="gelu",
        is_served=False,  # vLLM dropped it in 0.24.0
    ),
    Family(
        name="afmoe",
        model_types=("afmoe",),
        experts=_QWEN,
        intermediate=_OWN,
        is_moe_layer=layers_after_num_dense,
        routers=("router.gate", "router", "gate"),
    ),
    Family(
        name="solar_open",  # through the Transformers backend
        model_types=("solar_open",),
        experts=_DEEPSEEK,
        intermediate=_OWN,
        is_moe_layer=layers_after_dense,
    ),
    Family(
        name="exaone_moe",
        model_types=("exaone_moe",),
        experts=_QWEN,
        intermediate=_OWN,
        is_moe_layer=layers_after_dense,
        predicts_tokens=True,
    ),
    Family(
        name="cohere2_moe",
        model_types=("cohere2_moe",),
        experts=_QWEN,
        intermediate=("intermediate_size",),
        is_moe_layer=layers_after_dense,
    ),
    Family(
        name="mimo_v2",
        model_types=("mimo_v2_flash", "mimo_v2"),
        experts=_DEEPSEEK,
        intermediate=_OWN,
        is_moe_layer=layers_after_dense,
        predicts_tokens=True,
    ),
    Family(
        name="sarvam",
        model_types=("sarvam_moe", "sarvam_mla"),
        experts=_QWEN,
        intermediate=_OWN,
        is_moe_layer=layers_from_first,
    ),
    Family(
        # Its router has rows for experts that do nothing too (zero_expert_num), and num_hidden_layers counts
        # attention layers, of which there are two in a layer.
        name="longcat_flash",
        model_types=("longcat_flash", "longcat_flash_ngram"),
        experts=_DEEPSEEK,
        intermediate=("moe_intermediate_size", "expert_ffn_hidden_size"),
        layers=("num_layers", "num_hidden_layers"),
        is_moe_layer=every_layer,
        routers=("router.classifier",),
    ),
    Family(
        name="gemma4",
        model_types=("gemma4", "gemma4_text", "gemma4_unified"),
        experts=_QWEN,
        intermediate=("moe_intermediate_size", "expert_intermediate_size"),
        is_moe_layer=every_layer,
        parents={"": ""},
        routers=("router.proj", "router"),
        activation="gelu_tanh",
        activation_field="",
    ),
    Family(
        name="aria",
        model_types=("aria", "aria_text"),
        experts=("moe_num_experts",),
        intermediate=("intermediate_size",),
        is_moe_layer=every_layer,
        routers=("router",),
    ),
)

# model_type: why there is no row, and what could be done.
REFUSED_FAMILIES: dict[str, tuple[str, str]] = {
    "dbrx": (
        "each expert's rows in tensors or modules of their own",
        "DBRX: one two-dimensional tensor holds a projection of all experts (experts.mlp.w1, v1, w2)",
    ),
}
