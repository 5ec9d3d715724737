"""What each format asks of a sublayer, what it refuses, and public faults that must not come back."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.checkpoints import RawTensor, Tensors, bf16, floats, make_checkpoint, pack_words
from tests.support.plans import plan_made, plan_of, refusal

from humming_convert.errors import CheckpointError, ConvertError, UnsupportedError
from humming_convert.plan import SublayerPlan
from humming_convert.steps import apply

EXPERTS = "model.layers.0.mlp.experts"
W13, W2 = f"{EXPERTS} w13", f"{EXPERTS} w2"


def group_of(config: dict[str, Any]) -> dict[str, Any]:
    group: dict[str, Any] = config["quantization_config"]["config_groups"]["group_0"]
    return group


def first(text: str) -> str:
    return text.splitlines()[0]


def shapes(part: SublayerPlan) -> dict[str, tuple[int, ...]]:
    return {tensor.name: tensor.shape for tensor in part.tensors}


class TestFp8Tensor:
    @pytest.mark.parametrize("shape", [(), (1,)])
    def test_both_forms_of_a_scalar(self, tmp_path: Path, shape: tuple[int, ...]) -> None:
        def edit(tensors: Tensors, config: dict[str, Any]) -> None:
            for name in [name for name in tensors if name.endswith("weight_scale")]:
                tensors[name] = floats(np.full(shape, 0.5), "F32")

        w13, w2 = plan_made(tmp_path, format="fp8_tensor", edit=edit).layers[0].sublayers
        assert shapes(w13)["weight_scale"] == (4, 2)
        assert shapes(w2)["weight_scale"] == (4,)

    def test_two_numbers_are_no_scalar(self, tmp_path: Path) -> None:
        def edit(tensors: Tensors, config: dict[str, Any]) -> None:
            for name in [name for name in tensors if name.endswith("weight_scale")]:
                tensors[name] = floats(np.full((2,), 0.5), "F32")

        text = refusal(tmp_path, CheckpointError, format="fp8_tensor", edit=edit)
        assert first(text) == f"{W13}: expected weight_scale of shape [] or [1], found [2]"

    def test_a_weight_without_a_scale_is_never_taken(self, tmp_path: Path) -> None:
        def edit(tensors: Tensors, config: dict[str, Any]) -> None:
            for name in [name for name in tensors if name.endswith("weight_scale")]:
                del tensors[name]

        text = first(refusal(tmp_path, UnsupportedError, format="fp8_tensor", edit=edit))
        assert text.startswith(
            f"{W13} and 3 more: expected weight_scale_inv or weight_scale beside weight F8_E4M3, "
            "found weight F8_E4M3 [256, 256]; fetch the missing shards, or quantize again"
        )

    def test_a_scale_under_another_name_is_never_overlooked(self, tmp_path: Path) -> None:
        def edit(tensors: Tensors, config: dict[str, Any]) -> None:
            for name in [name for name in tensors if name.endswith("weight_scale")]:
                tensors[name.replace("weight_scale", "scale")] = tensors.pop(name)

        text = refusal(tmp_path, UnsupportedError, format="fp8_tensor", edit=edit)
        assert text == (
            f"{W13} and 3 more: expected a supported checkpoint format, "
            "found scales under the name scale (DeepSeek V4); this format is not supported yet"
        )


class TestFp8Block:
    @pytest.mark.parametrize(
        ("intermediate", "hidden", "schema13", "scale13", "schema2", "scale2"),
        [
            (256, 256, [128, 128], (4, 4, 2), [128, 128], (4, 2, 2)),
            # Rows of gate and up do not fill their blocks: one row of scales per weight row.
            (320, 256, [1, 128], (4, 640, 2), [128, 64], (4, 2, 5)),
            # K does not fill its blocks either.
            (256, 320, [128, 64], (4, 4, 5), [1, 128], (4, 320, 2)),
            (96, 160, [1, 32], (4, 192, 5), [1, 32], (4, 160, 3)),
        ],
    )
    def test_sizes_that_blocks_do_not_divide(
        self,
        tmp_path: Path,
        intermediate: int,
        hidden: int,
        schema13: list[int],
        scale13: tuple[int, ...],
        schema2: list[int],
        scale2: tuple[int, ...],
    ) -> None:
        plan = plan_made(tmp_path, format="fp8_block", intermediate=intermediate, hidden=hidden)
        w13, w2 = plan.layers[0].sublayers
        assert (w13.weight_schema["weight_block_size"], shapes(w13)["weight_scale_inv"]) == (
            schema13,
            scale13,
        )
        assert (w2.weight_schema["weight_block_size"], shapes(w2)["weight_scale_inv"]) == (schema2, scale2)
        # Quantization keys come from what the checkpoint says.
        assert w13.source_schema == {"quant_method": "fp8", "weight_block_size": [128, 128]}

    @pytest.mark.parametrize(("n", "k"), [(320, 256), (256, 320), (96, 160), (128, 128)])
    @pytest.mark.parametrize("code", ["F32", "BF16", "F8_E8M0"])
    def test_every_weight_keeps_its_own_scale(self, tmp_path: Path, n: int, k: int, code: str) -> None:
        kept: Tensors = {}
        path = make_checkpoint(
            tmp_path / "m",
            format="fp8_block",
            intermediate=n,
            hidden=k,
            experts=2,
            scale_dtype=code,
            edit=lambda tensors, config: kept.update(tensors),
        )
        w13 = plan_of(path).layers[0].sublayers[0]
        rule = next(tensor for tensor in w13.tensors if tensor.name == "weight_scale_inv")
        block_n, block_k = w13.weight_schema["weight_block_size"]
        for part in rule.parts:
            stored = kept[part.source]
            value = torch.from_numpy(stored.array.copy())
            if code != "F32":
                value = value.view(torch.bfloat16 if code == "BF16" else torch.float8_e8m0fnu)
            for step in rule.steps:
                value = apply(step, value)
            theirs = decode(stored)
            mine = value.float().numpy()
            for row in range(n):
                for column in range(0, k, 16):
                    assert mine[row // block_n, column // block_k] == theirs[row // 128, column // 128]

    def test_columns_with_too_small_a_common_group(self, tmp_path: Path) -> None:
        text = refusal(tmp_path, UnsupportedError, format="fp8_block", hidden=328)
        assert first(text) == (
            f"{W13} and 1 more: expected blocks whose columns and K = 328 share a multiple of 16, found 128; "
            "Humming's kernels have no smaller groups"
        )

    def test_a_block_size_is_never_derived_from_shapes(self, tmp_path: Path) -> None:
        def edit(tensors: Tensors, config: dict[str, Any]) -> None:
            config["quantization_config"]["weight_block_size"] = [64, 64]

        text = refusal(tmp_path, CheckpointError, format="fp8_block", edit=edit)
        assert first(text) == f"{W13}: expected weight_scale_inv of shape [4, 4], found [2, 2]"

    @pytest.mark.parametrize("block", [None, [128], 128, [0, 128], [128, True], "128x128"])
    def test_a_block_size_that_is_none(self, tmp_path: Path, block: object) -> None:
        def edit(tensors: Tensors, config: dict[str, Any]) -> None:
            config["quantization_config"]["weight_block_size"] = block

        text = refusal(tmp_path, CheckpointError, format="fp8_block", edit=edit)
        assert f"expected a block size [rows, columns] in the quantization config, found {block!r};" in first(
            text
        )

    def test_exponent_bytes_that_do_not_say_so(self, tmp_path: Path) -> None:
        # U8 under this name could be anything; read as numbers they would be off by 1e40.
        refusal(tmp_path, UnsupportedError, format="fp8_block", scale_dtype="U8")

    def test_any_block(self, tmp_path: Path) -> None:
        w13 = plan_made(tmp_path, format="fp8_block", block=(32, 64)).layers[0].sublayers[0]
        assert w13.weight_schema == {"quant_method": "fp8", "weight_block_size": [32, 64]}
        assert shapes(w13)["weight_scale_inv"] == (4, 16, 4)


class TestAwq:
    def test_old_names_of_the_fields(self, tmp_path: Path) -> None:
        def edit(tensors: Tensors, config: dict[str, Any]) -> None:
            section = config["quantization_config"]
            section["w_bit"], section["q_group_size"] = section.pop("bits"), section.pop("group_size")

        part = plan_made(tmp_path, format="awq", edit=edit).layers[0].sublayers[0]
        expected = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}
        assert part.weight_schema == expected

    def test_one_group_for_the_whole_row(self, tmp_path: Path) -> None:
        def edit(tensors: Tensors, config: dict[str, Any]) -> None:
            config["quantization_config"]["group_size"] = -1

        part = plan_made(tmp_path, format="awq", group_size=256, edit=edit).layers[0].sublayers[0]
        assert part.weight_schema["group_size"] == 256

    @pytest.mark.parametrize("version", ["gemv", "gemv_fast", "marlin", "GEMV"])
    def test_other_versions_pack_otherwise(self, tmp_path: Path, version: str) -> None:
        def edit(tensors: Tensors, config: dict[str, Any]) -> None:
            config["quantization_config"]["version"] = version

        assert first(refusal(tmp_path, UnsupportedError, format="awq", edit=edit)) == (
            f"{W13} and 3 more: expected AWQ version gemm, found {version.lower()!r}; "
            "gemv, gemv_fast and marlin pack otherwise: convert the checkpoint to gemm first"
        )

    @pytest.mark.parametrize(
        ("field", "value", "expected"),
        [
            ("bits", 8, "8 bit weights, as the quantization config says, found 4 bit weights"),
            ("group_size", 64, "groups of 64, as the quantization config says, found groups of 128"),
            ("group_size", -1, "groups of -1, as the quantization config says, found groups of 128"),
        ],
    )
    def test_the_config_is_compared(self, tmp_path: Path, field: str, value: int, expected: str) -> None:
        def edit(tensors: Tensors, config: dict[str, Any]) -> None:
            config["quantization_config"][field] = value

        text = refusal(tmp_path, CheckpointError, format="awq", edit=edit)
        assert first(text) == f"{W13}: expected {expected}"

    def test_symmetric_zero_points_are_looked_at(self, tmp_path: Path) -> None:
        part = plan_made(tmp_path, format="awq_sym").layers[0].sublayers[0]
        assert {tensor.name: tensor.check for tensor in part.tensors}["qzeros"] == "eights"
        assert part.weight_schema["zero_point"] is False

    def test_missing_zero_points(self, tmp_path: Path) -> None:
        def edit(tensors: Tensors, config: dict[str, Any]) -> None:
            for name in [name for name in tensors if name.endswith("qzeros")]:
                del tensors[name]

        text = refusal(tmp_path, CheckpointError, format="awq", edit=edit)
        assert first(text).startswith(
            f"{W13}: expected {EXPERTS}.0.gate_proj.qzeros, as zero_point true says, found qweight I32"
        )

    def test_small_groups(self, tmp_path: Path) -> None:
        text = refusal(tmp_path, UnsupportedError, format="awq", group_size=8)
        assert text == (
            f"{W13} and 3 more: expected a group size that is a multiple of 16, found 8; "
            "Humming's kernels have no smaller groups"
        )


class TestPackedIntegers:
    @pytest.mark.parametrize(("bits", "dense", "old"), [(3, 24, 26), (5, 40, 43), (6, 48, 52), (7, 56, 64)])
    def test_the_old_packing_of_odd_widths(self, tmp_path: Path, bits: int, dense: int, old: int) -> None:
        text = refusal(tmp_path, UnsupportedError, format=f"ct_int{bits}", padded=True)
        assert text == (
            f"{W13} and 3 more: expected weight_packed of {dense} words a row, found {old}; "
            f"old compressed-tensors packed {32 // bits} values a word: quantize again"
        )

    def test_a_width_that_the_config_does_not_explain(self, tmp_path: Path) -> None:
        def edit(tensors: Tensors, config: dict[str, Any]) -> None:
            group_of(config)["weights"]["num_bits"] = 8

        text = refusal(tmp_path, CheckpointError, format="ct_int4", edit=edit)
        assert first(text) == (
            f"{W13}: expected weight_packed of 64 words a row for 2 groups of 128 at 8 bit, found 32"
        )

    def test_a_channel_scheme_with_the_wrong_width_fails_against_the_other_sublayer(
        self, tmp_path: Path
    ) -> None:
        def edit(tensors: Tensors, config: dict[str, Any]) -> None:
            group_of(config)["weights"]["num_bits"] = 8

        text = refusal(tmp_path, CheckpointError, format="ct_int4_channel", edit=edit)
        assert (
            first(text)
            == f"{EXPERTS}: expected gate and up 128 x 128, as down 256 x 128 asks, found 256 and 256 x 128"
        )

    def test_group_size_minus_one_is_a_channel(self, tmp_path: Path) -> None:
        def edit(tensors: Tensors, config: dict[str, Any]) -> None:
            group_of(config)["weights"] |= {"strategy": "group", "group_size": -1}

        part = plan_made(tmp_path, format="ct_int4_channel", edit=edit).layers[0].sublayers[0]
        assert part.weight_schema["strategy"] == "channel"
        assert "group_size" not in part.weight_schema

    @pytest.mark.parametrize("order", ["group", "dynamic"])
    def test_activation_order(self, tmp_path: Path, order: str) -> None:
        def edit(tensors: Tensors, config: dict[str, Any]) -> None:
            group_of(config)["weights"]["actorder"] = order

        assert refusal(tmp_path, UnsupportedError, format="ct_int4", edit=edit) == (
            f"{W13} and 3 more: expected weights in the order of their columns, found actorder {order!r}; "
            "Humming's kernels have no g_idx: quantize again with actorder None, weight or static"
        )

    @pytest.mark.parametrize("order", ["weight", "static"])
    def test_orders_that_leave_columns_in_place(self, tmp_path: Path, order: str) -> None:
        def edit(tensors: Tensors, config: dict[str, Any]) -> None:
            group_of(config)["weights"]["actorder"] = order

        assert len(plan_made(tmp_path, format="ct_int4", edit=edit).layers) == 2

    def test_a_g_idx_whatever_the_config_says(self, tmp_path: Path) -> None:
        def edit(tensors: Tensors, config: dict[str, Any]) -> None:
            for name in [name for name in tensors if name.endswith("weight_packed")]:
                tensors[name.replace("weight_packed", "weight_g_idx")] = RawTensor(
                    "I32", np.arange(256, dtype=np.int32)
                )

        text = refusal(tmp_path, UnsupportedError, format="ct_int4", edit=edit)
        assert text == f"{W13} and 3 more: expected weights in the order of their columns, found weight_g_idx"

    @pytest.mark.parametrize(("code", "dtype"), [("I8", np.int8), ("I32", np.int32)])
    def test_unpacked_zero_points(self, tmp_path: Path, code: str, dtype: type[np.generic]) -> None:
        def edit(tensors: Tensors, config: dict[str, Any]) -> None:
            for name in [name for name in tensors if name.endswith("weight_zero_point")]:
                tensors[name] = RawTensor(code, np.zeros((256, 2), dtype))

        text = refusal(tmp_path, CheckpointError, format="ct_int4_asym", edit=edit)
        assert first(text) == (
            f"{W13}: expected weight_zero_point I32 [32, 2], packed along N, "
            f"found {code} [256, 2], {code} [256, 2]; "
            "unpacked zero points do not say how they are meant: quantize again"
        )

    def test_missing_zero_points(self, tmp_path: Path) -> None:
        def edit(tensors: Tensors, config: dict[str, Any]) -> None:
            for name in [name for name in tensors if name.endswith("weight_zero_point")]:
                del tensors[name]

        text = refusal(tmp_path, CheckpointError, format="ct_int4_asym", edit=edit)
        assert first(text) == f"{W13}: expected weight_zero_point I32 [32, 2], packed along N, found none"

    def test_zero_points_of_a_symmetric_scheme(self, tmp_path: Path) -> None:
        def edit(tensors: Tensors, config: dict[str, Any]) -> None:
            group_of(config)["weights"]["symmetric"] = True

        text = refusal(tmp_path, CheckpointError, format="ct_int4_asym", edit=edit)
        assert first(text).startswith(f"{W13}: expected no weight_zero_point, as symmetric says, found ")

    def test_rows_that_end_inside_a_word_of_zero_points(self, tmp_path: Path) -> None:
        text = refusal(
            tmp_path, UnsupportedError, format="ct_int3_asym_channel", intermediate=272, hidden=256
        )
        assert (
            first(text)
            == f"{W13} and 1 more: expected rows that fill whole words at 3 bit, found [272, 272] rows"
        )

    @pytest.mark.parametrize("group", [8, 24])
    def test_group_sizes_that_humming_cannot_take(self, tmp_path: Path, group: int) -> None:
        text = refusal(
            tmp_path, UnsupportedError, format="ct_int4", group_size=group, hidden=192, intermediate=192
        )
        assert first(text) == (
            f"{W13} and 3 more: expected a group size that is a multiple of 16, found {group}; "
            "Humming's kernels have no smaller groups"
        )

    def test_weight_shape_is_claimed_and_its_values_are_expected(self, tmp_path: Path) -> None:
        w13, w2 = plan_made(tmp_path, format="ct_int4", intermediate=384).layers[0].sublayers
        assert len(w13.unused) == 8
        assert dict(w13.expected)[f"{EXPERTS}.0.gate_proj.weight_shape"] == (384, 256)
        assert dict(w2.expected)[f"{EXPERTS}.3.down_proj.weight_shape"] == (256, 384)


class TestConfigGroups:
    def split(self, targets: list[list[str]], ignore: list[str] | None = None) -> Any:  # noqa: ANN401
        def edit(tensors: Tensors, config: dict[str, Any]) -> None:
            section = config["quantization_config"]
            group = group_of(config)
            section["format"] = "mixed-precision"
            section["ignore"] = ignore or []
            other = group | {"weights": group["weights"] | {"num_bits": 8}}
            section["config_groups"] = {
                "other": other | {"targets": ["re:.*self_attn.*"]},
                **{f"group_{i}": group | {"targets": given} for i, given in enumerate(targets)},
            }

        return edit

    @pytest.mark.parametrize(
        "targets",
        [
            ["Linear"],
            ["re:.*mlp\\.experts\\..*"],
            ["re:.*experts.*_proj$"],
            ["SomethingElse", "re:.*layers\\.[01]\\..*"],
        ],
    )
    def test_targets(self, tmp_path: Path, targets: list[str]) -> None:
        assert len(plan_made(tmp_path, format="ct_int4", edit=self.split([targets])).layers) == 2

    def test_a_pattern_goes_before_the_class(self, tmp_path: Path) -> None:
        def edit(tensors: Tensors, config: dict[str, Any]) -> None:
            self.split([["re:.*experts.*"]])(tensors, config)
            config["quantization_config"]["config_groups"]["other"]["targets"] = ["Linear"]

        part = plan_made(tmp_path, format="ct_int4", edit=edit).layers[0].sublayers[0]
        assert part.weight_schema["num_bits"] == 4

    @pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
    def test_patterns_may_use_the_names_that_transformers_has(self, tmp_path: Path, family: str) -> None:
        edit = self.split([["re:model\\.layers\\.\\d+\\.mlp\\.experts\\.\\d+\\.(gate|up|down)_proj$"]])
        assert len(plan_made(tmp_path, family=family, format="ct_int4", edit=edit).layers) == 2

    def test_no_group_at_all(self, tmp_path: Path) -> None:
        text = refusal(tmp_path, CheckpointError, format="ct_int4", edit=self.split([["re:nothing"]]))
        assert first(text) == (
            f"{W13}: expected a config group for {EXPERTS}.0.gate_proj, "
            "found only the targets re:.*self_attn.*, re:nothing"
        )

    def test_experts_of_one_layer_in_two_groups(self, tmp_path: Path) -> None:
        edit = self.split([["re:.*experts\\.0\\..*"], ["re:.*experts\\.[123]\\..*"]])
        text = refusal(tmp_path, UnsupportedError, format="ct_int4", edit=edit)
        assert first(text) == (
            f"{W13}: expected one config group for all experts of a layer, "
            f"found {EXPERTS}.0.gate_proj in group_0, {EXPERTS}.1.gate_proj in group_1"
        )

    def test_a_pattern_that_is_no_pattern(self, tmp_path: Path) -> None:
        text = refusal(tmp_path, CheckpointError, format="ct_int4", edit=self.split([["re:(("]]))
        assert "found only the targets re:((, re:.*self_attn.*" in first(text)

    def test_shared_experts_ignore_lists_and_typos_do_not_matter(self, tmp_path: Path) -> None:
        ignore = ["re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*", "lm_head\0x"]
        edit = self.split([["Linear"]], ignore)
        assert len(plan_made(tmp_path, format="ct_int4", edit=edit).layers) == 2

    @pytest.mark.parametrize("text", ["mixed-precision", "marlin-24", "dense", "mxfp6-pack-quantized", ""])
    def test_a_format_that_humming_does_not_have(self, tmp_path: Path, text: str) -> None:
        def edit(tensors: Tensors, config: dict[str, Any]) -> None:
            group_of(config)["format"] = text
            config["quantization_config"]["format"] = text

        found = refusal(tmp_path, UnsupportedError, format="ct_int4", edit=edit)
        assert found == (
            f"{W13} and 3 more: expected a compressed-tensors format among pack-quantized, int-quantized, "
            f"float-quantized, naive-quantized, nvfp4-pack-quantized, mxfp4-pack-quantized, found {text!r}"
        )

    @pytest.mark.parametrize(
        ("change", "error"),
        [
            ({"config_groups": {}}, CheckpointError),
            ({"config_groups": None}, CheckpointError),
            ({"config_groups": {"g": {"targets": ["Linear"]}}}, CheckpointError),
            (
                {"config_groups": {"g": {"targets": ["Linear"], "weights": {"num_bits": "4"}}}},
                CheckpointError,
            ),
            ({"config_groups": {"g": None}}, CheckpointError),
        ],
    )
    def test_a_damaged_config(
        self, tmp_path: Path, change: dict[str, Any], error: type[ConvertError]
    ) -> None:
        def edit(tensors: Tensors, config: dict[str, Any]) -> None:
            config["quantization_config"] |= change

        assert first(refusal(tmp_path, error, format="ct_int4", edit=edit)).startswith(f"{W13}: expected ")

    @pytest.mark.parametrize("form", ["ct_fp8_channel", "ct_w8a8", "ct_mxfp4", "ct_nvfp4", "ct_int4"])
    def test_tensors_that_are_not_what_the_config_says(self, tmp_path: Path, form: str) -> None:
        other = "float-quantized" if form == "ct_w8a8" else "int-quantized"

        def edit(tensors: Tensors, config: dict[str, Any]) -> None:
            group_of(config)["format"] = other

        text = first(refusal(tmp_path, CheckpointError, format=form, edit=edit))
        assert text.startswith(f"{W13}: expected {other} ")
        assert ", as the quantization config says, found " in text


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

    def test_four_bit_integers_in_bytes(self, tmp_path: Path) -> None:
        def edit(tensors: Tensors, config: dict[str, Any]) -> None:
            group_of(config)["weights"]["num_bits"] = 4

        text = refusal(tmp_path, UnsupportedError, format="ct_w8a8", edit=edit)
        assert "expected int-quantized weights of 8 bit, found 4 bit;" in text

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
        assert text.startswith(
            f"tensor {name}: expected it, as other experts or projections have it, found none"
        )

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
            f"{W13}: expected blocks [E, N, K/32, 16] and scales [E, N, K/32], "
            "found [4, 512, 8, 16] and [4, 512, 7]"
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


def test_packing_of_this_file_s_reference() -> None:
    codes = np.arange(64, dtype=np.uint8).reshape(2, 32) % 8
    words = pack_words(codes, 3)
    assert words.shape == (2, 3)
    bits = "".join(f"{int(word) & 0xFFFFFFFF:032b}"[::-1] for word in words[1])
    assert [int(bits[3 * i : 3 * i + 3][::-1], 2) for i in range(32)] == codes[1].tolist()


def decode(tensor: RawTensor) -> np.ndarray[Any, Any]:
    """Stored scales as numbers, by the definition of their dtype."""
    if tensor.dtype == "F32":
        return tensor.array
    if tensor.dtype == "BF16":
        return (tensor.array.astype(np.uint32) << 16).view(np.float32)
    return np.array([[math.ldexp(1.0, int(code) - 127) for code in row] for row in tensor.array])
