"""Config entries that change what stored numbers mean, and entries in a form that means nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.checkpoints import Edit, RawTensor, Tensors, make_checkpoint
from tests.support.plans import plan_made, plan_of, refusal

from humming_convert.errors import CheckpointError, UnsupportedError

EXPERTS = "model.layers.0.mlp.experts"
W13 = f"{EXPERTS} w13"
SECTION = "config.json: quantization_config"
HADAMARD = {"config_groups": {"u": {"type": "hadamard", "apply": [{"targets": ["Linear"], "location": "input"}]}}}


def section(**fields: Any) -> Edit:  # noqa: ANN401 - JSON values
    return lambda tensors, config: config["quantization_config"].update(fields)


def group(part: str = "", **fields: Any) -> Edit:  # noqa: ANN401 - JSON values
    """Change the only config group, or its `weights` or `input_activations`."""

    def edit(tensors: Tensors, config: dict[str, Any]) -> None:
        held = config["quantization_config"]["config_groups"]["group_0"]
        if not part:
            held.update(fields)
        else:
            held[part] = (held[part] or {}) | fields

    return edit


def without(ending: str, tensors: Tensors) -> None:
    for name in [name for name in tensors if ".experts." in name and name.endswith(ending)]:
        del tensors[name]


class TestTransforms:
    @pytest.mark.parametrize("key", ["transform_config", "rotation_config", "hadamard_config"])
    @pytest.mark.parametrize("form", ["ct_int4", "awq", "fp8_block"])
    def test_a_transform_is_refused_by_name(self, tmp_path: Path, form: str, key: str) -> None:
        text = refusal(tmp_path, UnsupportedError, format=form, edit=section(**{key: HADAMARD}))
        assert text.startswith(f"{SECTION}: expected no {key}, found \"{{'config_groups': {{'u': {{'type': 'hadamard'")
        assert text.endswith("; Humming's kernels do not transform activations: quantize again without it")

    def test_a_rotation_of_single_layers(self, tmp_path: Path) -> None:
        edit = section(extra_config={".*down_proj": {"bits": 4, "rotation_config": {"block_size": 32}}})
        text = refusal(tmp_path, UnsupportedError, format="awq", edit=edit)
        assert text.startswith(f"{SECTION}: expected no extra_config: .*down_proj: rotation_config, found ")

    @pytest.mark.parametrize("empty", [None, {}, {"config_groups": {}}, {"config_groups": None}])
    def test_an_empty_transform_is_none(self, tmp_path: Path, empty: object) -> None:
        edit = section(transform_config=empty, extra_config={"x": {"rotation_config": None}})
        assert len(plan_made(tmp_path, format="ct_int4", edit=edit).layers) == 2

    @pytest.mark.parametrize("text", ["sparse-24-bitmask", "sparse-bitmask", "marlin-24"])
    def test_sparse_weights(self, tmp_path: Path, text: str) -> None:
        edit = section(sparsity_config={"format": text, "sparsity_structure": "2:4"})
        assert refusal(tmp_path, UnsupportedError, format="ct_int4", edit=edit) == (
            f"{SECTION}: expected sparsity_config with format dense, found {text!r}; "
            "sparse weights are not supported: save it without sparse compression"
        )

    @pytest.mark.parametrize("value", [None, {}, {"format": "dense", "global_sparsity": 0.1}, {"format": None}])
    def test_dense_weights(self, tmp_path: Path, value: object) -> None:
        assert len(plan_made(tmp_path, format="ct_int4", edit=section(sparsity_config=value)).layers) == 2


class TestConfigGroups:
    @pytest.mark.parametrize("targets", ["Linear", [], None, [5], {"a": 1}])
    def test_targets_that_are_none(self, tmp_path: Path, targets: object) -> None:
        text = refusal(tmp_path, CheckpointError, format="ct_int4", edit=group(targets=targets)).splitlines()[0]
        assert text == (
            f"{W13}: expected config group group_0 with targets, a list of names or patterns, found {str(targets)!a}"
        )

    @pytest.mark.parametrize("entry", [5, None, []])
    def test_a_group_that_is_none(self, tmp_path: Path, entry: object) -> None:
        edit = section(config_groups={"g": entry})
        text = refusal(tmp_path, CheckpointError, format="ct_int4", edit=edit).splitlines()[0]
        assert text.startswith(f"{W13}: expected config group g with targets, a list of names or patterns, found ")

    @pytest.mark.parametrize("part", ["weights", "input_activations"])
    @pytest.mark.parametrize(
        ("field", "value", "expected"),
        [
            ("num_bits", "8", "a whole number of bits"),
            ("num_bits", True, "a whole number of bits"),
            ("num_bits", 0, "a whole number of bits"),
            ("type", "x", "int or float"),
            ("type", ["int"], "int or float"),
            ("symmetric", "false", "true or false"),
            ("symmetric", 0, "true or false"),
            ("dynamic", "yes", "true, false or local"),
            ("group_size", "128", "a whole number"),
            ("strategy", ["group"], "a name"),
            ("actorder", ["group"], "a name"),
        ],
    )
    def test_a_field_of_another_form(self, tmp_path: Path, part: str, field: str, value: object, expected: str) -> None:
        text = refusal(tmp_path, CheckpointError, format="ct_int4", edit=group(part, **{field: value})).splitlines()[0]
        assert text == f"{W13}: expected {expected} as {field} in {part} of config group group_0, found {str(value)!a}"

    @pytest.mark.parametrize(("value", "is_known"), [("torch.int8", True), (None, True), ("torch.float16", False)])
    def test_the_dtype_of_zero_points(self, tmp_path: Path, value: str | None, is_known: bool) -> None:
        edit = group("weights", zp_dtype=value)
        if is_known:
            assert len(plan_made(tmp_path, format="ct_int4_asym", edit=edit).layers) == 2
            return
        text = refusal(tmp_path, UnsupportedError, format="ct_int4_asym", edit=edit)
        assert text == f"{W13} and 3 more: expected zp_dtype torch.int8 in config group group_0, found {value!r}"

    def test_quantized_outputs(self, tmp_path: Path) -> None:
        edit = group(output_activations={"num_bits": 8, "type": "float"})
        assert refusal(tmp_path, UnsupportedError, format="ct_int4", edit=edit) == (
            f"{W13} and 3 more: expected outputs that are not quantized, "
            "found output_activations in config group group_0"
        )

    def test_a_scheme_of_the_cache_does_not_matter(self, tmp_path: Path) -> None:
        edit = section(kv_cache_scheme={"num_bits": 8, "type": "float"})
        assert len(plan_made(tmp_path, format="ct_int4", edit=edit).layers) == 2


class TestAwq:
    @pytest.mark.parametrize(
        ("fields", "reason"),
        [
            ({"zero_point": True}, "as zero_point true says"),
            ({}, "which only a config with zero_point false can spare"),
            ({"sym": False}, "as sym false says"),
        ],
    )
    @pytest.mark.parametrize("method", ["awq", "auto-round"])
    def test_missing_zero_points(self, tmp_path: Path, method: str, fields: dict[str, bool], reason: str) -> None:
        def edit(tensors: Tensors, config: dict[str, Any]) -> None:
            without("qzeros", tensors)
            config["quantization_config"] = {"quant_method": method, "bits": 4, "group_size": 128, **fields}

        text = refusal(tmp_path, CheckpointError, format="awq", edit=edit).splitlines()[0]
        assert text.startswith(f"{W13}: expected {EXPERTS}.0.gate_proj.qzeros, {reason}, found qweight I32")

    def test_nor_can_a_bare_file_spare_them(self, tmp_path: Path) -> None:
        path = make_checkpoint(tmp_path / "m", format="awq", edit=lambda t, c: without("qzeros", t))
        (path / "config.json").unlink()
        with pytest.raises(CheckpointError, match="qzeros, which only a config with zero_point false can spare"):
            plan_of(path / "model.safetensors")

    @pytest.mark.parametrize("fields", [{"zero_point": False}, {"zero_point": None, "sym": True}])
    def test_symmetric_weights_need_none(self, tmp_path: Path, fields: dict[str, Any]) -> None:
        def edit(tensors: Tensors, config: dict[str, Any]) -> None:
            without("qzeros", tensors)
            config["quantization_config"].update(fields)

        assert plan_made(tmp_path, format="awq", edit=edit).layers[0].sublayers[0].weight_schema["zero_point"] is False

    def test_zero_points_that_are_there_count(self, tmp_path: Path) -> None:
        part = plan_made(tmp_path, format="awq", edit=section(zero_point=None)).layers[0].sublayers[0]
        assert part.weight_schema["zero_point"] is True

    def test_zero_points_of_symmetric_codes_must_be_the_middle(self, tmp_path: Path) -> None:
        part = plan_made(tmp_path, format="awq", edit=section(zero_point=None, sym=True)).layers[0].sublayers[0]
        assert part.weight_schema["zero_point"] is False
        assert [tensor.check for tensor in part.tensors if tensor.name == "qzeros"] == ["eights"]

    @pytest.mark.parametrize(
        ("fields", "expected"),
        [
            ({"zero_point": "false"}, "zero_point true or false in the quantization config, found 'false'"),
            ({"bits": "4"}, "bits, a whole number, in the quantization config, found '4'"),
            ({"group_size": [128]}, "groups of [128], as the quantization config says, found groups of 128"),
        ],
    )
    def test_a_field_of_another_form(self, tmp_path: Path, fields: dict[str, Any], expected: str) -> None:
        text = refusal(tmp_path, CheckpointError, format="awq", edit=section(**fields)).splitlines()[0]
        assert text == f"{W13}: expected {expected}"


class TestSizes:
    @pytest.mark.parametrize("form", ["fp8_tensor", "fp8_block", "ct_fp8_channel", "ct_w8a8", "ct_mxfp4"])
    def test_nothing_at_all(self, tmp_path: Path, form: str) -> None:
        text = refusal(tmp_path, CheckpointError, format=form, intermediate=0).splitlines()[0]
        assert text.startswith(f"{W13}: expected weight")
        assert " that holds something, found [[0, " in text

    @pytest.mark.parametrize("form", ["fp8_tensor", "ct_fp8_tensor", "ct_fp8_channel"])
    def test_rows_that_do_not_fill_words(self, tmp_path: Path, form: str) -> None:
        assert refusal(tmp_path, UnsupportedError, format=form, intermediate=30) == (
            f"{EXPERTS} w2 and 1 more: expected K (columns of weight) that is a multiple of 4, found 30"
        )
        plan_made(tmp_path / "b", format=form, intermediate=36)

    def test_fused_blocks_of_nothing(self, tmp_path: Path) -> None:
        text = refusal(tmp_path, CheckpointError, family="gpt_oss", format="mxfp4_gpt_oss", intermediate=0)
        assert text.splitlines()[0] == f"{W13}: expected blocks that hold something, found [4, 0, 8, 16]"


class TestMissingCompanions:
    @pytest.mark.parametrize(
        ("form", "ending", "expected"),
        [
            ("fp8_block", "weight_scale_inv", "weight_scale_inv or weight_scale beside weight F8_E4M3"),
            ("ct_int4", "weight_scale", "weight_scale beside weight_packed I32"),
            ("ct_mxfp4", "weight_scale", "weight_scale beside weight_packed U8"),
            ("ct_w8a8", "weight_scale", "weight_scale beside weight I8"),
            ("awq", "scales", "scales beside qweight I32"),
            ("fp8_block", ".weight", "a weight beside its scales"),
        ],
    )
    def test_the_missing_tensor_is_named(self, tmp_path: Path, form: str, ending: str, expected: str) -> None:
        text = refusal(tmp_path, UnsupportedError, format=form, edit=lambda t, c: without(ending, t))
        assert text.startswith(f"{W13} and 3 more: expected {expected}, found ")
        assert text.endswith("; fetch the missing shards, or quantize again; under another name it is not known here")

    def test_a_trace_of_what_was_tried_stays_short(self, tmp_path: Path) -> None:
        def edit(tensors: Tensors, config: dict[str, Any]) -> None:
            for name in [name for name in tensors if ".experts." in name and name.endswith(".weight")]:
                tensors[name] = RawTensor("F8_E5M2", np.zeros((256, 256), np.uint8))

        assert refusal(tmp_path, UnsupportedError, edit=edit) == (
            f"{W13} and 3 more: expected a supported checkpoint format, found weight F8_E5M2 [256, 256], "
            "weight_scale_inv F32 [2, 2]; not humming: quant_method is fp8; none of fp8-tensor, fp8-block, "
            "mxfp4-gpt-oss, ct-mxfp4, awq, gptq, ct-pack-quantized, ct-int8, ct-float8, ct-nvfp4, quark-int4"
        )
