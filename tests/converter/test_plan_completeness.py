"""Checkpoints that are not whole: every missing, odd or unknown tensor is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.checkpoints import RawTensor, Tensors, bf16, floats
from tests.support.plans import EXPERTS, refusal

from humming_convert.errors import CheckpointError


class TestCompleteness:
    def test_a_missing_expert(self, tmp_path: Path) -> None:
        def edit(tensors: Tensors, config: dict[str, Any]) -> None:
            for name in [name for name in tensors if f"{EXPERTS}.2." in name]:
                del tensors[name]

        assert refusal(tmp_path, CheckpointError, edit=edit) == (
            f"{EXPERTS}: expected 4 experts, found 3: expert 2 missing; fetch the missing shards"
        )

    def test_missing_last_experts_are_told_by_the_config(self, tmp_path: Path) -> None:
        def edit(tensors: Tensors, config: dict[str, Any]) -> None:
            config["num_experts"] = 6

        assert refusal(tmp_path, CheckpointError, edit=edit).splitlines()[0] == (
            f"{EXPERTS}: expected 6 experts, found 4: expert 4, 5 missing; fetch the missing shards"
        )

    def test_more_experts_than_the_config_says(self, tmp_path: Path) -> None:
        def edit(tensors: Tensors, config: dict[str, Any]) -> None:
            config["num_experts"] = 3

        assert refusal(tmp_path, CheckpointError, edit=edit).splitlines()[0] == (
            f"{EXPERTS}: expected 3 experts, as config.json says, found 4"
        )

    @pytest.mark.parametrize("parameter", ["weight", "weight_scale_inv"])
    def test_a_missing_companion(self, tmp_path: Path, parameter: str) -> None:
        name = f"{EXPERTS}.1.up_proj.{parameter}"

        def edit(tensors: Tensors, config: dict[str, Any]) -> None:
            del tensors[name]

        assert refusal(tmp_path, CheckpointError, edit=edit) == (
            f"tensor {name}: expected it, as other experts or projections have it, found none; "
            "fetch the missing shards, or quantize again"
        )

    def test_a_missing_projection_of_one_expert(self, tmp_path: Path) -> None:
        def edit(tensors: Tensors, config: dict[str, Any]) -> None:
            for name in [name for name in tensors if f"{EXPERTS}.3.down_proj." in name]:
                del tensors[name]

        lines = refusal(tmp_path, CheckpointError, edit=edit).splitlines()
        assert [line.split(":")[0] for line in lines] == [
            f"tensor {EXPERTS}.3.down_proj.weight",
            f"tensor {EXPERTS}.3.down_proj.weight_scale_inv",
        ]

    def test_a_projection_that_no_expert_has(self, tmp_path: Path) -> None:
        def edit(tensors: Tensors, config: dict[str, Any]) -> None:
            for name in [name for name in tensors if ".up_proj." in name and ".0.mlp" in name]:
                del tensors[name]

        assert refusal(tmp_path, CheckpointError, edit=edit) == (
            f"{EXPERTS} w13: expected gate and up of every expert, found no up"
        )

    def test_a_missing_layer(self, tmp_path: Path) -> None:
        def edit(tensors: Tensors, config: dict[str, Any]) -> None:
            for name in [name for name in tensors if "layers.1.mlp.experts" in name]:
                del tensors[name]

        assert refusal(tmp_path, CheckpointError, layers=3, edit=edit) == (
            "experts: expected those of layer 1, as config.json says, found none; fetch the missing shards"
        )

    def test_experts_in_a_dense_layer(self, tmp_path: Path) -> None:
        def edit(tensors: Tensors, config: dict[str, Any]) -> None:
            config["first_k_dense_replace"] = 2

        assert refusal(tmp_path, CheckpointError, family="deepseek_v3", layers=3, edit=edit) == (
            "experts: expected none in dense layers, as config.json says, found those of layer 1"
        )

    def test_an_expert_of_another_shape(self, tmp_path: Path) -> None:
        name = f"{EXPERTS}.0.gate_proj.weight"

        def edit(tensors: Tensors, config: dict[str, Any]) -> None:
            tensors[name] = RawTensor("F8_E4M3", np.zeros((128, 256), np.uint8))

        assert refusal(tmp_path, CheckpointError, edit=edit) == (
            f"tensor {name}: expected F8_E4M3 [256, 256], as most experts have it, found F8_E4M3 [128, 256]"
        )

    def test_an_expert_of_another_dtype(self, tmp_path: Path) -> None:
        name = f"{EXPERTS}.2.down_proj.weight_scale_inv"

        def edit(tensors: Tensors, config: dict[str, Any]) -> None:
            tensors[name] = bf16(np.ones((2, 2)))

        assert refusal(tmp_path, CheckpointError, edit=edit) == (
            f"tensor {name}: expected F32 [2, 2], as most experts have it, found BF16 [2, 2]"
        )

    @pytest.mark.parametrize("name", [f"{EXPERTS}.0.gate_proj.strange", f"{EXPERTS}.0.gate_proj.weight.more"])
    def test_an_unknown_companion_is_never_dropped(self, tmp_path: Path, name: str) -> None:
        def edit(tensors: Tensors, config: dict[str, Any]) -> None:
            tensors[name] = floats(np.ones(3), "F32")

        assert refusal(tmp_path, CheckpointError, edit=edit) == (
            f"tensor {name}: expected only tensors that the format knows, found F32 [3]"
        )

    def test_an_unknown_projection_is_never_dropped(self, tmp_path: Path) -> None:
        name = f"{EXPERTS}.0.side_proj.weight"

        def edit(tensors: Tensors, config: dict[str, Any]) -> None:
            tensors[name] = floats(np.ones(3), "F32")

        assert refusal(tmp_path, CheckpointError, edit=edit) == (
            f"tensor {name}: expected only tensors of experts' projections beside converted ones, found an unknown name"
        )

    def test_two_names_for_one_projection(self, tmp_path: Path) -> None:
        def edit(tensors: Tensors, config: dict[str, Any]) -> None:
            tensors[f"{EXPERTS}.0.w1.weight"] = tensors[f"{EXPERTS}.0.gate_proj.weight"]

        text = refusal(tmp_path, CheckpointError, edit=edit)
        assert text.startswith(f"tensor {EXPERTS}.0.w1.weight: expected one name for it, found also {EXPERTS}.0.g")

    @pytest.mark.parametrize(
        ("field", "value", "expected"),
        [
            ("hidden_size", 512, f"{EXPERTS}: expected hidden_size 512, as config.json says, found 256"),
            (
                "moe_intermediate_size",
                128,
                f"{EXPERTS}: expected moe_intermediate_size 128, as config.json says, found 256",
            ),
        ],
    )
    def test_sizes_are_compared_with_the_config(self, tmp_path: Path, field: str, value: int, expected: str) -> None:
        def edit(tensors: Tensors, config: dict[str, Any]) -> None:
            config[field] = value

        assert refusal(tmp_path, CheckpointError, edit=edit).splitlines()[0] == expected

    def test_gate_up_and_down_must_fit_each_other(self, tmp_path: Path) -> None:
        def edit(tensors: Tensors, config: dict[str, Any]) -> None:
            for name in [name for name in tensors if ".experts." in name and ".down_proj." in name]:
                if name.endswith(".weight"):
                    tensors[name] = RawTensor("F8_E4M3", np.zeros((256, 384), np.uint8))
                else:
                    tensors[name] = floats(np.ones((2, 3)), "F32")

        assert refusal(tmp_path, CheckpointError, edit=edit).splitlines()[0] == (
            f"{EXPERTS}: expected gate and up 384 x 256, as down 256 x 384 asks, found 256 and 256 x 256"
        )

    def test_all_problems_are_told_at_once(self, tmp_path: Path) -> None:
        def edit(tensors: Tensors, config: dict[str, Any]) -> None:
            del tensors[f"{EXPERTS}.1.up_proj.weight"]
            del tensors["model.layers.1.mlp.experts.0.down_proj.weight_scale_inv"]
            tensors[f"{EXPERTS}.0.gate_proj.odd"] = floats(np.ones(1), "F32")

        assert len(refusal(tmp_path, CheckpointError, edit=edit).splitlines()) == 3


class TestFused:
    def test_every_fused_tensor_must_hold_as_many_experts(self, tmp_path: Path) -> None:
        def edit(tensors: Tensors, config: dict[str, Any]) -> None:
            tensors[f"{EXPERTS}.down_proj_bias"] = bf16(np.zeros((3, 256)))

        text = refusal(tmp_path, CheckpointError, family="gpt_oss", format="mxfp4_gpt_oss", edit=edit)
        assert text == f"{EXPERTS}: expected fused tensors that hold as many experts, found [3, 4]"

    def test_no_experts_at_all(self, tmp_path: Path) -> None:
        text = refusal(tmp_path, CheckpointError, family="gpt_oss", format="mxfp4_gpt_oss", experts=0)
        assert text.splitlines()[0] == f"{EXPERTS}: expected fused tensors that hold experts, found none"

    def test_a_missing_bias(self, tmp_path: Path) -> None:
        def edit(tensors: Tensors, config: dict[str, Any]) -> None:
            del tensors[f"{EXPERTS}.down_proj_scales"]

        text = refusal(tmp_path, CheckpointError, family="gpt_oss", format="mxfp4_gpt_oss", edit=edit)
        assert text == (
            f"{EXPERTS} w2: expected blocks U8 and scales U8, found blocks U8 [4, 256, 8, 16], bias BF16 [4, 256]"
        )
