"""What the kernel format refuses, by name, and that every target converts or says why not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.support.parity import load_cases
from tests.support.sublayers import INT4, sources

from humming_convert.errors import UnsupportedError
from humming_convert.kernel_format import convert_to_humming_moe_kernel_format
from humming_convert.sublayer_inputs import Facts, explained
from humming_convert.target import SUPPORTED_SMS, Target

# -------------------------------------------------------------------------------------------


def refusal(
    schema: dict[str, Any],
    activation: dict[str, Any] | None = None,
    *,
    n: int = 256,
    k: int = 256,
    sm: int = 90,
) -> str:
    try:
        tensors = sources(schema, n=n, k=k, experts=2, seed=1)
    except (AssertionError, ValueError):
        tensors = {}
    with pytest.raises(UnsupportedError) as caught:
        convert_to_humming_moe_kernel_format(
            tensors,
            schema,
            activation,
            shape_n=n,
            shape_k=k,
            shape_n_stacks=[n],
            num_experts=2,
            has_bias=False,
            param_dtype="bfloat16",
            target=Target(sm),
        )
    return str(caught.value)


def test_refusals_name_the_schema_and_the_shape() -> None:
    where = "compressed-tensors pack-quantized 4 bits"
    assert refusal({**INT4, "group_size": 8}) == (
        "weights uint4 (scales bfloat16, group 8): "
        "expected an activation that Humming's kernels take with them on sm90, found "
        "activation bfloat16 (group none); choose another --activation or --target"
    )
    assert refusal(INT4, k=320) == (
        f"{where} group size 128, N 256 x K 320, 2 experts, sm90: "
        "expected K a multiple of the group size 128, found K 320"
    )
    asymmetric = {**INT4, "symmetric": False}
    assert "N times 4 bits a multiple of 32, so that zero points fill whole words, found N 260" in refusal(
        asymmetric, n=260
    )
    block = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    assert "N a multiple of the 128 rows that share a scale, found N 192" in refusal(block, n=192)
    assert refusal({"quant_method": "exl3"}).endswith(
        "expected a schema that Humming takes, found unsupported weight quant_method: exl3"
    )


def test_wrong_tensors_are_named() -> None:
    tensors = sources(INT4, n=256, k=256, experts=2, seed=1)
    tensors["weight_scale"] = tensors["weight_scale"][:, :128]
    with pytest.raises(
        UnsupportedError, match=r"weight_scale: expected \(2, 256, 2\) torch.bfloat16, found \(2, 128, 2\)"
    ):
        convert_to_humming_moe_kernel_format(
            tensors,
            INT4,
            None,
            shape_n=256,
            shape_k=256,
            shape_n_stacks=[256],
            num_experts=2,
            has_bias=False,
            param_dtype="bfloat16",
            target=Target(90),
        )


SCHEMAS: dict[str, dict[str, Any]] = {case["id"].split("/")[0]: case["weight"] for case in load_cases()}
SCHEMAS |= {f"int{bits}": {**INT4, "num_bits": bits} for bits in range(2, 9)}
SCHEMAS |= {
    "g32": {**INT4, "group_size": 32},
    "asym_chan": {**INT4, "strategy": "channel", "group_size": None, "symmetric": False},
}
INPUTS: dict[str, dict[str, Any] | None] = {case["id"].split("/")[1]: case["input"] for case in load_cases()}


@pytest.mark.parametrize("sm", SUPPORTED_SMS)
@pytest.mark.parametrize("schema", SCHEMAS.values(), ids=SCHEMAS)
def test_every_target_converts_or_says_why_not(schema: dict[str, Any], sm: int) -> None:
    converted, refusals = 0, list[str]()
    for dtype in ("bfloat16", "float16"):
        tensors = sources(schema, n=256, k=512, experts=2, seed=5, dtype=dtype)
        for activation in INPUTS.values():
            try:
                packed = convert_to_humming_moe_kernel_format(
                    tensors,
                    schema,
                    activation,
                    shape_n=256,
                    shape_k=512,
                    shape_n_stacks=[256],
                    num_experts=2,
                    has_bias=False,
                    param_dtype=dtype,
                    target=Target(sm),
                )
            except UnsupportedError as error:
                refusals.append(str(error))
                continue
            converted += 1
            assert packed.config.sm_version == sm
            assert packed.tensors["weight"].dtype == torch.int32
    assert converted >= 1
    assert all(f"sm{sm}" in refusal for refusal in refusals)


def convert_int4(schema: Any = INT4, activation: Any = None, **changed: Any) -> None:  # noqa: ANN401 - wrong on purpose
    given: dict[str, Any] = {
        "shape_n": 256,
        "shape_k": 256,
        "shape_n_stacks": (128, 128),
        "num_experts": 2,
        "has_bias": False,
        "param_dtype": "bfloat16",
        "target": Target(90),
    }
    extra = changed.pop("extra", {})
    tensors = sources(INT4, n=256, k=256, experts=2, seed=1, stacks=2, dtype=changed.get("param_dtype", "bfloat16"))
    convert_to_humming_moe_kernel_format(tensors | extra, schema, activation, **(given | changed))


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"shape_n_stacks": (128, 129)}, "shape_n_stacks: expected rows that add up to 256, found [128, 129]"),
        ({"shape_n_stacks": (256, 0)}, "shape_n_stacks: expected rows that add up to 256, found [256, 0]"),
        ({"schema": None}, "weight schema: expected a dictionary or Humming's BaseWeightSchema, found None"),
        ({"schema": "awq"}, "weight schema: expected a dictionary or Humming's BaseWeightSchema, found 'awq'"),
        ({"activation": "fp8"}, "input schema: expected a dictionary or Humming's BaseInputSchema, found 'fp8'"),
        ({"extra": {"junk": torch.ones(1)}}, "junk: expected only tensors of the schema (weight"),
        ({"extra": {"weight_zero_point": torch.ones(2, 32, 2, dtype=torch.int32)}}, "weight_zero_point: expected only"),
        ({"extra": {"bias": torch.ones(2, 256)}}, "bias: expected only tensors of the schema"),
        ({"num_experts": 3}, "expected (3, 256"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_refused_by_name(changed: dict[str, Any], text: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        convert_int4(**changed)
    assert text in str(caught.value)


def test_tensors_that_nothing_reads_may_come_along() -> None:
    convert_int4(
        extra={
            "weight_shape": torch.ones(2, 2).long(),
            "weight_g_idx": torch.zeros(2, 256),
            "input_scale": torch.ones(2),
        }
    )


def test_scales_that_the_parameter_dtype_cannot_hold_are_refused() -> None:
    scale = torch.full((2, 256, 2), 1e6)
    convert_int4(extra={"weight_scale": scale})
    with pytest.raises(UnsupportedError) as caught:
        convert_int4(extra={"weight_scale": scale}, param_dtype="float16")
    assert str(caught.value).endswith(
        "weight_scale: expected values that torch.float16 can hold, found 1024 of 1024 infinite or NaN; "
        "bfloat16 has the range of float32"
    )


def test_running_out_of_memory_is_no_refusal() -> None:
    facts = Facts(SimpleNamespace(quant_method="fp8"), 256, 256, 2, Target(90))
    text = "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory"
    with pytest.raises(RuntimeError, match="can't allocate memory"), explained(facts):
        raise RuntimeError(text)
    with pytest.raises(UnsupportedError), explained(facts):
        raise RuntimeError("shape mismatch")
