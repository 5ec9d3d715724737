"""AWQ: what it asks of a sublayer, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.support.checkpoints import Tensors
from tests.support.plans import EXPERTS, W13, first, plan_made, refusal

from humming_convert.errors import CheckpointError, UnsupportedError


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
