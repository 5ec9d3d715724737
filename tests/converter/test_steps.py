"""Each step against an independent reference in numpy or plain Python."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from humming_convert import steps
from humming_convert.plan import Step


def apply(name: str, tensor: torch.Tensor, **arguments: object) -> torch.Tensor:
    before = tensor.clone()
    result = steps.apply(Step(name, tuple(arguments.items())), tensor)
    assert torch.equal(tensor.view(torch.uint8), before.view(torch.uint8)), "a step must not change its input"
    return result


def test_an_unknown_step() -> None:
    with pytest.raises(KeyError, match="nothing"):
        steps.apply(Step("nothing"), torch.zeros(1))


def test_exponent_bytes_are_exact_powers_of_two() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    for tensor in (codes, codes.view(torch.float8_e8m0fnu)):
        result = steps.apply(Step("e8m0_to_float32"), tensor)
        assert result.dtype == torch.float32
        assert result[:255].tolist() == [math.ldexp(1.0, code - 127) for code in range(255)]
        assert math.isnan(result[255].item())


def test_exponent_bytes_against_torch() -> None:
    codes = torch.arange(1, 255, dtype=torch.uint8)
    theirs = codes.view(torch.float8_e8m0fnu).to(torch.float32)
    assert torch.equal(apply("e8m0_to_float32", codes), theirs)


@pytest.mark.parametrize(("block", "rows"), [(128, 320), (128, 128), (128, 1), (32, 100)])
def test_expand_rows(block: int, rows: int) -> None:
    groups = 3
    tensor = torch.arange(-(-rows // block) * groups, dtype=torch.float32).view(-1, groups)
    result = apply("expand_rows", tensor, block=block, rows=rows)
    assert result.shape == (rows, groups)
    for row in range(rows):
        assert result[row].tolist() == tensor[row // block].tolist()


@pytest.mark.parametrize(("block", "columns", "group"), [(128, 320, 64), (128, 96, 32), (96, 64, 32)])
def test_regroup_columns(block: int, columns: int, group: int) -> None:
    tensor = torch.arange(2 * -(-columns // block), dtype=torch.float32).view(2, -1)
    result = apply("regroup_columns", tensor, repeat=block // group, columns=columns // group)
    assert result.shape == (2, columns // group)
    for column in range(columns):
        assert result[:, column // group].tolist() == tensor[:, column // block].tolist()


@pytest.mark.parametrize("groups", [1, 3])
def test_pack_int8_zero_point(groups: int) -> None:
    values = np.random.default_rng(0).integers(-128, 128, (24, groups), dtype=np.int8)
    result = apply("pack_int8_zero_point", torch.from_numpy(values))
    assert (result.dtype, result.shape) == (torch.int32, (6, groups))
    words = result.numpy().view(np.uint32)
    for row in range(24):
        for column in range(groups):
            code = (int(words[row // 4, column]) >> (8 * (row % 4))) & 0xFF
            assert code == int(values[row, column]) + 128


def test_steps_take_all_experts_at_once() -> None:
    values = torch.randint(-128, 128, (5, 8, 1), dtype=torch.int8)
    whole = apply("pack_int8_zero_point", values)
    assert torch.equal(whole, torch.stack([apply("pack_int8_zero_point", value) for value in values]))
    scales = torch.rand(5, 3, 2)
    whole = apply("expand_rows", scales, block=4, rows=10)
    assert torch.equal(
        whole, torch.stack([apply("expand_rows", value, block=4, rows=10) for value in scales])
    )


def test_view_moves_bytes_and_to_dtype_moves_values() -> None:
    tensor = torch.tensor([0, 127, 255], dtype=torch.uint8).view(torch.float8_e8m0fnu)
    assert apply("view", tensor, dtype="uint8").tolist() == [0, 127, 255]
    halves = torch.tensor([1.5, 3.0], dtype=torch.float16)
    assert torch.equal(apply("to_dtype", halves, dtype="float32"), torch.tensor([1.5, 3.0]))
