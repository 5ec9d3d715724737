"""Faults that were reported of other programs, about names and layers (the survey's D5 to D8, D11, D15 to D25)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.checkpoints import RawTensor, Tensors, bf16, make_checkpoint
from tests.support.family_case import Case
from tests.support.family_cases import CASES
from tests.support.family_checkpoints import expert_tensors, make_family, make_values, other_tensors, write_model
from tests.support.plans import assert_whole, group_of, plan_of, refusal

from humming_convert.errors import CheckpointError, UnsupportedError
from humming_convert.options import ConvertOptions
from humming_convert.pipeline import convert_checkpoint
from humming_convert.target import Target
from humming_convert.verify import verify
from humming_convert.verify_output import read_manifest


def case_of(model_type: str) -> Case:
    return next(case for case in CASES if case.model_type == model_type)


def digests(path: Path, out: Path, tp_size: int = 1) -> list[str]:
    """Checksums of all packed tensors in order of name, of an output that was verified."""
    convert_checkpoint(ConvertOptions(source=path, out=out, target=Target(90), workers=1, tp_size=tp_size))
    verify(out, path)
    layers = read_manifest(out).layers.values()
    return [one.sha256 for layer in layers for part in layer.sublayers.values() for one in part.tensors.values()]


@pytest.mark.parametrize("names", ["hub", "linear"])
def test_d5_a_regex_target_finds_experts_under_any_of_their_names(tmp_path: Path, names: str) -> None:
    def edit(tensors: Tensors, config: dict[str, Any]) -> None:
        group_of(config)["targets"] = [r"re:.*block_sparse_moe\.experts\.\d+\..*"]

    path = make_checkpoint(tmp_path / "m", "mixtral", "ct_int4", names=names, edit=edit)
    plan = plan_of(path)
    assert [part.format for layer in plan.layers for part in layer.sublayers] == ["ct-pack-quantized"] * 4


def test_d6_granite_split_into_experts_leaves_none_behind(tmp_path: Path) -> None:
    path = make_family(tmp_path / "m", case_of("granitemoe"), "ct_int4")
    plan = plan_of(path)
    assert_whole(path, plan)
    assert len(plan.layers) == 3
    assert not [name for name in plan.passthrough if ".experts." in name]


@pytest.mark.parametrize("name", [f"mtp.layers.0.mlp.experts.{leaf}" for leaf in ("gate_up_proj", "0.up_proj.weight")])
def test_d7_plain_experts_for_token_prediction_pass_through(tmp_path: Path, name: str) -> None:
    def edit(tensors: Tensors, config: dict[str, Any]) -> None:
        tensors[name] = bf16(np.zeros((4, 8, 8)))
        tensors["mtp.fc.weight"] = bf16(np.zeros((8, 8)))

    path = make_checkpoint(tmp_path / "m", edit=edit)
    plan = plan_of(path)
    assert_whole(path, plan)
    assert {name, "mtp.fc.weight"} <= set(plan.passthrough)
    assert len(plan.layers) == 2


def test_d8_a_layer_excluded_leaf_by_leaf_passes_through_whole(tmp_path: Path) -> None:
    def edit(tensors: Tensors, config: dict[str, Any]) -> None:
        excluded = []
        for name in [name for name in tensors if name.startswith("model.layers.2.mlp.experts.")]:
            tensor = tensors.pop(name)
            if name.endswith(".weight"):
                tensors[name] = bf16(np.zeros(tensor.array.shape))
                excluded.append(name.removesuffix(".weight"))
        config["quantization_config"]["modules_to_not_convert"] = excluded

    path = make_checkpoint(tmp_path / "m", layers=4, edit=edit)
    plan = plan_of(path)
    assert_whole(path, plan)
    assert [layer.layer_name.split(".")[2] for layer in plan.layers] == ["0", "1", "3"]


@pytest.mark.parametrize("naming", ["fused", "transposed"])
@pytest.mark.parametrize("model_type", ["qwen3_vl_moe", "qwen3_5_moe", "llama4", "hy_v4", "gemma4"])
def test_d11_d15_fused_experts_are_the_single_ones_bytes(tmp_path: Path, model_type: str, naming: str) -> None:
    # 256 x 256 for gate and up: which way round it is, only down can tell.
    case = case_of(model_type)
    values, writer = make_values(case, "fp8_block")
    others = other_tensors(case)
    single = write_model(tmp_path / "single", case, others | expert_tensors(case, values, "gate_proj"), writer)
    fused = write_model(tmp_path / "fused", case, others | expert_tensors(case, values, naming), writer)
    assert digests(fused, tmp_path / "fused-out") == digests(single, tmp_path / "single-out")


def test_transposed_experts_are_cut_for_ranks_like_single_ones(tmp_path: Path) -> None:
    case = case_of("qwen3_vl_moe")
    case = replace(case, intermediate=256, config=case.config | {"moe_intermediate_size": 256})
    values, writer = make_values(case, "fp8_block")
    others = other_tensors(case)
    single = write_model(tmp_path / "single", case, others | expert_tensors(case, values), writer)
    turned = write_model(tmp_path / "turned", case, others | expert_tensors(case, values, "transposed"), writer)
    assert digests(turned, tmp_path / "turned-out", 2) == digests(single, tmp_path / "single-out", 2)


def test_experts_without_a_gate_are_cut_for_ranks(tmp_path: Path) -> None:
    path = make_family(tmp_path / "m", case_of("nemotron_h"), "ct_fp8_channel")
    digests(path, tmp_path / "out", 2)
    assert {layer.sublayers["w13"].shape_n for layer in read_manifest(tmp_path / "out").layers.values()} == {64}


def test_d11_a_scale_that_is_turned_the_other_way_than_its_weight_is_refused(tmp_path: Path) -> None:
    case = case_of("qwen3_vl_moe")
    values, writer = make_values(case, "fp8_block")
    tensors = other_tensors(case) | expert_tensors(case, values, "transposed")
    for name in [name for name in tensors if name.endswith("down_proj_scale_inv")]:
        tensors[name] = RawTensor("F32", np.ascontiguousarray(tensors[name].array.swapaxes(1, 2)))
    path = write_model(tmp_path / "m", case, tensors, writer)
    with pytest.raises(CheckpointError, match="weight_scale_inv"):
        plan_of(path)


@pytest.mark.parametrize("suffix", ["gate_up_proj_scale_inv", "down_proj_scale_inv", "gate_up_proj"])
def test_a_fused_tensor_that_is_missing(tmp_path: Path, suffix: str) -> None:
    case = case_of("qwen3_5_moe")
    values, writer = make_values(case, "fp8_block")
    tensors = other_tensors(case) | expert_tensors(case, values, "fused")
    del tensors[f"model.language_model.layers.1.mlp.experts.{suffix}"]
    path = write_model(tmp_path / "m", case, tensors, writer)
    with pytest.raises((CheckpointError, UnsupportedError), match=r"model\.language_model\.layers\.1\.mlp\.experts"):
        plan_of(path)


@pytest.mark.parametrize("naming", ["gate_proj", "fused"])
def test_d16_no_index_is_needed(tmp_path: Path, naming: str) -> None:
    case = case_of("qwen3_5_moe")
    values, writer = make_values(case, "fp8_block")
    path = write_model(tmp_path / "m", case, other_tensors(case) | expert_tensors(case, values, naming), writer)
    assert [file.name for file in path.glob("*.safetensors*")] == ["model.safetensors"]
    assert len(plan_of(path).layers) == 3


@pytest.mark.parametrize("key", ["modules_to_not_convert", "ignored_layers"])
def test_d19_the_bare_word_gate_is_no_gate_proj(tmp_path: Path, key: str) -> None:
    def edit(tensors: Tensors, config: dict[str, Any]) -> None:
        config["quantization_config"][key] = ["gate", "e_score_correction_bias", "lm_head", "model.layers.1"]

    path = make_checkpoint(tmp_path / "m", layers=11, experts=2, hidden=128, intermediate=128, edit=edit)
    assert len(plan_of(path).layers) == 11


def test_d21_experts_without_a_gate_have_as_many_rows_as_the_intermediate_size(tmp_path: Path) -> None:
    case = case_of("nemotron_h")
    path = make_family(tmp_path / "m", case, "ct_int4")
    digests(path, tmp_path / "out")
    for layer in read_manifest(tmp_path / "out").layers.values():
        w13 = layer.sublayers["w13"]
        assert (layer.is_gated, layer.activation_function) == (False, "relu2_no_mul")
        assert (w13.shape_n, w13.shape_n_stacks) == (case.intermediate, (case.intermediate,))


def test_d21_a_gate_where_there_should_be_none_is_not_dropped(tmp_path: Path) -> None:
    case = case_of("nemotron_h")
    values, writer = make_values(case, "ct_int4")
    tensors = other_tensors(case) | expert_tensors(case, values)
    name = "backbone.layers.0.mixer.experts.1.gate_proj.weight_packed"
    tensors[name] = tensors[name.replace("gate_proj", "up_proj")]
    path = write_model(tmp_path / "m", case, tensors, writer)
    with pytest.raises(CheckpointError) as raised:
        plan_of(path)
    assert str(raised.value) == f"tensor {name}: expected no other projections than down, up, found one more"


def test_d24_d25_every_byte_of_every_expert_is_accounted_for(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "m", "qwen2_moe", "ct_int4", shards=3)
    plan = plan_of(path)
    assert_whole(path, plan)


@pytest.mark.parametrize(
    ("model_type", "field", "value", "expected"),
    [
        ("nemotron_h", "layers_block_type", ["moe", "moe", "moe"], "those of layer 1, as config.json says, found none"),
        ("jamba", "expert_layer_offset", 0, "none in dense layers, as config.json says, found those of layer 1"),
        ("lfm2_moe", "num_dense_layers", 0, "those of layer 0, as config.json says, found none"),
        ("hunyuan_v1_moe", "moe_intermediate_size", [128, 64, 128], "moe_intermediate_size 64, as config.json says"),
        ("olmoe", "num_hidden_layers", 4, "those of layer 3, as config.json says, found none"),
        ("nemotron_h", "moe_latent_size", 512, "moe_latent_size 512, as config.json says, found 256"),
        ("afmoe", "num_experts", 5, "5 experts, found 4: expert 4 missing"),
        ("mixtral", "hidden_act", "strange", "one of silu, swish, gelu"),
    ],
)
def test_what_the_config_says_is_held_against_the_tensors(
    tmp_path: Path, model_type: str, field: str, value: object, expected: str
) -> None:
    case = case_of(model_type)
    values, writer = make_values(case, "ct_int4")
    changed = replace(case, config=case.config | {field: value})
    path = write_model(tmp_path / "m", changed, other_tensors(case) | expert_tensors(case, values), writer)
    with pytest.raises(CheckpointError) as raised:
        plan_of(path)
    assert f"expected {expected}" in str(raised.value)


def test_a_router_must_be_there(tmp_path: Path) -> None:
    def edit(tensors: Tensors, config: dict[str, Any]) -> None:
        del tensors["model.layers.0.mlp.gate.weight"]

    assert refusal(tmp_path, CheckpointError, edit=edit) == (
        "tensor model.layers.0.mlp.gate.weight: expected the router of converted experts, found none; "
        "fetch the missing shards"
    )
