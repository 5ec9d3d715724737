"""Pure arithmetic on scales. The last axis is K (groups), the one before it N (rows)."""

from __future__ import annotations

import numpy as np
import torch

# The integers that order numbers without a sign as the numbers are ordered; NaN comes last.
_ORDERED_AS = {
    torch.uint8: torch.uint8,
    torch.float8_e8m0fnu: torch.uint8,
    torch.float8_e4m3fn: torch.int8,
    torch.float8_e5m2: torch.int8,
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
    torch.float32: torch.int32,
}


def extremes(tensor: torch.Tensor) -> torch.Tensor | None:
    """The least and the greatest value, `[2]`, of the tensor's dtype, read from the stored bytes without a copy.

    A NaN counts as greater than infinity. None for an empty tensor, another dtype, and where any sign bit is set:
    what then lies in between has to be looked at one by one.
    """
    if tensor.dtype not in _ORDERED_AS or not tensor.numel():
        return None
    codes = tensor.cpu().view(_ORDERED_AS[tensor.dtype]).numpy()  # several times faster than torch's amin and amax
    least = codes.min()
    if least < 0:
        return None
    return torch.from_numpy(np.array([least, codes.max()])).view(tensor.dtype)


def view_as(tensor: torch.Tensor, dtype: str) -> torch.Tensor:
    """The same bytes under another dtype of the same width (never a conversion)."""
    return tensor.view(getattr(torch, dtype))


def to_dtype(tensor: torch.Tensor, dtype: str) -> torch.Tensor:
    """The same values in another float dtype; only for plain F16, BF16 and F32 tensors."""
    return tensor.to(getattr(torch, dtype))


def e8m0_to_float32(tensor: torch.Tensor) -> torch.Tensor:
    """Exponent bytes (bias 127) as the F32 numbers 2**(byte - 127), exactly; byte 255 is NaN.

    Byte 0 means 2**-127, which is no normal F32 number, so its bits are not `byte << 23`.
    """
    code = tensor.view(torch.uint8).to(torch.int32)
    bits = torch.where(code == 0, 0x00400000, code << 23)
    return torch.where(code == 255, 0x7FC00000, bits).view(torch.float32)


def expand_rows(tensor: torch.Tensor, block: int, rows: int) -> torch.Tensor:
    """A scale row per `block` weight rows `[..., ceil(rows/block), G]` -> one per row `[..., rows, G]`."""
    return tensor.repeat_interleave(block, dim=-2)[..., :rows, :].contiguous()


def regroup_columns(tensor: torch.Tensor, repeat: int, columns: int) -> torch.Tensor:
    """Each scale column `repeat` times, cut to `columns`: the same scales for smaller groups."""
    return tensor.repeat_interleave(repeat, dim=-1)[..., :columns].contiguous()


def transpose(tensor: torch.Tensor) -> torch.Tensor:
    """`[..., K, N]` as it is stored -> `[..., N, K]`; the elements' bytes stay as they are."""
    return tensor.transpose(-1, -2).contiguous()
