"""FP8 with one scale per tensor or block: what it asks of a sublayer, and what it refuses."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.checkpoints import RawTensor, Tensors, floats, make_checkpoint
from tests.support.plans import W13, first, plan_made, plan_of, refusal, shapes

from humming_convert.errors import CheckpointError, UnsupportedError
from humming_convert.steps import apply


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
        assert f"expected a block size [rows, columns] in the quantization config, found {block!r};" in first(text)

    def test_exponent_bytes_that_do_not_say_so(self, tmp_path: Path) -> None:
        # U8 under this name could be anything; read as numbers they would be off by 1e40.
        refusal(tmp_path, UnsupportedError, format="fp8_block", scale_dtype="U8")

    def test_any_block(self, tmp_path: Path) -> None:
        w13 = plan_made(tmp_path, format="fp8_block", block=(32, 64)).layers[0].sublayers[0]
        assert w13.weight_schema == {"quant_method": "fp8", "weight_block_size": [32, 64]}
        assert shapes(w13)["weight_scale_inv"] == (4, 16, 4)


def decode(tensor: RawTensor) -> np.ndarray[Any, Any]:
    """Stored scales as numbers, by the definition of their dtype."""
    if tensor.dtype == "F32":
        return tensor.array
    if tensor.dtype == "BF16":
        return (tensor.array.astype(np.uint32) << 16).view(np.float32)
    return np.array([[math.ldexp(1.0, int(code) - 127) for code in row] for row in tensor.array])
