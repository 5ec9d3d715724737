"""A tiny model of each family, by each family's own definition and by vLLM 0.33.0's names."""

from __future__ import annotations

from tests.support.family_case import (
    GATE_UP_DOWN,
    INNER,
    W1_W3_W2,
    Case,
    deepseek_like,
    mixtral_like,
    qwen_like,
)
from tests.support.family_cases_more import MORE_CASES

_VL = {"place": "model.language_model.layers.{}.mlp.experts", "vllm": "language_model.model.layers.{}.mlp.experts"}
_LM = {"place": "language_model.model.layers.{}.mlp.experts", "vllm": "language_model.model.layers.{}.mlp.experts"}
_MTP_LAYER = ("model.layers.3.mlp.experts.0.up_proj.weight", "model.layers.3.shared_head.head.weight")
_SHARED = ("mlp.shared_expert.up_proj.weight", "mlp.shared_expert_gate.weight")

CASES: tuple[Case, ...] = (
    mixtral_like("mixtral"),
    mixtral_like("phimoe"),
    mixtral_like(
        "minimax_m2",
        vllm="model.layers.{}.mlp.experts",
        beside=("block_sparse_moe.e_score_correction_bias",),
        config={"num_mtp_modules": 1},
        elsewhere=("model.layers.3.block_sparse_moe.experts.0.w1.weight",),
    ),
    *(
        mixtral_like(
            model_type,
            names=GATE_UP_DOWN,
            router="block_sparse_moe.router.layer.weight",
            beside=("shared_mlp.input_linear.weight",),
            config={"layer_types": ["mamba", "attention", "mamba"]},
        )
        for model_type in ("granitemoe", "granitemoeshared", "granitemoehybrid")
    ),
    qwen_like("qwen2_moe", config={"decoder_sparse_step": 2}, layers=(1,), beside=_SHARED),
    qwen_like("qwen3_moe", config={"mlp_only_layers": [1]}, layers=(0, 2)),
    qwen_like("qwen3_next", beside=_SHARED, elsewhere=("mtp.layers.0.mlp.experts.0.up_proj.weight",)),
    qwen_like(
        "qwen3_5_moe",
        text="qwen3_5_moe_text",
        beside=_SHARED,
        elsewhere=("mtp.layers.0.mlp.experts.gate_up_proj", "model.visual.blocks.0.mlp.linear_fc1.weight"),
        **_VL,
    ),
    qwen_like("qwen3_vl_moe", text="qwen3_vl_moe_text", **_VL),
    qwen_like(
        "qwen3_omni_moe",
        text="qwen3_omni_moe_text",
        extra={"nested": ("thinker_config", "text_config")},
        place="thinker.model.layers.{}.mlp.experts",
        vllm="language_model.model.layers.{}.mlp.experts",
        elsewhere=("talker.model.layers.0.mlp.experts.0.up_proj.weight",),
    ),
    deepseek_like("deepseek_v2", config={"moe_layer_freq": 2}, layers=(2,)),
    deepseek_like("deepseek_v3", config={"num_nextn_predict_layers": 1}, elsewhere=_MTP_LAYER),
    deepseek_like("kimi_k2", elsewhere=_MTP_LAYER),
    deepseek_like(
        "deepseek_v32",
        config={"mlp_layer_types": ["dense", "dense", "sparse"]},
        layers=(2,),
        elsewhere=("model.layers.2.self_attn.indexer.wk.weight",),
    ),
    deepseek_like("kimi_k25", text="kimi_k2", elsewhere=("vision_tower.patch_embed.weight",), **_LM),
    deepseek_like("kimi_k25", text="deepseek_v3", **(_LM | {"place": "language_model.layers.{}.mlp.experts"})),
    deepseek_like("glm4_moe", elsewhere=_MTP_LAYER),
    deepseek_like("glm4v_moe", text="glm4v_moe_text", **_VL),
    deepseek_like("glm4_moe_lite", config={"mlp_layer_types": ["dense", "sparse", "sparse"]}),
    deepseek_like("glm_moe_dsa", elsewhere=_MTP_LAYER),
    deepseek_like("glm5_next", text="glm5_next_text", config={"mlp_layer_types": ["dense", "sparse", "sparse"]}, **_VL),
    qwen_like("olmoe", config={"intermediate_size": INNER, "moe_intermediate_size": None}),
    qwen_like("flex_olmo", config={"intermediate_size": INNER, "moe_intermediate_size": None}),
    deepseek_like("dots1"),
    qwen_like(
        "jamba",
        config={
            "intermediate_size": INNER,
            "moe_intermediate_size": None,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
        },
        layers=(1,),
        place="model.layers.{}.feed_forward.experts",
        vllm="model.layers.{}.feed_forward.experts",
        router="feed_forward.router.weight",
    ),
    qwen_like(
        "lfm2_moe",
        config={"num_dense_layers": 1},
        layers=(1, 2),
        place="model.layers.{}.feed_forward.experts",
        vllm="model.layers.{}.feed_forward.experts",
        names=W1_W3_W2,
        router="feed_forward.gate.weight",
        beside=("feed_forward.expert_bias",),
        elsewhere=("model.layers.0.feed_forward.w1.weight",),
    ),
    mixtral_like(
        "arctic",
        layers=(1,),
        config={"moe_layer_frequency": 2},
        served=False,
        elsewhere=("model.layers.0.block_sparse_moe.mlp.w1.weight", "model.layers.1.residual_mlp.w1.weight"),
    ),
    *MORE_CASES,
)
