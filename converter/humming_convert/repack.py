"""Pure integer packing of weights and zero points."""

from __future__ import annotations

import torch


def pack_int8_zero_point(tensor: torch.Tensor) -> torch.Tensor:
    """Signed bytes `[..., N, G]` as offset-binary words `[..., N/4, G]` I32, row 4i in the low byte."""
    codes = tensor.view(torch.uint8) ^ 0x80
    packed = codes.transpose(-1, -2).contiguous().view(torch.int32)
    return packed.transpose(-1, -2).contiguous()
