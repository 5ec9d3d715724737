"""Pure integer packing of weights and zero points."""

from __future__ import annotations

import torch

from humming_convert.host import native


def pack_int8_zero_point(tensor: torch.Tensor) -> torch.Tensor:
    """Signed bytes `[..., N, G]` as offset-binary words `[..., N/4, G]` I32, row 4i in the low byte."""
    codes = (tensor.view(torch.uint8) ^ 0x80).transpose(-1, -2)
    # A fresh tensor: `contiguous` keeps odd strides of axes of length 1, which no view of words can have.
    by_group = torch.empty(codes.shape, dtype=torch.uint8, device=codes.device).copy_(codes)
    return by_group.view(torch.int32).transpose(-1, -2).contiguous()


def awq_rows(tensor: torch.Tensor) -> torch.Tensor:
    """AWQ's `qweight` I32 `[..., K, N/8]`, in its nibble order, as packed rows I32 `[..., N, K/8]`."""
    k, words = tensor.shape[-2:]
    rows = torch.empty((*tensor.shape[:-2], words * 8, k // 8), dtype=torch.int32)
    awq_rows_into(tensor, rows)
    return rows


def awq_rows_into(tensor: torch.Tensor, rows: torch.Tensor) -> None:
    """`awq_rows` into given memory."""
    native.awq_to_packed(tensor.contiguous(), rows)
