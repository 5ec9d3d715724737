"""Packed integers of compressed-tensors: widths, groups, orders and zero points."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.checkpoints import RawTensor, Tensors, pack_words
from tests.support.plans import EXPERTS, W13, first, group_of, plan_made, refusal

from humming_convert.errors import CheckpointError, UnsupportedError


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

    def test_a_channel_scheme_with_the_wrong_width_fails_against_the_other_sublayer(self, tmp_path: Path) -> None:
        def edit(tensors: Tensors, config: dict[str, Any]) -> None:
            group_of(config)["weights"]["num_bits"] = 8

        text = refusal(tmp_path, CheckpointError, format="ct_int4_channel", edit=edit)
        assert (
            first(text) == f"{EXPERTS}: expected gate and up 128 x 128, as down 256 x 128 asks, found 256 and 256 x 128"
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
        text = refusal(tmp_path, UnsupportedError, format="ct_int3_asym_channel", intermediate=272, hidden=256)
        assert first(text) == f"{W13} and 1 more: expected rows that fill whole words at 3 bit, found [272, 272] rows"

    @pytest.mark.parametrize("group", [8, 24])
    def test_group_sizes_that_humming_cannot_take(self, tmp_path: Path, group: int) -> None:
        text = refusal(tmp_path, UnsupportedError, format="ct_int4", group_size=group, hidden=192, intermediate=192)
        assert first(text) == (
            f"{W13} and 3 more: expected a group size that is a multiple of 16, found {group}; "
            "Humming's kernels have no smaller groups"
        )

    def test_weight_shape_is_claimed_and_its_values_are_expected(self, tmp_path: Path) -> None:
        w13, w2 = plan_made(tmp_path, format="ct_int4", intermediate=384).layers[0].sublayers
        assert len(w13.unused) == 8
        assert dict(w13.expected)[f"{EXPERTS}.0.gate_proj.weight_shape"] == (384, 256)
        assert dict(w2.expected)[f"{EXPERTS}.3.down_proj.weight_shape"] == (256, 384)


def test_packing_of_this_file_s_reference() -> None:
    codes = np.arange(64, dtype=np.uint8).reshape(2, 32) % 8
    words = pack_words(codes, 3)
    assert words.shape == (2, 3)
    bits = "".join(f"{int(word) & 0xFFFFFFFF:032b}"[::-1] for word in words[1])
    assert [int(bits[3 * i : 3 * i + 3][::-1], 2) for i in range(32)] == codes[1].tolist()
