"""Model families as rows of one table. Where vLLM hangs their experts was read from vLLM 0.33.0's model files."""

from __future__ import annotations

from humming_convert.expert_names import PROJECTION_ALIASES
from humming_convert.families_more import MORE_FAMILIES, REFUSED_FAMILIES
from humming_convert.family import Family
from humming_convert.layer_rules import (
    every_layer,
    frequency_layers,
    layers_after_dense,
    layers_after_num_dense,
    period_layers,
    sparse_step_layers,
)

__all__ = ["BY_MODEL_TYPE", "FAMILIES", "PROJECTION_ALIASES", "REFUSED_FAMILIES", "Family", "family_from_names"]

_BLOCK = {"block_sparse_moe": "block_sparse_moe"}
_FEED_FORWARD = {"feed_forward": "feed_forward"}
_DEEPSEEK = ("n_routed_experts", "num_local_experts")
# transformers 5 renames num_experts to num_local_experts when it saves.
_QWEN = ("num_experts", "num_local_experts")
_OWN = ("moe_intermediate_size",)
_COMMON = ("intermediate_size",)

FAMILIES: tuple[Family, ...] = (
    Family(
        name="mixtral",
        model_types=("mixtral",),
        experts=("num_local_experts",),
        intermediate=_COMMON,
        is_moe_layer=every_layer,
        parents=_BLOCK,
    ),
    Family(
        name="phimoe",
        model_types=("phimoe",),
        experts=("num_local_experts",),
        intermediate=_COMMON,
        is_moe_layer=every_layer,
        parents=_BLOCK,
    ),
    Family(
        name="minimax_m2",
        model_types=("minimax_m2",),
        experts=("num_local_experts",),
        intermediate=_COMMON,
        is_moe_layer=every_layer,
        # vLLM keeps the attribute's name, but gives its layer the name mlp.
        parents={"block_sparse_moe": "mlp"},
        predicts_tokens=True,
        prediction_field="num_mtp_modules",
    ),
    Family(
        name="granitemoe",
        model_types=("granitemoe", "granitemoeshared", "granitemoehybrid"),
        experts=("num_local_experts",),
        intermediate=_COMMON,
        is_moe_layer=every_layer,  # of a hybrid too: layer_types is about the mixer
        parents=_BLOCK,
        routers=("router.layer", "router"),
    ),
    Family(
        name="qwen2_moe",
        model_types=("qwen2_moe",),
        experts=_QWEN,
        intermediate=_OWN,
        is_moe_layer=sparse_step_layers,
    ),
    Family(
        name="qwen3_moe",
        model_types=("qwen3_moe",),
        experts=_QWEN,
        intermediate=_OWN,
        is_moe_layer=sparse_step_layers,
    ),
    Family(
        name="qwen3_next",
        model_types=("qwen3_next",),
        experts=_QWEN,
        intermediate=_OWN,
        is_moe_layer=sparse_step_layers,
    ),
    Family(
        name="qwen3_5_moe",
        model_types=("qwen3_5_moe", "qwen3_5_moe_text"),
        experts=_QWEN,
        intermediate=_OWN,
        is_moe_layer=every_layer,
    ),
    Family(
        name="qwen3_vl_moe",
        model_types=("qwen3_vl_moe", "qwen3_vl_moe_text"),
        experts=_QWEN,
        intermediate=_OWN,
        is_moe_layer=sparse_step_layers,
    ),
    Family(
        name="qwen3_omni_moe",
        model_types=("qwen3_omni_moe", "qwen3_omni_moe_thinker", "qwen3_omni_moe_text"),
        experts=_QWEN,
        intermediate=_OWN,
        is_moe_layer=sparse_step_layers,
    ),
    Family(
        name="deepseek_v2",
        model_types=("deepseek_v2",),
        experts=_DEEPSEEK,
        intermediate=_OWN,
        is_moe_layer=layers_after_dense,
    ),
    Family(
        name="deepseek_v3",
        model_types=("deepseek_v3", "kimi_k2"),
        experts=_DEEPSEEK,
        intermediate=_OWN,
        is_moe_layer=layers_after_dense,
        predicts_tokens=True,
    ),
    Family(
        name="deepseek_v32",
        model_types=("deepseek_v32",),
        experts=_DEEPSEEK,
        intermediate=_OWN,
        is_moe_layer=layers_after_dense,
        predicts_tokens=True,
    ),
    Family(
        name="kimi_k25",
        model_types=("kimi_k25",),
        experts=_DEEPSEEK,
        intermediate=_OWN,
        is_moe_layer=layers_after_dense,
        predicts_tokens=True,
    ),
    Family(
        name="glm4_moe",
        model_types=("glm4_moe", "glm4v_moe", "glm4v_moe_text"),
        experts=_DEEPSEEK,
        intermediate=_OWN,
        is_moe_layer=layers_after_dense,
        predicts_tokens=True,
    ),
    Family(
        name="glm4_moe_lite",
        model_types=("glm4_moe_lite",),
        experts=_DEEPSEEK,
        intermediate=_OWN,
        is_moe_layer=layers_after_dense,
        predicts_tokens=True,
    ),
    Family(
        name="glm_moe_dsa",
        model_types=("glm_moe_dsa",),
        experts=_DEEPSEEK,
        intermediate=_OWN,
        is_moe_layer=layers_after_dense,
        predicts_tokens=True,
    ),
    Family(
        name="glm5_next",
        model_types=("glm5_next", "glm5_next_text"),
        experts=_DEEPSEEK,
        intermediate=_OWN,
        is_moe_layer=layers_after_dense,
        predicts_tokens=True,
    ),
    Family(
        name="gpt_oss",
        model_types=("gpt_oss",),
        experts=("num_local_experts",),
        intermediate=_COMMON,
        is_moe_layer=every_layer,
        routers=("router",),
        activation="swigluoai",
        activation_field="",  # the config says silu
        is_interleaved=True,
    ),
    Family(
        name="olmoe",
        model_types=("olmoe",),
        experts=_QWEN,
        intermediate=_COMMON,
        is_moe_layer=every_layer,
    ),
    Family(
        # Served by vLLM through its Transformers backend, which takes the names of transformers' modules.
        name="flex_olmo",
        model_types=("flex_olmo",),
        experts=_QWEN,
        intermediate=_COMMON,
        is_moe_layer=every_layer,
    ),
    Family(
        name="dots1",  # through the Transformers backend
        model_types=("dots1",),
        experts=_DEEPSEEK,
        intermediate=_OWN,
        is_moe_layer=layers_after_dense,
    ),
    Family(
        name="jamba",
        model_types=("jamba",),
        experts=_QWEN,
        intermediate=_COMMON,
        is_moe_layer=period_layers,
        parents=_FEED_FORWARD,
        routers=("router",),
    ),
    Family(
        name="lfm2_moe",
        model_types=("lfm2_moe",),
        experts=_QWEN,
        intermediate=_OWN,
        is_moe_layer=layers_after_num_dense,
        parents=_FEED_FORWARD,
    ),
    Family(
        name="arctic",
        model_types=("arctic",),
        experts=("num_local_experts",),
        intermediate=_COMMON,
        is_moe_layer=frequency_layers,
        parents=_BLOCK,
        is_served=False,  # vLLM dropped it in 0.28.0
    ),
    *MORE_FAMILIES,
)

BY_MODEL_TYPE: dict[str, Family] = {model_type: row for row in FAMILIES for model_type in row.model_types}


def family_from_names(names: list[str]) -> Family:
    """The row for a file without config.json: told by how its experts and their neighbours are called.

    Rows that cannot be told apart this way differ in nothing that the kernel layout depends on.
    """
    text = "\n".join(names)
    for sign, model_type in _SIGNS:
        if sign in text:
            return BY_MODEL_TYPE[model_type]
    return BY_MODEL_TYPE["qwen3_moe"]


_SIGNS: tuple[tuple[str, str], ...] = (
    (".experts.gate_up_proj_blocks", "gpt_oss"),
    (".mixer.experts.", "nemotron_h"),
    (".moe_block.experts.", "grok-1"),
    (".ffn.experts.", "deepseek_v4"),
    (".moe.experts.", "step3_text"),
    (".moe.gate_proj.", "step3_text"),
    (".feed_forward.experts.", "lfm2_moe"),
    (".block_sparse_moe.experts.", "mixtral"),
    (".mlp.shared_expert.", "qwen2_moe"),
    (".mlp.shared_experts.", "deepseek_v3"),
)
