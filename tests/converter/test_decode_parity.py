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
        axis = -1 if name in ("qweight", "qzeros", "scales") else 0
        for index, piece in enumerate(one.chunk(len(stacks), dim=axis)):
            parts[index][name] = as_raw(piece)
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


def by_schema() -> dict[str, list[dict[str, Any]]]:
    grouped: dict[str, list[dict[str, Any]]] = {}
    for case in CASES:
        grouped.setdefault(json.dumps(case["weight"], sort_keys=True), []).append(case)
    return grouped


@pytest.mark.parametrize("key", sorted(by_schema()))
def test_decoded_layout_is_the_decoded_source(key: str) -> None:
    schema = json.loads(key)
    for case in by_schema()[key]:
        target = Target(case["sm"], tuple(case["cuda"]))
        tensors = source_tensors(case, weight_schema_of(schema))
        packed = convert_to_humming_moe_kernel_format(
            tensors,
            schema,
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
        experts = [one_expert(schema, tensors, expert, case["stacks"]) for expert in range(case["experts"])]
        largest = largest_scale(layout, experts) if layout.flags["use_int_weight_scale"] else None
        try:
            assert_equal(decode(layout, raw), expected(layout, experts, HUMMING, largest))
        except AssertionError as error:
            error.add_note(case["id"])
            raise
