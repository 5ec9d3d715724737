"""The cases of families, continued, as the families' table is."""

from __future__ import annotations

from tests.support.family_case import (
    GATE_UP_DOWN,
    INNER,
    W1_W3_W2,
    Case,
    E,
    H,
    deepseek_like,
    mixtral_like,
    qwen_like,
)

_LM = {"place": "language_model.model.layers.{}.mlp.experts", "vllm": "language_model.model.layers.{}.mlp.experts"}

MORE_CASES: tuple[Case, ...] = (
    deepseek_like(
        "deepseek_v4",
        config={"mlp_layer_types": ["hash_moe", "moe", "moe"], "swiglu_limit": 10.0, "num_nextn_predict_layers": 1},
        layers=(0, 1, 2),
        place="layers.{}.ffn.experts",
        vllm="model.layers.{}.ffn.experts",
        names=W1_W3_W2,
        router="ffn.gate.weight",
        beside=("ffn.gate.bias", "ffn.shared_experts.w1.weight"),
        elsewhere=("mtp.0.ffn.experts.0.w1.weight",),
    ),
    deepseek_like(
        "deepseek_v41",
        text="deepseek_v41_text",
        config={"first_k_dense_replace": 0},
        layers=(0, 1, 2),
        place="layers.{}.ffn.experts",
        vllm="language_model.model.layers.{}.ffn.experts",
        names=("wgate", "up_proj", "down_proj"),
        router="ffn.gate.weight",
        beside=(),
        elsewhere=("engram.0.weight",),
    ),
    qwen_like(
        "kimi_linear",
        config={"first_k_dense_replace": 1},
        layers=(1, 2),
        place="model.layers.{}.block_sparse_moe.experts",
        vllm="model.layers.{}.block_sparse_moe.experts",
        names=W1_W3_W2,
        router="block_sparse_moe.gate.weight",
        beside=("block_sparse_moe.shared_experts.up_proj.weight",),
        elsewhere=("model.layers.0.block_sparse_moe.up_proj.weight",),
    ),
    qwen_like(
        "kimi_k3",
        text="kimi_k3_text",
        config={"routed_expert_hidden_size": 384, "first_k_dense_replace": 1, "hidden_act": "situ"},
        layers=(1, 2),
        hidden=384,
        activation="situ",
        place="language_model.model.layers.{}.block_sparse_moe.experts",
        vllm="language_model.model.layers.{}.block_sparse_moe.experts",
        names=W1_W3_W2,
        router="block_sparse_moe.gate.weight",
        beside=("block_sparse_moe.routed_expert_down_proj.weight",),
    ),
    mixtral_like(
        "minimax_m3_vl",
        text="minimax_m3_text",
        config={"moe_layer_freq": [0, 1, 1]},
        layers=(1, 2),
        activation="swigluoai_uninterleave",
        place="language_model.model.layers.{}.block_sparse_moe.experts",
        vllm="language_model.model.layers.{}.block_sparse_moe.experts",
        beside=("block_sparse_moe.shared_experts.up_proj.weight",),
    ),
    mixtral_like("minimax", vllm="model.layers.{}.mlp.experts"),
    mixtral_like(
        "llama4",
        text="llama4_text",
        config={"interleave_moe_layer_step": 2},
        layers=(1,),
        place="language_model.model.layers.{}.feed_forward.experts",
        vllm="language_model.model.layers.{}.feed_forward.experts",
        names=GATE_UP_DOWN,
        router="feed_forward.router.weight",
        beside=("feed_forward.shared_expert.up_proj.weight",),
    ),
    qwen_like(
        "ernie4_5_moe",
        config={"moe_num_experts": E, "num_experts": None, "moe_layer_start_index": 1, "moe_layer_end_index": -1},
        layers=(1, 2),
        beside=("mlp.moe_statics.e_score_correction_bias", "mlp.shared_experts.up_proj.weight"),
        elsewhere=("model.mtp_block.0.mlp.up_proj.weight",),
    ),
    qwen_like("hunyuan_v1_moe", router="mlp.gate.wg.weight", beside=("mlp.shared_mlp.up_proj.weight",)),
    qwen_like(
        "hunyuan_v1_moe",
        config={"moe_intermediate_size": [INNER, INNER, INNER]},
        router="mlp.gate.wg.weight",
    ),
    qwen_like(
        "hy_v3",
        config={"first_k_dense_replace": 1},
        layers=(1, 2),
        router="mlp.router.gate.weight",
        beside=("mlp.expert_bias", "mlp.shared_mlp.up_proj.weight"),
    ),
    deepseek_like(
        "hy_v4", config={"mlp_layer_types": ["dense", "moe", "moe"]}, beside=("mlp.shared_experts.linear_gate.weight",)
    ),
    *(
        deepseek_like(
            "nemotron_h",
            config={"mlp_hidden_act": "relu2", "moe_latent_size": latent} | pattern,
            layers=(0, 2),
            hidden=latent or H,
            names=(None, "up_proj", "down_proj"),
            activation="relu2_no_mul",
            place="backbone.layers.{}.mixer.experts",
            vllm="model.layers.{}.mixer.experts",
            router="mixer.gate.weight",
            beside=("mixer.gate.e_score_correction_bias", "mixer.fc1_latent_proj.weight"),
            elsewhere=("mtp.layers.0.mixer.experts.0.up_proj.weight",),
        )
        for latent, pattern in (
            (None, {"layers_block_type": ["moe", "mamba", "moe"], "num_hidden_layers": None}),
            (384, {"hybrid_override_pattern": "EM" + "E"}),
        )
    ),
    qwen_like(
        "step3_vl",
        text="step3_text",
        config={"moe_num_experts": E, "num_experts": None, "moe_layers_enum": "1,2"},
        layers=(1, 2),
        place="model.layers.{}.moe",
        vllm="language_model.model.layers.{}.moe.experts",
        stacked=True,
        router="moe.gate.weight",
        beside=("share_expert.up_proj.weight",),
    ),
    *(
        qwen_like(
            model_type,
            config={"moe_num_experts": E, "num_experts": None, "swiglu_limits": [0, 0, 7.0]},
            layers=(1, 2),
            place="model.layers.{}.moe.experts",
            vllm=f"{prefix}model.layers.{{}}.moe.experts",
            router="moe.gate.weight",
            activations=("silu", "swiglustep"),
            beside=("moe.router_bias", "share_expert.up_proj.weight"),
            elsewhere=("model.layers.3.moe.experts.0.up_proj.weight",),
        )
        for model_type, prefix in (("step3p5", ""), ("step3p7", "language_model."))
    ),
    *(
        qwen_like(
            model_type,
            config={"first_k_dense_replace": 1},
            layers=(1, 2),
            beside=("mlp.gate.expert_bias", "mlp.shared_experts.up_proj.weight"),
            elsewhere=("model.layers.0.attention.dense.weight",),
        )
        for model_type in ("bailing_moe", "bailing_moe_v2", "bailing_hybrid")
    ),
    qwen_like(
        "grok-1",
        config={"intermediate_size": INNER, "moe_intermediate_size": None, "hidden_act": "gelu"},
        place="model.layers.{}.moe_block.experts",
        vllm="model.layers.{}.moe_block.experts",
        names=("linear", "linear_v", "linear_1"),
        router="moe_block.gate.weight",
        activation="gelu",
        served=False,
    ),
    mixtral_like("git", activation="gelu", config={"hidden_act": "gelu"}, served=False),
    qwen_like(
        "afmoe",
        config={"num_dense_layers": 1},
        layers=(1, 2),
        router="mlp.router.gate.weight",
        beside=("mlp.expert_bias",),
    ),
    deepseek_like("solar_open"),
    qwen_like("exaone_moe", config={"mlp_layer_types": ["dense", "sparse", "sparse"]}, layers=(1, 2)),
    qwen_like(
        "cohere2_moe",
        config={
            "intermediate_size": INNER,
            "moe_intermediate_size": None,
            "mlp_layer_types": ["dense", "sparse", "sparse"],
        },
        layers=(1, 2),
    ),
    deepseek_like("mimo_v2_flash", config={"moe_layer_freq": [0, 1, 1]}),
    *(
        qwen_like(model_type, config={"first_k_dense_replace": 1, "moe_layer_freq": 2}, layers=(1,))
        for model_type in ("sarvam_moe", "sarvam_mla")
    ),
    deepseek_like(
        "longcat_flash",
        config={"num_layers": 3, "num_hidden_layers": 6, "first_k_dense_replace": None},
        layers=(0, 1, 2),
        router="mlp.router.classifier.weight",
        beside=("mlps.0.up_proj.weight",),
    ),
    qwen_like(
        "gemma4",
        text="gemma4_text",
        config={"hidden_act": None, "hidden_activation": "gelu_pytorch_tanh"},
        place="model.language_model.layers.{}.experts",
        vllm="language_model.model.layers.{}.experts",
        router="router.proj.weight",
        beside=("mlp.up_proj.weight",),
        activation="gelu_tanh",
    ),
    qwen_like(
        "aria",
        text="aria_text",
        config={"moe_num_experts": E, "num_experts": None, "intermediate_size": INNER, "moe_intermediate_size": None},
        router="mlp.router.weight",
        beside=("mlp.shared_experts.up_proj.weight",),
        **_LM,
    ),
)
