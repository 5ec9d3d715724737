"""Decoding what the conversion made, for every parity case, against the decoded source."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tests.support.checkpoints import pack_words
from tests.support.parity import load_cases, source_tensors

from humming_convert.decode import Decoded, decode, parse_layout, raw_array
from humming_convert.decode_source import RawTensor, decode_projection
from humming_convert.expected import Expert, expected, largest_scale, stack
from humming_convert.kernel_format import convert_to_humming_moe_kernel_format
from humming_convert.layout_probe import fingerprint, layer_config_to_str
from humming_convert.schemas import weight_schema_of
from humming_convert.target import Target
from humming_loader.dtypes import code_of_torch_dtype

HUMMING = version("humming-kernels")
CASES = [case for case in load_cases() if case["expect"] != "incompatible"]


def as_raw(tensor: torch.Tensor) -> RawTensor:
    code = code_of_torch_dtype(tensor.dtype, "t")
    data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return RawTensor(code, raw_array(data, code, tuple(tensor.shape), "t"))


def one_expert(
    schema: dict[str, Any], tensors: Mapping[str, torch.Tensor], expert: int, stacks: list[int]
) -> Expert:
    """Each stacked tensor of one expert cut into its projections again."""
    parts: list[dict[str, RawTensor]] = [{} for _ in stacks]
    for name, value in tensors.items():
        if name == "weight_shape" or (name == "qzeros" and schema["quant_method"] == "gptq"):
            continue
        one = value[expert].reshape(value.shape[1:] or (1,))
        # GPTQ's plan goes by the names of Humming's standard form.
        stored = GPTQ_NAMES.get(name, name) if schema["quant_method"] == "gptq" else name
        axis = -1 if name in ("qweight", "qzeros", "scales") else 0
        for index, piece in enumerate(one.chunk(len(stacks), dim=axis)):
            parts[index][stored] = as_raw(piece)
    return stack([decode_projection(schema, part) for part in parts])


def assert_equal(found: Decoded, wanted: Decoded) -> None:
    for name in ("codes", "scale", "zero_point", "scale_2", "bias"):
        one, other = getattr(found, name), getattr(wanted, name)
        assert (one is None) == (other is None), name
        if one is not None:
            left: NDArray[Any] = np.ascontiguousarray(one)
            right: NDArray[Any] = np.ascontiguousarray(other)
            assert left.dtype == right.dtype, name
            np.testing.assert_array_equal(left, right, err_msg=name)


GPTQ_NAMES = {"qweight": "weight", "scales": "weight_scale"}


def by_schema() -> dict[str, list[dict[str, Any]]]:
    grouped: dict[str, list[dict[str, Any]]] = {}
    for case in CASES:
        grouped.setdefault(json.dumps(case["weight"], sort_keys=True), []).append(case)
    return grouped


def check(case: dict[str, Any], tensors: dict[str, torch.Tensor], source: list[Expert]) -> str:
    """Convert `tensors`, decode, and compare with `source`; the layout's weight type and its flags."""
    target = Target(case["sm"], tuple(case["cuda"]))
    packed = convert_to_humming_moe_kernel_format(
        tensors,
        case["weight"],
        case["input"],
        shape_n=case["n"],
        shape_k=case["k"],
        shape_n_stacks=case["stacks"],
        num_experts=case["experts"],
        has_bias=case["bias"],
        param_dtype=case["dtype"],
        target=target,
    )
    layout = parse_layout(layer_config_to_str(packed.config), fingerprint(packed.config, target))
    raw = {name: as_raw(tensor).array for name, tensor in packed.tensors.items()}
    largest = largest_scale(layout, source) if layout.flags["use_int_weight_scale"] else None
    assert_equal(decode(layout, raw), expected(layout, source, HUMMING, largest))
    return " ".join([layout.weight.name, *(name for name, value in layout.flags.items() if value)])


