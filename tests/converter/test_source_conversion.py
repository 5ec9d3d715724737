"""A source schema's conversion slice by slice, against Humming's own code without this package's short cuts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.sublayers import INT4, MXFP4, NVFP4, W8A8, raw, sources

from humming_convert.errors import UnsupportedError
from humming_convert.host.shadow import weight_only
from humming_convert.host.target import emulate, humming
from humming_convert.source_conversion import SourceConversion
from humming_convert.target import Target

E, N, K = 3, 256, 256
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True}
FP8_BLOCK = {"quant_method": "fp8", "weight_block_size": [128, 128]}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 64, "sym": True}


def conversion(schema: dict[str, Any]) -> tuple[SourceConversion, dict[str, torch.Tensor], str]:
    tensors = sources(schema, n=N, k=K, experts=E, seed=7)
    key = next(name for name in ("weight", "weight_packed", "qweight") if name in tensors)
    made = SourceConversion(
        schema=humming().schema.BaseWeightSchema.from_config(schema),
        stacks=[N],
        k=K,
        param_dtype=torch.bfloat16,
        num_experts=E,
        weight_key=key,
        weight_attr={"shape": tuple(tensors[key].shape), "dtype": tensors[key].dtype},
        small={name: tensor for name, tensor in tensors.items() if name != key},
    )
    return made, tensors, key


def convert_all(schema: dict[str, Any], tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Humming's conversion of all experts with every tensor at hand."""
    _, converted = (
        humming()
        .schema.BaseWeightSchema.from_config(schema)
        .convert_humming(
            tensors={name: tensor.clone() for name, tensor in tensors.items()},
            shape_n_stacks=[N],
            shape_k_stacks=[K],
            param_dtype=torch.bfloat16,
            num_experts=E,
            convert_symmetric_integer=False,
        )
    )
    return dict(converted)


@pytest.mark.parametrize(
    ("schema", "is_view"),
    [
        (FP8_BLOCK, True),
        ({"quant_method": "fp8"}, True),
        (MXFP4, True),
        (NVFP4, True),
        (INT4, True),
        ({**INT4, "num_bits": 3}, True),
        ({**INT4, "symmetric": False}, True),
        (W8A8, False),
        (AWQ, False),
        (GPTQ, False),
    ],
)
def test_slices_are_the_rows_of_the_whole(schema: dict[str, Any], is_view: bool) -> None:
    made, tensors, key = conversion(schema)
    with emulate(Target(90)):
        wanted = convert_all(schema, tensors)
        _, converted = made.whole()
        assert {name: raw(value) for name, value in converted.items() if name != "weight"} == {
            name: raw(value) for name, value in wanted.items() if name != "weight"
        }
        assert converted["weight"].shape == wanted["weight"].shape
        for start, end in ((2, 3), (0, 2), (1, 3)):
            weight = tensors[key][start:end]
            before = raw(weight)
            packed = made.packed(weight, slice(start, end))
            assert packed.dtype == torch.int32
            assert torch.equal(packed, wanted["weight"][start:end])
            assert (packed.data_ptr() == weight.data_ptr()) is is_view
            assert made._is_view is is_view  # so that later slices are spared Humming's look at them
            assert raw(weight) == before


@pytest.mark.parametrize("has_zero_point", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_awq_is_what_humming_makes_of_every_code(dtype: torch.dtype, has_zero_point: bool) -> None:
    schema = {**AWQ, "zero_point": has_zero_point}
    tensors = sources(schema, n=N, k=K, experts=E, seed=3, dtype="float16")
    awq = humming().schema_awq.AWQWeightSchema
    original, own = awq.__dict__["_convert_humming"], awq(bits=4, group_size=64, zero_point=has_zero_point)
    arguments = {"shape_n_stacks": [N], "shape_k_stacks": [K], "param_dtype": dtype, "num_experts": E}
    with emulate(Target(90)):
        assert awq.__dict__["_convert_humming"] is not original
        schema_wanted, wanted = original(own, tensors, **arguments)
        schema_found, found = own._convert_humming(tensors, **arguments)
        with weight_only():
            alone = own._convert_humming(tensors, **arguments)[1]
    assert schema_found == schema_wanted
    assert {name: (value.dtype, value.shape, raw(value)) for name, value in found.items()} == {
        name: (value.dtype, value.shape, raw(value)) for name, value in wanted.items()
    }
    assert raw(alone["weight"]) == raw(wanted["weight"])


def test_a_weight_of_another_shape_or_dtype_is_refused() -> None:
    made, tensors, key = conversion(FP8_BLOCK)
    with emulate(Target(90)):
        made.whole()
        for _ in range(2):
            for wrong in (tensors[key][..., :128], tensors[key].view(torch.uint8), tensors[key][:0]):
                with pytest.raises(UnsupportedError, match="weight"):
                    made.packed(wrong, slice(0, 1))
            made.packed(tensors[key], slice(0, E))

