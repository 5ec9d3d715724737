"""Random sublayers under Humming's schemas, drawn as the recorded cases were, and common schemas."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from humming_convert.host.target import humming

CT = {"quant_method": "compressed-tensors", "symmetric": True}
INT4 = {
    **CT,
    "format": "pack-quantized",
    "type": "int",
    "num_bits": 4,
    "strategy": "group",
    "group_size": 128,
}
NVFP4 = {
    **CT,
    "format": "nvfp4-pack-quantized",
    "type": "float",
    "num_bits": 4,
    "strategy": "tensor_group",
    "group_size": 16,
}
W8A8 = {**CT, "format": "int-quantized", "type": "int", "num_bits": 8, "strategy": "channel"}
MXFP4 = {"quant_method": "mxfp4"}
FP8 = {"quant_method": "humming", "dtype": "float8e4m3"}
INT8 = {"quant_method": "humming", "dtype": "int8"}


def source_tensor(
    rng: np.random.Generator, name: str, shape: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    """The rule by which the recorded cases were drawn (data/parity/inputs.py)."""
    if dtype == torch.int32:
        return torch.from_numpy(rng.integers(-(2**31), 2**31, size=shape, dtype=np.int64).astype(np.int32))
    if dtype == torch.int64:
        return torch.zeros(shape, dtype=dtype)
    if dtype == torch.int8:
        return torch.from_numpy(rng.integers(-127, 128, size=shape).astype(np.int8))
    if dtype == torch.uint8:
        low, high = (112, 128) if "scale" in name else (0, 256)
        return torch.from_numpy(rng.integers(low, high, size=shape).astype(np.uint8))
    if dtype == torch.float8_e4m3fn:
        codes = rng.integers(0, 0x7F, size=shape).astype(np.uint8)
        if "scale" not in name:
            codes |= rng.integers(0, 2, size=shape).astype(np.uint8) << 7
        return torch.from_numpy(codes).view(torch.float8_e4m3fn)
    return torch.from_numpy(rng.uniform(0.01, 0.1, size=shape).astype(np.float32)).to(dtype)


def raw(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().flatten().view(torch.uint8).numpy())


def sources(
    schema: dict[str, Any],
    *,
    n: int,
    k: int,
    experts: int,
    seed: int,
    dtype: str = "bfloat16",
    bias: bool = False,
    stacks: int = 1,
) -> dict[str, torch.Tensor]:
    attrs = (
        humming()
        .schema.BaseWeightSchema.from_config(schema)
        .get_tensors_attrs(
            n, k, param_dtype=getattr(torch, dtype), num_experts=experts, has_bias=bias, stack_size=stacks
        )
    )
    rng = np.random.default_rng(seed)
    return {
        name: source_tensor(rng, name, tuple(attrs[name]["shape"]), attrs[name]["dtype"])
        for name in sorted(attrs)
    }
