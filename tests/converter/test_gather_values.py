"""Values that would be lost on the way to the parameter dtype: refused while they are read, never flattened."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.checkpoints import RawTensor, Tensors, floats, make_checkpoint

from humming_convert.checks import check_scale, check_unequal
from humming_convert.errors import CheckpointError
from humming_convert.gather import Gatherer
from humming_convert.plan_build import build_plan
from humming_convert.source import Payload, open_checkpoint

EXPERTS = "model.layers.0.mlp.experts"
Change = Callable[[str, RawTensor], RawTensor]


def read_all(path: Path, dtype: str) -> None:
    """Every tensor of every sublayer, as a conversion reads them."""
    checkpoint = open_checkpoint(path)
    plan = build_plan(checkpoint, dtype=dtype)
    with Payload(checkpoint) as payload:
        gatherer = Gatherer(checkpoint, payload)
        for layer in plan.layers:
            for part in layer.sublayers:
                for tensor in part.tensors:
                    gatherer.stack(tensor)


def made(tmp_path: Path, ending: str, change: Change, **options: Any) -> Path:  # noqa: ANN401 - passed on
    """A checkpoint of one layer in which every tensor whose name ends so is changed."""

    def edit(tensors: Tensors, config: dict[str, Any]) -> None:
        for name in [name for name in tensors if name.endswith(ending) and ".experts" in name]:
            tensors[name] = change(name, tensors[name])

    return make_checkpoint(tmp_path / "m", layers=1, edit=edit, **options)


def refused(path: Path, dtype: str) -> str:
    """The first line of what reading raises."""
    with pytest.raises(CheckpointError) as error:
        read_all(path, dtype)
    return str(error.value).splitlines()[0]


def filled(value: float, code: str) -> Change:
    return lambda name, tensor: floats(np.full(tensor.array.shape, value), code)


def bytes_of(value: int, code: str) -> Change:
    return lambda name, tensor: RawTensor(code, np.full(tensor.array.shape, value, np.uint8))


def unequal(gate: float, up: float) -> Change:
    return lambda name, tensor: floats(np.full(tensor.array.shape, up if ".up_proj." in name else gate), "F32")


@pytest.mark.parametrize(("byte", "is_lost"), [(127 - 30, True), (127 + 20, True), (127 - 14, False), (127, False)])
def test_exponent_bytes_of_a_block_scale_in_float16(tmp_path: Path, byte: int, is_lost: bool) -> None:
    path = made(tmp_path, "weight_scale_inv", bytes_of(byte, "F8_E8M0"), scale_dtype="F8_E8M0")
    read_all(path, "bfloat16")
    if not is_lost:
        read_all(path, "float16")
        return
    assert refused(path, "float16") == (
        f"tensor {EXPERTS}.0.gate_proj.weight_scale_inv: expected scales that float16 can hold, "
        f"found 4 of 4 values such as {2.0 ** (byte - 127)}; use --dtype bfloat16"
    )


@pytest.mark.parametrize(("byte", "is_lost"), [(112, True), (113, False), (142, False), (143, True), (0, True)])
@pytest.mark.parametrize(
    ("family", "form", "name"),
    [("gpt_oss", "mxfp4_gpt_oss", "weight_scale"), ("qwen3_moe", "ct_mxfp4", f"{EXPERTS}.0.gate_proj.weight_scale")],
)
def test_exponent_bytes_that_float16_kernels_do_not_hold(
    tmp_path: Path, family: str, form: str, name: str, byte: int, is_lost: bool
) -> None:
    ending = "_scales" if family == "gpt_oss" else "weight_scale"
    path = made(tmp_path, ending, bytes_of(byte, "U8"), family=family, format=form)
    read_all(path, "bfloat16")
    if not is_lost:
        read_all(path, "float16")
        return
    text = refused(path, "float16")
    assert "expected exponent bytes from 113 to 142, which is what float16 kernels hold, found " in text
    assert text.endswith(f"values such as {byte}; use --dtype bfloat16")


@pytest.mark.parametrize("form", ["fp8_tensor", "ct_fp8_tensor"])
def test_unequal_scales_of_gate_and_up_become_float16(tmp_path: Path, form: str) -> None:
    path = made(tmp_path, ".weight_scale", unequal(1e-9, 3e-9), format=form, scale_dtype="F32")
    read_all(path, "bfloat16")
    text = refused(path, "float16")
    assert text.startswith(f"tensor {EXPERTS}.0.gate_proj.weight_scale: expected scales that float16 can hold")


@pytest.mark.parametrize("form", ["fp8_tensor", "ct_fp8_tensor"])
def test_equal_scales_of_gate_and_up_stay_as_they_are(tmp_path: Path, form: str) -> None:
    read_all(made(tmp_path, ".weight_scale", unequal(1e-9, 1e-9), format=form, scale_dtype="F32"), "float16")


def test_reciprocals_are_what_becomes_float16(tmp_path: Path) -> None:
    path = made(tmp_path, "weight_global_scale", unequal(2e7, 3e7), format="ct_nvfp4")
    read_all(path, "bfloat16")
    text = refused(path, "float16")
    assert f"{EXPERTS}.0.gate_proj.weight_global_scale: expected scales that float16 can hold" in text
    assert "such as 4.99" in text or "such as 5.0" in text


def test_equal_second_scales_stay_as_they_are(tmp_path: Path) -> None:
    # The reciprocal of genuine checkpoints, 3.3e-5, is no normal float16; larger ones would round to nothing.
    read_all(made(tmp_path, "weight_global_scale", unequal(3e7, 3e7), format="ct_nvfp4"), "float16")


def test_a_reciprocal_that_is_infinite(tmp_path: Path) -> None:
    path = made(tmp_path, "weight_global_scale", filled(1e-39, "F32"), format="ct_nvfp4")
    assert refused(path, "bfloat16").startswith(
        f"tensor {EXPERTS}.0.gate_proj.weight_global_scale: expected scales whose reciprocals are finite, found 1 of 1 "
    )


def test_a_bias_that_float16_cannot_hold(tmp_path: Path) -> None:
    large = made(tmp_path / "a", "_bias", filled(1e5, "BF16"), family="gpt_oss", format="mxfp4_gpt_oss")
    read_all(large, "bfloat16")
    text = refused(large, "float16")
    assert text.startswith(f"tensor {EXPERTS}.gate_up_proj_bias: expected values that float16 can hold, found 2048 ")
    # One that rounds to nothing changes nothing.
    read_all(made(tmp_path / "b", "_bias", filled(1e-9, "BF16"), family="gpt_oss", format="mxfp4_gpt_oss"), "float16")


@pytest.mark.parametrize(
    ("form", "ending"), [("fp8_block", "weight_scale_inv"), ("ct_int4", "weight_scale"), ("ct_fp8_channel", "_scale")]
)
def test_the_largest_numbers_round_to_infinity_in_bfloat16(tmp_path: Path, form: str, ending: str) -> None:
    path = made(tmp_path, ending, filled(3.4028235e38, "F32"), format=form, scale_dtype="F32")
    assert "expected values that bfloat16 can hold, found " in refused(path, "bfloat16")
    read_all(made(tmp_path / "b", ending, filled(3.38e38, "F32"), format=form, scale_dtype="F32"), "bfloat16")


def test_unequal_scales_that_round_to_infinity_in_bfloat16(tmp_path: Path) -> None:
    path = made(tmp_path, ".weight_scale", unequal(1.0, 3.4028235e38), format="fp8_tensor")
    assert refused(path, "bfloat16").startswith(
        f"tensor {EXPERTS}.0.up_proj.weight_scale: expected values that bfloat16 can hold, found 1 of 1 "
    )
    read_all(made(tmp_path / "b", ".weight_scale", filled(3.4028235e38, "F32"), format="fp8_tensor"), "bfloat16")


def test_one_expert_is_enough_to_have_all_rounded() -> None:
    names = ["a", "b", "c", "d"]
    values = torch.tensor([[1e-9, 1e-9], [1.0, 2.0]])
    problems = check_unequal(names, values, "positive,unequal_float16")
    assert [problem.where for problem in problems] == ["tensor a", "tensor b"]
    assert check_unequal(names, values[:, :1].expand(2, 2), "unequal_float16") == []
    assert check_unequal(names[:2], values[:, 0], "unequal_float16") == []
    assert check_scale("a", values, "positive,unequal_float16") is None


def test_scalars_of_different_form_are_read_alike(tmp_path: Path) -> None:
    forms = [(), (1,), (1, 1)]

    def edit(tensors: Tensors, config: dict[str, Any]) -> None:
        names = [name for name in tensors if name.endswith(".weight_scale")]
        for index, name in enumerate(names):
            tensors[name] = floats(np.full(forms[index % 3], index + 1.0), "F32")

    path = make_checkpoint(tmp_path / "m", format="fp8_tensor", layers=1, edit=edit)
    checkpoint = open_checkpoint(path)
    w13, w2 = build_plan(checkpoint).layers[0].sublayers
    with Payload(checkpoint) as payload:
        gatherer = Gatherer(checkpoint, payload)
        assert gatherer.stack(w13.tensors[1]).tolist() == [[1, 2], [4, 5], [7, 8], [10, 11]]
        assert gatherer.stack(w2.tensors[1]).tolist() == [3, 6, 9, 12]
