"""Pure integer packing of weights and zero points."""

from __future__ import annotations

import torch


def pack_int8_zero_point(tensor: torch.Tensor) -> torch.Tensor:
    """Signed bytes `[..., N, G]` as offset-binary words `[..., N/4, G]` I32, row 4i in the low byte."""
    codes = (tensor.view(torch.uint8) ^ 0x80).transpose(-1, -2)
    # A fresh tensor: `contiguous` keeps odd strides of axes of length 1, which no view of words can have.
    by_group = torch.empty(codes.shape, dtype=torch.uint8, device=codes.device).copy_(codes)
    return by_group.view(torch.int32).transpose(-1, -2).contiguous()