@pytest.mark.parametrize("key", sorted(by_schema()))
def test_decoded_layout_is_the_decoded_source(key: str) -> None:
    schema = json.loads(key)
    for case in by_schema()[key]:
        tensors = source_tensors(case, weight_schema_of(schema))
        source = [one_expert(schema, tensors, expert, case["stacks"]) for expert in range(case["experts"])]
        try:
            check(case, tensors, source)
        except AssertionError as error:
            error.add_note(case["id"])
            raise


def odd_case(weight: dict[str, Any], activation: str | None, **more: Any) -> dict[str, Any]:  # noqa: ANN401
    """A sublayer whose N and K both need padding."""
    fp8 = {"quant_method": "humming", "dtype": "float8e4m3"}
    known: dict[str | None, dict[str, Any] | None] = {
        None: None,
        "int8": {"quant_method": "humming", "dtype": "int8"},
        "fp8": fp8,
        "fp8-block": fp8 | {"group_size": 128},
    }
    case: dict[str, Any] = {"weight": weight, "input": known[activation], "sm": 90, "cuda": (13, 0)}
    shape = {"n": 192, "k": 192, "stacks": [96, 96], "experts": 2}
    return case | shape | {"bias": True, "dtype": "bfloat16", "seed": 7} | more


def run_odd(case: dict[str, Any]) -> str:
    schema = weight_schema_of(case["weight"])
    tensors = source_tensors(case, schema)
    source = [one_expert(case["weight"], tensors, one, case["stacks"]) for one in range(case["experts"])]
    return check(case, tensors, source)


@pytest.mark.parametrize(
    ("sm", "activation"),
    [
        (80, None),
        (80, "int8"),
        (89, None),
        (89, "fp8"),
        (89, "int8"),
        (90, "fp8"),
        (90, "int8"),
        (90, "fp8-block"),
    ],
)
def test_padded_mxfp4(sm: int, activation: str | None) -> None:
    run_odd(odd_case({"quant_method": "mxfp4"}, activation, sm=sm))


PACKED = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "type": "int",
    "strategy": "group",
}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", range(2, 9))
def test_integers_of_every_width(bits: int, symmetric: bool, dtype: str) -> None:
    weight = PACKED | {"num_bits": bits, "symmetric": symmetric, "group_size": 32}
    kind = run_odd(odd_case(weight, None, dtype=dtype))
    # 36,864 random codes: the lowest occurs, so Humming keeps the integers.
    assert kind.split()[0] == f"uint{bits}"


@pytest.mark.parametrize("bits", range(2, 9))
def test_sign_and_magnitude_when_the_lowest_code_is_nowhere(bits: int) -> None:
    weight = PACKED | {"num_bits": bits, "symmetric": True, "group_size": 64}
    case = odd_case(weight, None)
    tensors = source_tensors(case, weight_schema_of(weight))
    rng = np.random.default_rng(bits)
    codes = rng.integers(1, 1 << bits, (2, 192, 192)).astype(np.uint8)
    packed = [pack_words(one, bits) for one in codes]
    tensors["weight_packed"] = torch.from_numpy(np.stack(packed))
    source = [one_expert(weight, tensors, one, case["stacks"]) for one in range(2)]
    np.testing.assert_array_equal(np.stack([one.codes for one in source]), codes)
    assert check(case, tensors, source).split()[0] == f"float{bits}e0m{bits - 1}"


def test_groups_that_are_no_power_of_two() -> None:
    weight = PACKED | {"num_bits": 4, "symmetric": False, "group_size": 96}
    run_odd(odd_case(weight, None))


def test_integer_scales() -> None:
    weight = {"quant_method": "humming", "b_dtype": "uint4", "group_size": 64, "group_size_n": 1}
    case = odd_case(weight, "int8", bias=False)
    tensors = source_tensors(case, weight_schema_of(weight))
    as_packed = {"weight_packed": tensors["weight"], "weight_scale": tensors["weight_scale"]}
    schema = PACKED | {"num_bits": 4, "symmetric": True, "group_size": 64}
    source = [one_expert(schema, as_packed, one, case["stacks"]) for one in range(2)]
    assert "use_int_weight_scale" in check(case, tensors, source)
