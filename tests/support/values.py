"""Packed sublayers as plain float32 numbers, from this project's decoder of the layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from humming_convert.decode import PackedLayout, decode, parse_layout, raw_array
from humming_loader.entries import SublayerEntry
from humming_loader.reader import ExpertsFile

Floats = NDArray[np.float32]
_SCALES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float8e4m3": torch.float8_e4m3fn,
    "float8e8m0": torch.float8_e8m0fnu,
}
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)


def dequantized(out: Path, entry: SublayerEntry) -> Floats:
    """`(E, N, K)`: code values times scales, in float32 (exact for codes of 8 bits and scales of 8)."""
    layout = parse_layout(entry.layer_config, entry.fingerprint.flags)
    tensors = {}
    for key, tensor in entry.tensors.items():
        with ExpertsFile(out / tensor.file) as opened:
            data = bytearray(opened.tensors[tensor.name].nbytes)
            opened.read_into(tensor.name, memoryview(data))
        tensors[key] = raw_array(data, tensor.dtype, tensor.shape, tensor.name)
    decoded = decode(layout, tensors)
    values = _code_values(layout, decoded.codes, _per_weight(decoded.zero_point, layout))
    scale = _numbers(decoded.scale, layout.scale.name)
    if scale.ndim == 1:
        return values * scale[:, None, None]
    values *= _per_weight(scale, layout)
    if decoded.scale_2 is not None:
        second = _numbers(decoded.scale_2, layout.result.name)
        values *= second[:, None, None] if second.ndim == 1 else second[:, :, None]
    return values


def _per_weight(groups: NDArray[Any] | None, layout: PackedLayout) -> Any:  # noqa: ANN401 - same dtype as given
    if groups is None:
        return None
    return np.repeat(groups, layout.logical_k // groups.shape[-1], axis=-1)


def _code_values(layout: PackedLayout, codes: NDArray[np.uint8], zero: NDArray[Any] | None) -> Floats:
    if layout.weight.name == "float8e4m3":
        return _numbers(codes, layout.weight.name)
    if layout.weight.name == "float4e2m1":
        signed: Floats = np.where(codes & 8, -_E2M1[codes & 7], _E2M1[codes & 7]).astype(np.float32)
        return signed
    middle = 1 << (layout.weight.bits - 1)
    offset = middle if zero is None else zero.astype(np.int16)
    values: Floats = (codes.astype(np.int16) - offset).astype(np.float32)
    return values


def _numbers(raw: NDArray[Any], name: str) -> Floats:
    if raw.dtype == np.float32:
        return raw.astype(np.float32)
    values: Floats = torch.from_numpy(raw.copy()).view(_SCALES[name]).float().numpy()
    return values
