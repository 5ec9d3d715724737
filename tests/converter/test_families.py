from __future__ import annotations

import pytest

from humming_convert.expert_names import ExpertName, parse_expert_name
from humming_convert.families import (
    BY_MODEL_TYPE,
    FAMILIES,
    family_from_names,
)


@pytest.mark.parametrize(
    ("leaf", "projection"),
    [
        ("gate_proj", "gate"),
        ("up_proj", "up"),
        ("down_proj", "down"),
        ("w1", "gate"),
        ("w3", "up"),
        ("w2", "down"),
        ("wgate", "gate"),
        ("linear", "gate"),
        ("linear_v", "up"),
        ("linear_1", "down"),
    ],
)
def test_every_alias_is_known_in_every_place(leaf: str, projection: str) -> None:
    for parent in ("mlp", "block_sparse_moe", "feed_forward", "mixer"):
        head = f"model.layers.12.{parent}.experts"
        expected = ExpertName(head, "model.", 12, parent, 7, projection, "weight_scale")
        assert parse_expert_name(f"{head}.7.{leaf}.weight_scale") == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("layers.3.ffn.experts.0.w1.scale", ("layers.3.ffn.experts", "", 3, "ffn", 0, "gate", "scale")),
        (
            "model.language_model.layers.4.mlp.experts.1.down_proj.weight",
            (
                "model.language_model.layers.4.mlp.experts",
                "model.language_model.",
                4,
                "mlp",
                1,
                "down",
                "weight",
            ),
        ),
        (
            "model.layers.0.mlp.experts.gate_up_proj_blocks",
            ("model.layers.0.mlp.experts", "model.", 0, "mlp", None, "gate_up", "blocks"),
        ),
        (
            "model.layers.0.mlp.experts.down_proj",
            ("model.layers.0.mlp.experts", "model.", 0, "mlp", None, "down", ""),
        ),
        (
            "model.layers.0.mlp.experts.down_proj_weight_scale_2",
            ("model.layers.0.mlp.experts", "model.", 0, "mlp", None, "down", "weight_scale_2"),
        ),
        (
            "model.language_model.layers.4.experts.down_proj",
            ("model.language_model.layers.4.experts", "model.language_model.", 4, "", None, "down", ""),
        ),
        (
            "model.layers.4.moe.gate_proj.weight_scale_inv",
            ("model.layers.4.moe.experts", "model.", 4, "moe", None, "gate", "weight_scale_inv"),
        ),
        (
            "model.layers.4.block_sparse_moe.input_linear.weight",
            ("model.layers.4.block_sparse_moe.experts", "model.", 4, "block_sparse_moe", None, "gate_up", "weight"),
        ),
        (
            "mtp.layers.0.mlp.experts.3.up_proj.weight",
            ("mtp.layers.0.mlp.experts", "mtp.", 0, "mlp", 3, "up", "weight"),
        ),
    ],
)
def test_names(name: str, expected: tuple[object, ...]) -> None:
    assert parse_expert_name(name) == expected


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.mlp.shared_experts.gate_proj.weight",
        "model.layers.0.mlp.shared_expert.gate_proj.weight",
        "model.layers.0.mlp.gate.weight",
        "model.layers.0.moe.gate.weight",
        "model.layers.0.shared_mlp.input_linear.weight",
        "model.layers.0.block_sparse_moe.router.layer.weight",
        "model.layers.0.mlp.gate.e_score_correction_bias",
        "model.layers.0.mlp.experts.0.other_proj.weight",
        "model.layers.0.mlp.experts.x.gate_proj.weight",
        "model.layers.0.mlp.experts.0.gate_proj",
        "model.layers.0.mlp.experts.12345678.gate_proj.weight",
        "model.layers.12345678.mlp.experts.0.gate_proj.weight",
        "experts.0.gate_proj.weight",
        "model.embed_tokens.weight",
    ],
)
def test_what_is_no_routed_experts_tensor(name: str) -> None:
    assert parse_expert_name(name) is None


def test_rows_have_distinct_names_and_model_types() -> None:
    types = [model_type for row in FAMILIES for model_type in row.model_types]
    assert len(types) == len(set(types)) == len(BY_MODEL_TYPE)
    assert len({row.name for row in FAMILIES}) == len(FAMILIES)


@pytest.mark.parametrize(
    ("model_type", "config", "expected"),
    [
        ("mixtral", {}, [0, 1, 2, 3, 4, 5]),
        ("qwen3_moe", {}, [0, 1, 2, 3, 4, 5]),
        ("qwen3_moe", {"decoder_sparse_step": 2}, [1, 3, 5]),
        ("qwen2_moe", {"mlp_only_layers": [0, 3]}, [1, 2, 4, 5]),
        ("qwen2_moe", {"mlp_only_layers": [1], "decoder_sparse_step": 2}, [3, 5]),
        ("deepseek_v3", {"first_k_dense_replace": 3}, [3, 4, 5]),
        ("deepseek_v2", {"first_k_dense_replace": 1, "moe_layer_freq": 2}, [2, 4]),
        ("glm4_moe", {"first_k_dense_replace": 1}, [1, 2, 3, 4, 5]),
        ("gpt_oss", {}, [0, 1, 2, 3, 4, 5]),
    ],
)
def test_layer_rules(model_type: str, config: dict[str, object], expected: list[int]) -> None:
    row = BY_MODEL_TYPE[model_type]
    assert [layer for layer in range(6) if row.is_moe_layer(config, layer)] == expected


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["model.layers.0.mlp.experts.gate_up_proj_blocks"], "gpt_oss"),
        (["model.layers.0.block_sparse_moe.experts.0.w1.weight"], "mixtral"),
        (["model.layers.0.mlp.experts.0.up_proj.weight", "model.layers.0.mlp.shared_expert.x"], "qwen2_moe"),
        (
            ["model.layers.0.mlp.experts.0.up_proj.weight", "model.layers.0.mlp.shared_experts.x"],
            "deepseek_v3",
        ),
        (["model.layers.0.mlp.experts.0.up_proj.weight"], "qwen3_moe"),
        (["backbone.layers.0.mixer.experts.0.up_proj.weight"], "nemotron_h"),
        (["model.layers.0.moe_block.experts.0.linear.weight"], "grok"),
        (["layers.0.ffn.experts.0.w1.weight"], "deepseek_v4"),
        (["model.layers.0.moe.gate_proj.weight"], "step3"),
        (["model.layers.0.feed_forward.experts.0.w1.weight"], "lfm2_moe"),
    ],
)
def test_a_file_without_config_is_told_by_its_names(names: list[str], expected: str) -> None:
    assert family_from_names(names).name == expected
