"""Floats and plain integers of compressed-tensors, gpt-oss, and what float16 asks of scales."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.checkpoints import RawTensor, Tensors, bf16, make_checkpoint
from tests.support.plans import EXPERTS, W2, W13, first, group_of, plan_made, plan_of, refusal, shapes

from humming_convert.errors import CheckpointError, UnsupportedError


class TestOtherCompressedTensors:
    def test_signed_bytes_are_offset_under_either_name(self, tmp_path: Path) -> None:
        # Humming adds 128 only to what is called int-quantized; naive-quantized bytes would be read wrong.
        def edit(tensors: Tensors, config: dict[str, Any]) -> None:
            group_of(config)["format"] = "naive-quantized"

        part = plan_made(tmp_path, format="ct_w8a8", edit=edit).layers[0].sublayers[0]
        assert part.weight_schema["format"] == "int-quantized"

    def test_asymmetric_bytes_pack_their_zero_points(self, tmp_path: Path) -> None:
        part = plan_made(tmp_path, format="ct_w8a8_asym").layers[0].sublayers[0]
        rule = next(tensor for tensor in part.tensors if tensor.name == "weight_zero_point")
        assert (rule.dtype, rule.shape, [step.name for step in rule.steps]) == (
            "I32",
            (4, 128, 1),
            ["pack_int8_zero_point"],
        )

    def test_block_scales_go_another_way_only_where_blocks_do_not_fit(self, tmp_path: Path) -> None:
        whole = plan_of(make_checkpoint(tmp_path / "a", format="ct_fp8_block")).layers[0].sublayers[0]
        assert whole.weight_schema["quant_method"] == "compressed-tensors"
        odd = plan_of(make_checkpoint(tmp_path / "b", format="ct_fp8_block", intermediate=320)).layers[0]
        w13, w2 = odd.sublayers
        assert w13.weight_schema == {"quant_method": "fp8", "weight_block_size": [1, 128]}
        assert w2.weight_schema == {"quant_method": "fp8", "weight_block_size": [128, 64]}
        assert shapes(w13)["weight_scale_inv"] == (4, 640, 2)
        assert w13.source_schema["block_structure"] == [128, 128]

    def test_nvfp4_without_its_second_scale(self, tmp_path: Path) -> None:
        def edit(tensors: Tensors, config: dict[str, Any]) -> None:
            for name in [name for name in tensors if name.endswith("weight_global_scale")]:
                del tensors[name]

        text = refusal(tmp_path, CheckpointError, format="ct_nvfp4", edit=edit)
        assert first(text).startswith(f"{W13}: expected weight_global_scale beside weight_packed, found ")

    def test_one_missing_second_scale(self, tmp_path: Path) -> None:
        name = f"{EXPERTS}.2.up_proj.weight_global_scale"

        def edit(tensors: Tensors, config: dict[str, Any]) -> None:
            del tensors[name]

        text = refusal(tmp_path, CheckpointError, format="ct_nvfp4", edit=edit)
        assert text.startswith(f"tensor {name}: expected it, as other experts or projections have it, found none")

    def test_each_projection_keeps_its_own_second_scale(self, tmp_path: Path) -> None:
        w13 = plan_made(tmp_path, format="ct_nvfp4").layers[0].sublayers[0]
        rule = next(tensor for tensor in w13.tensors if tensor.name == "weight_global_scale")
        assert rule.shape == (4, 2)
        assert [part.source.split(".")[-2] for part in rule.parts[:2]] == ["gate_proj", "up_proj"]
        assert rule.check == "positive,reciprocal,unequal_reciprocal_finite_bfloat16"

    @pytest.mark.parametrize(("form", "group"), [("ct_nvfp4", 32), ("ct_mxfp4", 16)])
    def test_four_bit_floats_have_one_group_size(self, tmp_path: Path, form: str, group: int) -> None:
        def edit(tensors: Tensors, config: dict[str, Any]) -> None:
            group_of(config)["weights"]["group_size"] = group

        expected = 48 - group
        text = refusal(tmp_path, UnsupportedError, format=form, edit=edit)
        assert text == f"{W13} and 3 more: expected symmetric groups of {expected}, found groups of {group}"

    def test_input_scales_of_experts_that_calibration_never_reached(self, tmp_path: Path) -> None:
        name = f"{EXPERTS}.3.gate_proj.input_global_scale"

        def edit(tensors: Tensors, config: dict[str, Any]) -> None:
            del tensors[name]

        path = make_checkpoint(tmp_path / "m", format="ct_nvfp4", edit=edit)
        assert len(plan_of(path).layers) == 2
        with pytest.raises(CheckpointError) as error:
            plan_of(path, activation="checkpoint")
        assert str(error.value).startswith(f"tensor {name}: expected it, as other experts")


class TestGptOss:
    def test_row_order_and_shapes(self, tmp_path: Path) -> None:
        plan = plan_made(tmp_path, family="gpt_oss", format="mxfp4_gpt_oss", hidden=64, intermediate=96)
        w13, w2 = plan.layers[0].sublayers
        assert shapes(w13) == {"weight": (4, 192, 32), "weight_scale": (4, 192, 2), "bias": (4, 192)}
        assert shapes(w2) == {"weight": (4, 64, 48), "weight_scale": (4, 64, 3), "bias": (4, 64)}
        assert plan.layers[0].is_interleaved
        assert all(tensor.parts[0].expert is None for tensor in (*w13.tensors, *w2.tensors))

    def test_blocks_and_scales_must_fit(self, tmp_path: Path) -> None:
        def edit(tensors: Tensors, config: dict[str, Any]) -> None:
            tensors[f"{EXPERTS}.gate_up_proj_scales"] = RawTensor("U8", np.zeros((4, 512, 7), np.uint8))

        text = refusal(tmp_path, CheckpointError, family="gpt_oss", format="mxfp4_gpt_oss", edit=edit)
        assert text == (
            f"{W13}: expected blocks [E, N, K/32, 16] and scales [E, N, K/32], found [4, 512, 8, 16] and [4, 512, 7]"
        )

    def test_blocks_of_another_dtype(self, tmp_path: Path) -> None:
        def edit(tensors: Tensors, config: dict[str, Any]) -> None:
            tensors[f"{EXPERTS}.down_proj_blocks"] = bf16(np.zeros((4, 256, 8, 16)))

        text = refusal(tmp_path, CheckpointError, family="gpt_oss", format="mxfp4_gpt_oss", edit=edit)
        assert text.startswith(f"{W2}: expected blocks U8 and scales U8, found blocks BF16")


class TestParameterDtype:
    @pytest.mark.parametrize(
        ("form", "name"),
        [("fp8_block", "weight_scale_inv"), ("ct_int4", "weight_scale"), ("ct_fp8_channel", "weight_scale")],
    )
    def test_wide_scales_in_a_float16_model_are_looked_at(self, tmp_path: Path, form: str, name: str) -> None:
        part = plan_made(tmp_path, format=form, dtype="float16").layers[0].sublayers[0]
        assert {tensor.name: tensor.check for tensor in part.tensors}[name] == "nonnegative,float16"
