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


def word_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Words `[..., W, N]` I32, packed along W (GPTQ's `qweight`, `[K * bits / 32, N]`), as rows `[..., N, W]`."""
    rows = torch.empty((*tensor.shape[:-2], tensor.shape[-1], tensor.shape[-2]), dtype=torch.int32)
    word_rows_into(tensor, rows)
    return rows


def word_rows_into(tensor: torch.Tensor, rows: torch.Tensor) -> None:
    """`word_rows` into given memory."""
    native.transpose(tensor.contiguous(), rows, (0,))


def signed_rows(tensor: torch.Tensor, bits: int) -> torch.Tensor:
    """Signed integers of `bits` in bytes of their own, I8 `[..., N, K]`, as packed rows I32 `[..., N, K * bits / 32]`
    of offset-binary codes."""
    rows = torch.empty((*tensor.shape[:-1], tensor.shape[-1] * bits // 32), dtype=torch.int32)
    signed_rows_into(tensor, rows, bits)
    return rows


def signed_rows_into(tensor: torch.Tensor, rows: torch.Tensor, bits: int) -> None:
    """`signed_rows` into given memory."""
    native.pack(tensor.view(torch.uint8) ^ (1 << (bits - 1)), rows, bits)


def ordered_rows(tensor: torch.Tensor, bits: int) -> torch.Tensor:
    """Words I32 `[..., K, N * bits / 32]`, packed along N in order, as packed rows I32 `[..., N, K * bits / 32]`."""
    rows = torch.empty(
        (*tensor.shape[:-2], tensor.shape[-1] * 32 // bits, tensor.shape[-2] * bits // 32), dtype=torch.int32
    )
    ordered_rows_into(tensor, rows, bits)
    return rows


def ordered_rows_into(tensor: torch.Tensor, rows: torch.Tensor, bits: int) -> None:
    """`ordered_rows` into given memory."""
    native.pack(unpacked(tensor, bits).transpose(-1, -2).contiguous(), rows, bits)


def unpacked(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Words I32 `[..., bits * m]`, packed along the last axis, lowest bit first, as bytes `[..., 32 * m]`."""
    codes = torch.empty((*words.shape[:-1], words.shape[-1] * 32 // bits), dtype=torch.uint8)
    native.unpack(words.contiguous(), codes, bits)
    return codes


def transposed(tensor: torch.Tensor) -> torch.Tensor:
    """The last two axes exchanged, contiguous: `[..., G, N]` as `[..., N, G]`."""
    return tensor.transpose(-1, -2).contiguous()


def in_order(tensor: torch.Tensor) -> torch.Tensor:
    """Words I32 of eight nibbles in AWQ's order as words of nibbles in their own order."""
    return native.awq_in_order(tensor.contiguous())


def inverted_signs(tensor: torch.Tensor, bits: int) -> torch.Tensor:
    """Packed words I32 with the top bit of each code of `bits` (4, 8) inverted: two's complement to offset binary."""
    mask = sum(1 << (shift + bits - 1) for shift in range(0, 32, bits))
    return tensor ^ (mask - (1 << 32))


def one_more(tensor: torch.Tensor, bits: int) -> torch.Tensor:
    """GPTQ's v1 zero points, stored one less: words I32 `[..., bits * m]` with one added to every code.

    Widths that divide a word are added to as GPTQModel does, whole words at once, so that a zero point of 0, which
    borrowed from its neighbour when it was stored, comes out right; others are added to one by one, modulo 2**bits.
    """
    if 32 % bits == 0:
        return tensor + sum(1 << shift for shift in range(0, 32, bits))
    words = torch.empty_like(tensor, memory_format=torch.contiguous_format)
    native.pack(unpacked(tensor, bits) + 1, words, bits)
    return words


def pack_signed_zero_point(tensor: torch.Tensor, bits: int) -> torch.Tensor:
    """Signed integers of `bits`, I8 `[..., N, G]`, as offset-binary words I32 `[..., N * bits / 32, G]` along N."""
    by_group = torch.empty((*tensor.shape[:-2], tensor.shape[-1], tensor.shape[-2]), dtype=torch.int8)
    return transposed(signed_rows(by_group.copy_(tensor.transpose(-1, -2)), bits))
