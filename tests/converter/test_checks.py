from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.checkpoints import RawTensor, Tensors, make_checkpoint

from humming_convert.checks import check_expected, check_scale
from humming_convert.plan_build import build_plan
from humming_convert.source import Payload, open_checkpoint

DAMAGED = "the checkpoint is damaged, or calibration never reached this expert: quantize it again"
INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn])
@pytest.mark.parametrize("kind", ["positive", "nonnegative", "finite", "finite,positive"])
def test_sound_scales_pass(dtype: torch.dtype, kind: str) -> None:
    assert check_scale("s", torch.tensor([0.5, 1.0, 3.0]).to(dtype), kind) is None


@pytest.mark.parametrize(
    ("values", "kind", "expected"),
    [
        ([1.0, NAN], "positive", "positive scales, found 1 of 2 values such as nan"),
        ([INF, 1.0], "positive", "positive scales, found 1 of 2 values such as inf"),
        ([0.0, 1.0], "positive", "positive scales, found 1 of 2 values such as 0.0"),
        ([-1.0, -2.0], "positive", "positive scales, found 2 of 2 values such as -1.0"),
        ([1.0, NAN], "nonnegative", "scales >= 0, found 1 of 2 values such as nan"),
        ([-0.5, 1.0], "nonnegative", "scales >= 0, found 1 of 2 values such as -0.5"),
        ([1.0, -INF], "finite", "finite scales, found 1 of 2 values such as -inf"),
        ([1.0, NAN], "nonnegative,float16", "scales >= 0, found 1 of 2 values such as nan"),
    ],
)
def test_scales_that_cannot_be(values: list[float], kind: str, expected: str) -> None:
    problem = check_scale("s", torch.tensor(values), kind)
    assert str(problem) == f"tensor s: expected {expected}; {DAMAGED}"


def test_what_each_rule_allows() -> None:
    assert check_scale("s", torch.tensor([0.0, 1.0]), "nonnegative") is None
    assert check_scale("s", torch.tensor([-1.0, 0.0]), "finite") is None


def test_nan_in_float8() -> None:
    codes = torch.tensor([0x38, 0x7F], dtype=torch.uint8).view(torch.float8_e4m3fn)
    assert "1 of 2 values such as nan" in str(check_scale("s", codes, "nonnegative"))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e8m0fnu])
def test_nan_in_exponent_bytes(dtype: torch.dtype) -> None:
    codes = torch.tensor([0, 254], dtype=torch.uint8).view(dtype)
    assert check_scale("s", codes, "e8m0") is None
    codes = torch.tensor([255, 1, 255], dtype=torch.uint8).view(dtype)
    expected = "tensor s: expected e8m0 scales, found 2 of 3 bytes that mean NaN (255)"
    assert str(check_scale("s", codes, "e8m0")) == f"{expected}; {DAMAGED}"


@pytest.mark.parametrize(
    ("value", "is_lost"),
    [
        (1.0, False),
        (0.0123, False),
        (65504.0, False),
        (70000.0, True),
        (1e-9, True),
        (3e-7, True),
        (1e-4, False),
    ],
)
def test_scales_that_float16_would_lose(value: float, is_lost: bool) -> None:
    problem = check_scale("s", torch.tensor([value, 0.0]), "float16")
    assert (problem is not None) == is_lost
    if problem is not None:
        assert str(problem).endswith("; use --dtype bfloat16")


def holds(rule: str, value: float) -> bool:
    """A rule on one F32 number, in numpy."""
    number = np.float32(value)
    with np.errstate(all="ignore"):
        lost = np.abs(np.float32(np.float16(number)) - number)
        return bool(
            {
                "finite": np.isfinite(number),
                "positive": np.isfinite(number) and number > 0,
                "nonnegative": np.isfinite(number) and number >= 0,
                "reciprocal": np.isfinite(np.float32(1) / number),
                "float16": lost <= np.abs(number) * np.float32(2.0**-8),
                "finite_float16": np.isfinite(np.float16(number)),
                "finite_bfloat16": np.abs(number) < np.uint32(0x7F7F8000).view(np.float32),
            }[rule]
        )


