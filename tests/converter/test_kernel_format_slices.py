"""Converting by slices of experts gives what Humming's own functions give for all experts at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.support.codes import pack_bits, random_codes
from tests.support.sublayers import FP8, INT4, INT8, MXFP4, NVFP4, W8A8, raw, sources

from humming_convert.errors import UnsupportedError
from humming_convert.host.target import emulate, humming
from humming_convert.kernel_format import PackedSublayer, SublayerConverter
from humming_convert.target import Target

E, N, K = 5, 512, 256
Change = Callable[[dict[str, torch.Tensor]], None]


def one_gate_differs(tensors: dict[str, torch.Tensor]) -> None:
    tensors["weight_global_scale"].fill_(2.0)
    tensors["weight_global_scale"][3, 1] = 4.0


def all_gates_alike(tensors: dict[str, torch.Tensor]) -> None:
    tensors["weight_global_scale"].fill_(2.0)


def one_tensor_scale_differs(tensors: dict[str, torch.Tensor]) -> None:
    tensors["weight_scale"].fill_(0.5)
    tensors["weight_scale"][4, 0] = 0.25


def one_lowest_code(tensors: dict[str, torch.Tensor]) -> None:
    tensors["weight_packed"].fill_(0x57575757)
    tensors["weight_packed"][4, 17, 3] = 0x57570757


def no_lowest_code(tensors: dict[str, torch.Tensor]) -> None:
    tensors["weight_packed"].fill_(0x57575757)


def one_lowest_int8(tensors: dict[str, torch.Tensor]) -> None:
    tensors["weight"][2, 5, 7] = -128


def far_scales(tensors: dict[str, torch.Tensor]) -> None:
    tensors["weight_scale"][1, 3, 2] = 90
    tensors["weight_scale"][4, 9] = 127


def nothing(tensors: dict[str, torch.Tensor]) -> None:
    """Random data as it comes."""


SLICED = [
    ("nvfp4 gates alike", NVFP4, None, 90, all_gates_alike),
    ("nvfp4 one gate differs", NVFP4, None, 90, one_gate_differs),
    ("fp8 one scale differs", {"quant_method": "fp8"}, None, 90, one_tensor_scale_differs),
    ("fp8 block", {"quant_method": "fp8", "weight_block_size": [128, 128]}, None, 90, nothing),
    ("fp8 w8a8", {"quant_method": "fp8"}, FP8, 90, nothing),
    ("int4 one lowest code", INT4, None, 90, one_lowest_code),
    ("int4 no lowest code", INT4, None, 90, no_lowest_code),
    ("int4 no lowest code, int8", INT4, INT8, 90, no_lowest_code),
    (
        "int4 no lowest code, int8, sm80",
        {**INT4, "strategy": "channel", "group_size": None},
        INT8,
        80,
        no_lowest_code,
    ),
    ("int4 one lowest code, fp8", INT4, FP8, 89, one_lowest_code),
    ("int4 g32, int8", {**INT4, "group_size": 32}, INT8, 90, nothing),
    ("int4 asym, fp8", {**INT4, "symmetric": False}, FP8, 90, nothing),
    ("w8a8 one lowest", W8A8, INT8, 90, one_lowest_int8),
    ("w8a16 one lowest", W8A8, None, 90, one_lowest_int8),
    ("w8a16 none lowest", W8A8, None, 90, nothing),
    ("mxfp4 a16", MXFP4, None, 100, nothing),
    ("mxfp4 fp8", MXFP4, FP8, 90, nothing),
    ("mxfp4 fp8 far scales", MXFP4, FP8, 90, far_scales),
    ("mxfp4 fp8-block", MXFP4, {**FP8, "group_size": 128}, 90, nothing),
    ("mxfp4 int8", MXFP4, INT8, 80, far_scales),
    ("mxfp4 mxfp8", MXFP4, {**FP8, "group_size": 32, "scale_dtype": "float8e8m0"}, 120, nothing),
    ("awq", {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True}, None, 90, nothing),
    ("awq int8", {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True}, INT8, 86, nothing),
    ("int3", {**INT4, "num_bits": 3}, None, 75, nothing),
]


def weight_of(tensors: dict[str, torch.Tensor]) -> str:
    return next(name for name in ("weight", "weight_packed", "qweight") if name in tensors)


@pytest.mark.parametrize(("name", "schema", "activation", "sm", "change"), SLICED, ids=[row[0] for row in SLICED])
@pytest.mark.parametrize("n", [N, N + 128])
def test_slices_equal_the_whole(
    name: str, schema: dict[str, Any], activation: dict[str, Any] | None, sm: int, change: Change, n: int
) -> None:
    dtype = "float16" if sm < 80 else "bfloat16"
    tensors = sources(schema, n=n, k=K, experts=E, seed=11, dtype=dtype, stacks=2)
    change(tensors)
    shape: dict[str, Any] = {
        "shape_n": n,
        "shape_k": K,
        "shape_n_stacks": [n // 2] * 2,
        "num_experts": E,
        "has_bias": False,
        "param_dtype": dtype,
        "target": Target(sm),
    }
    whole = plain_humming(tensors, schema, activation, **shape)
    weight = weight_of(tensors)
    small = {key: tensor for key, tensor in tensors.items() if key != weight}
    for size in (1, 2, E):
        converter = SublayerConverter(schema, activation, **shape, small=small)
        step = E if converter.whole else size
        chunks = [(start, tensors[weight][start : start + step]) for start in range(0, E, step)]
        if converter.needs_scan:
            for _, chunk in chunks:
                if converter.scan(chunk):
                    break
        parts = [converter.convert(chunk, start) for start, chunk in reversed(chunks)][::-1]
        joined = {key: torch.cat([part[key] for part in parts]) for key in parts[0]}
        assert {key: (value.dtype, value.shape) for key, value in joined.items()} == {
            key: (value.dtype, value.shape) for key, value in whole.tensors.items()
        }
        assert all(raw(joined[key]) == raw(whole.tensors[key]) for key in joined)
        assert converter.config.to_str() == whole.config.to_str()
        small_final = converter.small()
        assert set(small_final) == (set() if converter.whole else set(joined) - {"weight"})
        assert all(value.is_contiguous() and raw(value) == raw(joined[key]) for key, value in small_final.items())
        weights = [converter.convert_weight(chunk, start) for start, chunk in chunks]
        assert raw(torch.cat(weights)) == raw(joined["weight"])


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize(("activation", "sm"), [(None, 90), (None, 100), (FP8, 90), (INT8, 80)])
@pytest.mark.parametrize("n", [N, N + 64])
def test_codes_become_sign_and_magnitude_on_the_way(
    bits: int, activation: dict[str, Any] | None, sm: int, n: int
) -> None:
    schema = {**INT4, "num_bits": bits, "group_size": 32}
    tensors = sources(schema, n=n, k=K, experts=E, seed=bits)
    codes = 1 + random_codes(bits, bits, E, n, K) % ((1 << bits) - 1)  # never the lowest
    tensors["weight_packed"] = pack_bits(codes, bits)
    shape: dict[str, Any] = {
        "shape_n": n,
        "shape_k": K,
        "shape_n_stacks": [n],
        "num_experts": E,
        "has_bias": False,
        "param_dtype": "bfloat16",
        "target": Target(sm),
    }
    small = {key: tensor for key, tensor in tensors.items() if key != "weight_packed"}
    converter = SublayerConverter(schema, activation, **shape, small=small)
    try:
        converter.decide(has_lowest_code=False)
    except UnsupportedError:
        pytest.skip("not a pair that Humming takes")
    whole = plain_humming(tensors, schema, activation, **shape)
    before = raw(tensors["weight_packed"])
    parts = [converter.convert_weight(tensors["weight_packed"][start : start + 2], start) for start in range(0, E, 2)]
    assert raw(torch.cat(parts)) == raw(whole.tensors["weight"])
    assert raw(tensors["weight_packed"]) == before


def plain_humming(
    tensors: dict[str, torch.Tensor],
    schema: dict[str, Any],
    activation: dict[str, Any] | None,
    *,
    shape_n: int,
    shape_k: int,
    shape_n_stacks: list[int],
    num_experts: int,
    has_bias: bool,
    param_dtype: str,
    target: Target,
) -> PackedSublayer:
    """Humming's own functions in vLLM's order, all experts at once, no shadow run."""
    modules, dtype = humming(), getattr(torch, param_dtype)
    source_input = modules.schema.BaseInputSchema.from_config(activation or {"quant_method": "humming"})
    with emulate(target):
        common = {
            "shape_n_stacks": shape_n_stacks,
            "shape_k_stacks": [shape_k],
            "param_dtype": dtype,
            "num_experts": num_experts,
        }
        source = {name: tensor.clone() for name, tensor in tensors.items()}
        final, converted = modules.schema.BaseWeightSchema.from_config(schema).convert_humming(source, **common)
        input_final, _ = source_input.convert_humming(source, **common)
        assert input_final.is_compatible_with(final, dtype)
        config, packed = modules.transform.prepare_and_transform_humming_tensors(
            tensors=converted,
            shape_n=shape_n,
            shape_k=shape_k,
            weight_schema=final,
            input_schema=input_final,
            num_experts=num_experts,
            pad_n_to_multiple=256,
            pad_k_to_multiple=128,
            has_bias=has_bias,
            torch_dtype=dtype,
            device=torch.device("cpu"),
        )
    return PackedSublayer(config, final, input_final, packed)


def test_converting_before_scanning_is_refused() -> None:
    tensors = sources(INT4, n=256, k=256, experts=2, seed=1)
    small = {key: tensor for key, tensor in tensors.items() if key != "weight_packed"}
    converter = SublayerConverter(
        INT4,
        None,
        shape_n=256,
        shape_k=256,
        shape_n_stacks=[256],
        num_experts=2,
        has_bias=False,
        param_dtype="bfloat16",
        target=Target(90),
        small=small,
    )
    assert converter.needs_scan
    with pytest.raises(ValueError, match="expected a scan of all 2 experts before converting, found 0"):
        converter.convert(tensors["weight_packed"], 0)
    with pytest.raises(ValueError, match="expected a scan of all 2 experts before converting, found 0"):
        converter.convert_weight(tensors["weight_packed"], 0)
    with pytest.raises(ValueError, match="expected a scan of all 2 experts before converting, found 0"):
        converter.small()
    converter.decide(has_lowest_code=True)
    with pytest.raises(ValueError, match="expected some of 2 experts, found 1 to 2"):
        converter.convert_weight(tensors["weight_packed"], 1)
