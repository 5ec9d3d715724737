"""What the kernel format refuses, by name, and that every target converts or says why not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.parity import load_cases
from tests.support.sublayers import INT4, sources

from humming_convert.errors import UnsupportedError
from humming_convert.kernel_format import convert_to_humming_moe_kernel_format
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
