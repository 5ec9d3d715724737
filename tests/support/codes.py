"""Random codes and the plain bit stream that Humming packs them into, in numpy."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

Ints = npt.NDArray[np.int64]


def random_codes(seed: int, bits: int, *shape: int) -> Ints:
    return np.random.default_rng(seed).integers(0, 1 << bits, size=shape)


def pack_bits(codes: Ints, bits: int) -> torch.Tensor:
    """Codes as one little-endian bit stream along the last axis, in int32 words."""
    stream = (codes[..., None] >> np.arange(bits)) & 1
    stream = stream.reshape(*codes.shape[:-1], -1, 32)
    words = (stream << np.arange(32)).sum(-1)
    return torch.from_numpy(words.astype(np.uint32).view(np.int32).copy())


def to_words(values: Ints) -> torch.Tensor:
    return torch.from_numpy(values.astype(np.uint32).view(np.int32).copy())
