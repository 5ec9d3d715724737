"""GPTQ's packing: what it asks of a sublayer and its config, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.checkpoints import Edit, RawTensor, Tensors
from tests.support.integer_checkpoints import (
    Integers,
    auto_round_config,
    gptq_config,
    make_integers,
    write_gptq,
)
from tests.support.plans import EXPERTS, W13, first, plan_of

from humming_convert.errors import CheckpointError, ConvertError, UnsupportedError
from humming_convert.options import ConvertOptions
from humming_convert.pipeline import convert_checkpoint
from humming_convert.plan import ConversionPlan
from humming_convert.target import Target

NO_ORDER = "Humming's kernels have no g_idx: quantize again without activation order (desc_act false)"


def made(tmp_path: Path, edit: Edit | None = None, offset: int = 1, sym: bool = True, **fields: Any) -> Path:  # noqa: ANN401
    """A GPTQ checkpoint of one layer with two experts; `fields` go into its config."""
    integers = Integers(sym=sym, most_zero=None if sym else 14)
    config = gptq_config(integers, **fields)
    return make_integers(tmp_path / "made", integers, write_gptq(offset), config, edit=edit, layers=1, experts=2)


def plan(tmp_path: Path, *args: Any, **options: Any) -> ConversionPlan:  # noqa: ANN401
    return plan_of(made(tmp_path, *args, **options))


def refused(error: type[ConvertError], path: Path) -> str:
    """What the plan of `path` is refused with."""
    with pytest.raises(error) as raised:
        plan_of(path)
    assert type(raised.value) is error
    return str(raised.value)


def refused_while_converting(error: type[ConvertError], path: Path) -> str:
    """What converting `path` is refused with, leaving nothing behind."""
    with pytest.raises(error) as raised:
        convert_checkpoint(ConvertOptions(source=path, out=path.parent / "out", target=Target(90), workers=2))
    assert type(raised.value) is error
    assert list(path.parent.iterdir()) == [path]
    return str(raised.value)


def without(ending: str, keep: int = 0) -> Edit:
    """An edit that drops the tensors of that name, all but the first `keep`."""

    def edit(tensors: Tensors, config: dict[str, Any]) -> None:
        for name in [name for name in tensors if name.endswith(ending)][keep:]:
            del tensors[name]

    return edit


class TestGIdx:
    @pytest.mark.parametrize("desc_act", [True, False])
    def test_columns_in_another_order_whatever_the_config_says(self, tmp_path: Path, desc_act: bool) -> None:
        def edit(tensors: Tensors, config: dict[str, Any]) -> None:
            tensors[f"{EXPERTS}.1.up_proj.g_idx"].array[[5, 200]] = [1, 0]

        text = refused_while_converting(UnsupportedError, made(tmp_path, edit, desc_act=desc_act))
        assert text == (
            f"tensor {EXPERTS}.1.up_proj.g_idx: expected columns in the order of their groups of 128, "
            f"found column 5 in group 1; {NO_ORDER}"
        )

    def test_many_are_named_by_a_few(self, tmp_path: Path) -> None:
        def edit(tensors: Tensors, config: dict[str, Any]) -> None:
            for name in tensors:
                if name.endswith("g_idx"):
                    tensors[name].array[0] = 1

        lines = refused_while_converting(UnsupportedError, made(tmp_path, edit, desc_act=True)).splitlines()
        assert len(lines) == 5
        assert lines[-1] == (
            f"tensor {EXPERTS}.0.down_proj.g_idx and 1 more: expected columns in the order of their groups of 128, "
            f"found likewise; {NO_ORDER}"
        )

    def test_activation_order_over_one_group_is_none(self, tmp_path: Path) -> None:
        integers = Integers(group=-1)
        config = gptq_config(integers, desc_act=True)
        path = make_integers(tmp_path / "made", integers, write_gptq(1), config, layers=1, experts=2)
        found = plan_of(path)
        assert "desc_act is true: whether columns are in order is told by g_idx" in " ".join(found.notes)
        convert_checkpoint(ConvertOptions(source=path, out=tmp_path / "out", target=Target(90), workers=2))

    def test_it_is_claimed_and_read(self, tmp_path: Path) -> None:
        w13, _ = plan(tmp_path).layers[0].sublayers
        assert dict(w13.checks)[f"{EXPERTS}.0.gate_proj.g_idx"] == "columns:128"
        assert f"{EXPERTS}.1.up_proj.g_idx" in w13.unused

    def test_another_length(self, tmp_path: Path) -> None:
        def edit(tensors: Tensors, config: dict[str, Any]) -> None:
            for name in [name for name in tensors if name.endswith("gate_proj.g_idx")]:
                tensors[name] = RawTensor("I32", np.zeros(128, np.int32))

        text = refused(CheckpointError, made(tmp_path, edit))
        assert first(text) == f"{W13}: expected g_idx of shape [256], found [128]"


class TestZeroPoints:
    def test_code_15_of_the_first_format_cannot_be_told(self, tmp_path: Path) -> None:
        def edit(tensors: Tensors, config: dict[str, Any]) -> None:
            tensors[f"{EXPERTS}.0.down_proj.qzeros"].array[0, 0] = -1

        text = refused_while_converting(CheckpointError, made(tmp_path, edit, sym=False))
        assert text == (
            f"tensor {EXPERTS}.0.down_proj.qzeros: expected zero points stored one less, below 15, "
            "found 8 of 512 that are 15; "
            "a zero point of 0 cannot be told from one of 2**bits here: save it as gptq_v2, or quantize again"
        )

    @pytest.mark.parametrize("stored", [0, 6, 9])
    def test_symmetric_weights_whose_zero_points_are_elsewhere(self, tmp_path: Path, stored: int) -> None:
        def edit(tensors: Tensors, config: dict[str, Any]) -> None:
            tensors[f"{EXPERTS}.1.gate_proj.qzeros"].array[:] = np.int32(stored * 0x11111111 - (stored > 7) * (1 << 32))

        text = refused_while_converting(CheckpointError, made(tmp_path, edit))
        assert text == (
            f"tensor {EXPERTS}.1.gate_proj.qzeros: expected zero points that are all 7 or all 8, "
            f"as symmetric weights have, found {stored}; "
            "the quantization config says symmetric; if that is wrong, correct it with --quant-config"
        )

    def test_symmetric_weights_need_none(self, tmp_path: Path) -> None:
        w13, _ = plan(tmp_path, without("qzeros")).layers[0].sublayers
        assert {tensor.name for tensor in w13.tensors} == {"weight", "weight_scale"}

    def test_none_at_all(self, tmp_path: Path) -> None:
        text = refused(CheckpointError, made(tmp_path, without("qzeros"), sym=False))
        assert first(text).startswith(f"{W13}: expected {EXPERTS}.0.gate_proj.qzeros, as sym false says, found qweight")

    def test_one_expert_without(self, tmp_path: Path) -> None:
        text = refused(CheckpointError, made(tmp_path, without("1.up_proj.qzeros"), sym=False))
        assert text == (
            f"tensor {EXPERTS}.1.up_proj.qzeros: expected it, as other experts or projections have it, found none; "
            "fetch the missing shards, or quantize again"
        )

    def test_unpacked(self, tmp_path: Path) -> None:
        def edit(tensors: Tensors, config: dict[str, Any]) -> None:
            for name in [name for name in tensors if name.endswith("qzeros")]:
                tensors[name] = RawTensor("I32", np.full((2, 256), 8, np.int32))

        text = refused(CheckpointError, made(tmp_path, edit, sym=False))
        assert first(text).startswith(
            f"{W13}: expected 4 bit weights, as the quantization config says, found zero points of 32 bit"
        )

    def test_asymmetric_ones_of_a_packing_that_does_not_say_how(self, tmp_path: Path) -> None:
        integers = Integers(sym=False)
        config = auto_round_config(integers, "auto_round:exllamav2")
        path = make_integers(tmp_path / "made", integers, write_gptq(1), config, layers=1, experts=2)
        assert refused(UnsupportedError, path) == (
            f"{W13} and 1 more: expected a format that says whether zero points are stored one less, "
            "found 'auto_round:exllamav2'; "
            "give a config with --quant-config: checkpoint_format gptq or gptq_v2, or a known packing_format"
        )

    def test_3_bit_ones_of_an_older_gptqmodel(self, tmp_path: Path) -> None:
        integers = Integers(bits=3, sym=False)
        config = gptq_config(integers, meta={"quantizer": "gptqmodel:2.2.0"})
        path = make_integers(tmp_path / "made", integers, write_gptq(1), config, layers=1, experts=2)
        assert refused(UnsupportedError, path) == (
            f"{W13} and 1 more: expected zero points stored one less, "
            "found 3 bit zero points of GPTQModel 2.2.0, which stored others; quantize again, or save it as gptq_v2"
        )


class TestConfig:
    @pytest.mark.parametrize(
        ("fields", "expected"),
        [
            ({"bits": 8}, "8 bit weights, as the quantization config says, found zero points of 4 bit"),
            ({"group_size": 64}, "4 scales a row of 256, as group_size 64 says, found 2"),
            ({"group_size": -1}, "one scale a row, as group_size -1 says, found 2"),
            ({"group_size": "128"}, "group_size, a whole number or -1, in the quantization config, found '128'"),
            ({"group_size": 0}, "group_size, a whole number or -1, in the quantization config, found 0"),
            ({"bits": "4"}, "bits, a whole number below 16, in the quantization config, found '4'"),
            ({"sym": "true"}, "sym true or false in the quantization config, found 'true'"),
            ({"dynamic": ["x"]}, "dynamic that maps names to settings, found"),
        ],
    )
    def test_it_is_compared(self, tmp_path: Path, fields: dict[str, Any], expected: str) -> None:
        text = refused(CheckpointError, made(tmp_path, **fields))
        assert first(text).startswith(f"{W13}: expected {expected}")

    @pytest.mark.parametrize(
        ("fields", "expected"),
        [
            ({"checkpoint_format": "marlin"}, "checkpoint_format gptq or gptq_v2, found 'marlin'"),
            ({"is_marlin_format": True}, "GPTQ's own packing, found is_marlin_format"),
            ({"rotation": "hadamard"}, "weights that are not rotated, found rotation in the quantization config"),
        ],
    )
    def test_other_packings(self, tmp_path: Path, fields: dict[str, Any], expected: str) -> None:
        text = refused(UnsupportedError, made(tmp_path, **fields))
        assert text.startswith(f"{W13} and 1 more: expected {expected}")

    def test_planes(self, tmp_path: Path) -> None:
        integers = Integers(bits=3)
        config = gptq_config(integers, checkpoint_format="gptq_p")
        path = make_integers(tmp_path / "made", integers, write_gptq(0), config, layers=1, experts=2)
        assert "expected checkpoint_format gptq or gptq_v2, found 'gptq_p'" in refused(UnsupportedError, path)

    @pytest.mark.parametrize("bits", [5, 6, 7])
    def test_widths_that_gptqmodel_splits(self, tmp_path: Path, bits: int) -> None:
        integers = Integers(bits=bits)
        path = make_integers(tmp_path / "made", integers, write_gptq(0), gptq_config(integers), layers=1, experts=2)
        assert refused(UnsupportedError, path) == (
            f"{W13} and 1 more: expected 2, 3, 4 or 8 bit in GPTQ's packing, found {bits} bit; "
            "GPTQModel splits other widths into planes of bits"
        )

    def test_what_is_not_stated_is_told_by_the_tensors(self, tmp_path: Path) -> None:
        def edit(tensors: Tensors, config: dict[str, Any]) -> None:
            config["quantization_config"] = {"quant_method": "gptq"}

        part = plan(tmp_path, edit).layers[0].sublayers[0]
        assert part.weight_schema["b_dtype"] == "uint4"
        assert part.weight_schema["weight_scale_group_size"] == 128

    def test_rules_change_some_layers(self, tmp_path: Path) -> None:
        rules = {"-:.*lm_head.*": {}, "-:.*mlp\\.gate$": {}, "+:.*experts.*": {"bits": 4, "group_size": 128}}
        assert plan(tmp_path, bits=8, group_size=64, dynamic=rules).layers[0].sublayers[0].source_schema["bits"] == 4

    def test_the_first_rule_that_fits_holds(self, tmp_path: Path) -> None:
        rules = {".*experts.*": {"bits": 4}, "+:.*": {"bits": 8}}
        assert plan(tmp_path, bits=2, dynamic=rules).layers[0].sublayers[0].source_schema["bits"] == 4

    def test_a_rule_against_quantization_says_nothing_of_weights_that_are_quantized(self, tmp_path: Path) -> None:
        rules = {"-:.*experts.*": {}, "+:.*": {"bits": 8}}
        assert plan(tmp_path, dynamic=rules).layers[0].sublayers[0].source_schema["bits"] == 4

    def test_experts_of_one_layer_with_two_schemes(self, tmp_path: Path) -> None:
        rules = {"+:.*experts\\.1\\..*": {"bits": 8}}
        assert first(refused(UnsupportedError, made(tmp_path, dynamic=rules))) == (
            f"{W13}: expected one scheme for all experts of a layer, "
            f"found {EXPERTS}.0.gate_proj as all others; {EXPERTS}.1.gate_proj bits 8"
        )

    def test_lm_head_and_names_of_quantized_modules_do_not_matter(self, tmp_path: Path) -> None:
        def edit(tensors: Tensors, config: dict[str, Any]) -> None:
            del tensors["lm_head.weight"]
            tensors["lm_head.qweight"] = RawTensor("I32", np.zeros((32, 32), np.int32))

        inside = [["self_attn.q_proj"], ["mlp.experts.0.gate_proj"]]
        found = plan(tmp_path, edit, lm_head=True, modules_in_block_to_quantize=inside)
        assert "lm_head.qweight" in found.passthrough


class TestAutoRound:
    def path(self, tmp_path: Path, packing: str = "auto_round:auto_gptq", **fields: Any) -> Path:  # noqa: ANN401
        integers = Integers()
        config = auto_round_config(integers, packing, **fields)
        return make_integers(tmp_path / "made", integers, write_gptq(1, g_idx=False), config, layers=1, experts=2)

    def test_a_packing_that_the_tensors_do_not_have(self, tmp_path: Path) -> None:
        assert first(refused(CheckpointError, self.path(tmp_path, "auto_round:auto_awq"))) == (
            f"{W13}: expected tensors packed as packing_format 'auto_round:auto_awq' says, found GPTQ's packing"
        )

    def test_a_data_type_that_the_tensors_do_not_have(self, tmp_path: Path) -> None:
        assert first(refused(CheckpointError, self.path(tmp_path, data_type="mx_fp"))) == (
            f"{W13}: expected mx_fp weights, as data_type says, found GPTQ's packing"
        )

    def test_a_layer_of_its_own_width(self, tmp_path: Path) -> None:
        extra = {
            ".*experts.*": {"bits": 2},
            **{f"{EXPERTS}.{e}.{p}_proj": {"bits": 4} for e in (0, 1) for p in ("gate", "up", "down")},
            "model.layers.0.mlp.gate": {"bits": 16, "data_type": "float"},
        }
        found = plan_of(self.path(tmp_path, bits=8, extra_config=extra))
        assert found.layers[0].sublayers[1].source_schema["bits"] == 4

    def test_activations_are_noted(self, tmp_path: Path) -> None:
        notes = plan_of(self.path(tmp_path, act_bits=8)).notes
        assert "act_bits is 8: activations of this packing have no scheme here, they stay 16 bit" in notes


@pytest.mark.parametrize("parameter", ["qweight", "scales"])
def test_a_projection_without(tmp_path: Path, parameter: str) -> None:
    text = refused(CheckpointError, made(tmp_path, without(f"up_proj.{parameter}")))
    assert first(text).startswith(f"{W13}: expected ")


def test_scales_in_two_dtypes(tmp_path: Path) -> None:
    def edit(tensors: Tensors, config: dict[str, Any]) -> None:
        for name in [name for name in tensors if name.endswith("up_proj.scales")]:
            tensors[name] = RawTensor("F32", tensors[name].array.astype(np.float32))

    text = refused(CheckpointError, made(tmp_path, edit))
    assert first(text) == f"{W13}: expected scales of one dtype, found F16, F32"


def test_an_expert_with_scales_of_another_form(tmp_path: Path) -> None:
    def edit(tensors: Tensors, config: dict[str, Any]) -> None:
        name = f"{EXPERTS}.1.down_proj.scales"
        tensors[name] = RawTensor("F16", tensors[name].array[:1])

    text = refused(CheckpointError, made(tmp_path, edit))
    expected = "expected F16 [2, 256], as most experts have it, found F16 [1, 256]"
    assert text == f"tensor {EXPERTS}.1.down_proj.scales: {expected}"


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_scale_that_is_no_number(tmp_path: Path, value: float) -> None:
    def edit(tensors: Tensors, config: dict[str, Any]) -> None:
        tensors[f"{EXPERTS}.0.up_proj.scales"].array[1, 7] = value

    text = refused_while_converting(CheckpointError, made(tmp_path, edit))
    assert first(text).startswith(f"tensor {EXPERTS}.0.up_proj.scales: expected finite scales, found 1 of 512 values")
