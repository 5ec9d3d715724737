"""Raw tensors of a checkpoint and what one projection decodes to, in numpy alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from humming_convert.errors import Problem, VerificationError

Raw = npt.NDArray[Any]
Codes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class RawTensor:
    """A source tensor: its dtype code and its raw elements in the stored shape."""

    dtype: str
    array: Raw


@dataclass(frozen=True, slots=True, kw_only=True)
class Projection:
    """`codes` `(N, K)`: float codes as stored, integers offset by half their range. `bits` is their width.

    `scale` is float32 `(N, G)` or `(1,)` (one for all), or uint8 `(N, G)` when `scale_code` says F8_E8M0 or
    F8_E4M3. `zero_point` `(N, G)` in the codes' own offset; None means the middle. `scale_2` is one more
    factor for all. `bias` `(N,)`.
    """

    codes: Codes
    bits: int
    scale: Raw
    scale_code: str
    zero_point: Codes | None = None
    scale_2: np.float32 | None = None
    bias: Floats | None = None


Tensors = Mapping[str, RawTensor]


def to_float32(tensor: RawTensor) -> Floats:
    """The values of a float or e8m0 tensor, exactly. Raises VerificationError for other dtypes."""
    raw = tensor.array
    if tensor.dtype == "F32":
        return raw.astype(np.float32, copy=False)
    if tensor.dtype == "BF16":
        return (raw.astype(np.uint32) << np.uint32(16)).view(np.float32)
    if tensor.dtype == "F16":
        return raw.view(np.float16).astype(np.float32)
    if tensor.dtype == "F8_E8M0":
        return np.ldexp(np.float32(1), raw.astype(np.int32) - 127).astype(np.float32)
    raise VerificationError([Problem("scale", "a float dtype", tensor.dtype)])


def nibbles(packed: Raw) -> Codes:
    """`(..., 2 w)` of bytes `(..., w)`, low nibble first."""
    out = np.empty((*packed.shape, 2), np.uint8)
    np.bitwise_and(packed, 15, out=out[..., 0])
    np.right_shift(packed, 4, out=out[..., 1])
    return out.reshape(*packed.shape[:-1], -1)


def bit_fields(words: Raw, bits: int) -> Codes:
    """Codes along the last axis of 32-bit words, lowest bit first, across the borders of words."""
    raw = np.ascontiguousarray(words).view(np.uint8)
    if bits == 8:
        return raw
    if bits == 4:
        return nibbles(raw)
    stream = np.unpackbits(raw, axis=-1, bitorder="little")
    fields = stream.reshape(*raw.shape[:-1], -1, bits)
    out = np.zeros(fields.shape[:-1], np.uint8)
    for index in range(bits):
        out |= fields[..., index] << np.uint8(index)
    return out


def bias_of(tensors: Tensors) -> Floats | None:
    """The bias in float32, if there is one."""
    return to_float32(tensors["bias"]) if "bias" in tensors else None