EDGES = [0.0, 1e-45, 2.0**-127, 2.0**-126, 2.0**-25, 2.0**-24, 2.0**-15, 2.0**-14, 1.0, 448.0]
EDGES += [65504.0, 65519.0, 65520.0, 3.38e38, 3.39e38, 3.4e38, INF, NAN]


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2]
)
@pytest.mark.parametrize(
    "rule", ["finite", "positive", "nonnegative", "reciprocal", "float16", "finite_float16", "finite_bfloat16"]
)
def test_a_tensor_passes_if_every_value_does(rule: str, dtype: torch.dtype) -> None:
    rng = np.random.default_rng(4)
    codes = torch.from_numpy(rng.integers(0, 256, size=(400, 3 * dtype.itemsize), dtype=np.uint8)).view(dtype)
    unsigned = codes.view(torch.uint8).clone()
    unsigned[:, dtype.itemsize - 1 :: dtype.itemsize] &= 0x7F
    edges = torch.tensor([[a, b, 1.0] for a in EDGES for b in EDGES] + [[1.0, -edge, 1.0] for edge in EDGES])
    for row in torch.cat([codes, unsigned.view(dtype), edges.to(dtype)]):
        is_sound = all(holds(rule, value) for value in row.float().tolist())
        assert (check_scale("s", row, rule) is None) is is_sound, row


@pytest.mark.parametrize(("rule", "least", "greatest"), [("e8m0", 0, 254), ("e5m0", 113, 142)])
def test_exponent_bytes_that_a_kernel_holds(rule: str, least: int, greatest: int) -> None:
    for pair in np.ndindex(256, 256):
        if pair[0] % 16 and pair[0] not in (least, greatest, least - 1, greatest + 1):
            continue
        codes = torch.tensor(pair, dtype=torch.uint8)
        assert (check_scale("s", codes, rule) is None) is (least <= min(pair) and max(pair) <= greatest)


def test_an_empty_tensor_has_no_bad_value() -> None:
    for rule in ("finite", "positive", "e8m0", "eights"):
        assert check_scale("s", torch.empty(0, dtype=torch.uint8), rule) is None


def test_zero_points_that_are_not_eight() -> None:
    eights = torch.full((2, 3), -2004318072, dtype=torch.int32)  # 0x88888888
    assert check_scale("z", eights, "eights") is None
    eights[1, 2] = 0x08888887 - 0x80000000 + 0  # one nibble is 7
    text = str(check_scale("z", eights, "eights"))
    assert text.startswith("tensor z: expected zero point 8 throughout, found ")
    assert "zero_point false" in text


def test_recorded_shapes_are_compared(tmp_path: Path) -> None:
    def edit(tensors: Tensors, config: dict[str, Any]) -> None:
        name = "model.layers.0.mlp.experts.2.up_proj.weight_shape"
        tensors[name] = RawTensor("I64", np.array([256, 128], dtype=np.int64))

    checkpoint = open_checkpoint(make_checkpoint(tmp_path / "m", format="ct_int4", edit=edit))
    plan = build_plan(checkpoint)
    with Payload(checkpoint) as payload:
        found = [
            check_expected(checkpoint, payload, part) for layer in plan.layers for part in layer.sublayers
        ]
    assert [len(problems) for problems in found] == [1, 0, 0, 0]
    assert str(found[0][0]) == (
        "tensor model.layers.0.mlp.experts.2.up_proj.weight_shape: expected [256, 256], found [256, 128]; "
        "the tensors disagree"
    )


def test_recorded_shapes_may_be_narrower_integers(tmp_path: Path) -> None:
    def edit(tensors: Tensors, config: dict[str, Any]) -> None:
        for name in [name for name in tensors if name.endswith("weight_shape")]:
            tensors[name] = RawTensor("I32", tensors[name].array.astype(np.int32))

    checkpoint = open_checkpoint(make_checkpoint(tmp_path / "m", format="ct_int4", edit=edit))
    plan = build_plan(checkpoint)
    with Payload(checkpoint) as payload:
        assert [check_expected(checkpoint, payload, part) for part in plan.layers[0].sublayers] == [[], []]
