"""Humming's layout of scales and zero points in one native pass, for tensors on a CPU.

Humming transposes a whole tensor and then picks its columns in another order, blocks of rows at a time. The order is
Humming's own: its function is run on a small tensor of running numbers, and what it does to them is repeated. Whatever
is not such an order of rows inside a block is left to Humming's function.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace

import torch

from humming_convert.host import native
from humming_convert.host.foreign import Foreign

Function = Callable[..., torch.Tensor]
_UNITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
_PROBE_GROUPS = 2


@dataclass(frozen=True, slots=True)
class Layout:
    """Column i of each block of `len(order)` columns is row `order[i]` of that block of rows.

    What moves as one are `unit_bits` bits; the result is of `result`'s dtype.
    """

    order: tuple[int, ...]
    unit_bits: int
    result: torch.dtype


def learn(function: Function, dtype: torch.dtype, unit_bytes: int) -> Layout | None:
    """What `function` does to the rows of `[n, groups]` tensors of `dtype`, in units of some bytes.

    None when it is no order of rows inside a block of at most half the probe's rows.
    """
    # As many rows as one byte can number apart in two columns; wider units leave room for wider blocks.
    rows, unit = (128 if unit_bytes == 1 else 512), _UNITS[unit_bytes]
    numbers = torch.arange(rows * _PROBE_GROUPS, dtype=torch.int32).to(unit).view(rows, _PROBE_GROUPS)
    result = function(numbers.view(dtype))
    if result.ndim != 2 or not result.is_contiguous() or result.nbytes != numbers.nbytes:
        return None
    if result.shape[0] != _PROBE_GROUPS:
        return None
    found = result.view(unit).to(torch.int32) & ((1 << (8 * unit_bytes)) - 1)
    order = found[0] // _PROBE_GROUPS
    groups = torch.arange(_PROBE_GROUPS, dtype=torch.int32).unsqueeze(1)
    if not torch.equal(found, order * _PROBE_GROUPS + groups):
        return None
    block = _block_of(order, 1)
    return None if block is None else Layout(block, 8 * unit_bytes, result.dtype)


def learn_zero_points(function: Function, bits: int) -> Layout | None:
    """What `function` does to the codes of zero points `[n * bits / 32, groups]`, packed along n.

    None when it is no order of codes inside a block of at most half the probe's rows.
    """
    rows = 512
    digits = -(-9 // bits)  # codes that together number a row, one group each
    numbers = torch.arange(rows, dtype=torch.int32)
    codes = torch.stack([numbers >> (bits * digit) & ((1 << bits) - 1) for digit in range(digits)])
    words = torch.empty((digits, rows * bits // 32), dtype=torch.int32)
    native.pack(codes, words, bits)
    result = function(words.transpose(-1, -2).contiguous())
    if result.ndim != 2 or result.dtype != torch.int32 or not result.is_contiguous() or result.shape[0] != digits:
        return None
    out_bits = result.shape[1] * 32 // rows
    if out_bits not in (4, 8) or result.shape[1] * 32 % rows:
        return None
    found = torch.empty((digits, rows), dtype=torch.int32)
    native.unpack(result, found, out_bits)
    order = torch.zeros(rows, dtype=torch.int32)
    for digit in range(digits):
        order |= found[digit] << (bits * digit)
    block = _block_of(order, 32) if int(order.max()) < rows else None
    if block is None or not torch.equal(found, codes[:, order]):
        return None
    return Layout(block, out_bits, result.dtype)


def _block_of(order: torch.Tensor, smallest: int) -> tuple[int, ...] | None:
    """The order inside one block, if that of all rows is the same block after block."""
    rows, block = len(order), smallest
    while block <= rows // 2:
        first = order[:block]
        starts = torch.arange(0, rows, block, dtype=torch.int32).unsqueeze(1)
        if int(first.max()) < block and torch.equal(order.view(-1, block), first + starts):
            return tuple(first.tolist())
        block *= 2
    return None


def transform(original: Function, scale: torch.Tensor, unit_bytes: int, **options: Foreign) -> torch.Tensor:
    """`original(scale, **options)` for `[..., n, groups]`, natively where its layout allows it."""
    columns = scale.shape[-1] * scale.element_size()
    if scale.device.type != "cpu" or scale.ndim < 2 or not scale.numel() or columns % unit_bytes:
        return original(scale, **options)
    layout = learn(lambda probe: original(probe, **options), scale.dtype, unit_bytes)
    rows, groups = scale.shape[-2], columns // unit_bytes
    if layout is None or rows % len(layout.order):
        return original(scale, **options)
    out = torch.empty((*scale.shape[:-2], groups, rows * unit_bytes // layout.result.itemsize), dtype=layout.result)
    unit = _UNITS[unit_bytes]
    native.transpose(scale.contiguous().view(unit), out.view(unit), layout.order)
    return out


def transform_zero_point(original: Function, zero_point: torch.Tensor, bits: int, **options: Foreign) -> torch.Tensor:
    """`original(zero_point, **options)` for packed `[..., n * bits / 32, groups]`, natively where it can be."""
    if zero_point.device.type != "cpu" or zero_point.ndim < 2 or not zero_point.numel() or not 1 <= bits <= 8:
        return original(zero_point, **options)
    layout = learn_zero_points(lambda probe: original(probe, **options), bits)
    words, groups = zero_point.shape[-2:]
    if layout is None or words * 32 % (bits * len(layout.order)):
        return original(zero_point, **options)
    rows = words * 32 // bits
    out = torch.empty((*zero_point.shape[:-2], groups, rows * layout.unit_bits // 32), dtype=torch.int32)
    native.zero_points(zero_point.contiguous(), out, bits, layout.unit_bits, layout.order)
    return out


def _transform_scale(original: Function) -> Function:
    def transform_humming_weight_scale(
        weight_scale: torch.Tensor,
        to_apply_on_c: bool = False,
        is_blockwise: bool = False,
        is_mxmma: bool = False,
        mxmma_scale_vec: int | None = 4,
        is_umma: bool = False,
    ) -> torch.Tensor:
        # Block-scaled tensor cores read one-byte scales in words of four groups, or two groups of two rows.
        together = 1
        if not is_blockwise and (is_umma or is_mxmma):
            together = 2 if mxmma_scale_vec == 1 and not is_umma else 4
        return transform(
            original,
            weight_scale,
            min(4, together * weight_scale.element_size()),
            to_apply_on_c=to_apply_on_c,
            is_blockwise=is_blockwise,
            is_mxmma=is_mxmma,
            mxmma_scale_vec=mxmma_scale_vec,
            is_umma=is_umma,
        )

    return transform_humming_weight_scale


def _transform_zero_point(original: Function) -> Function:
    def transform_humming_zero_point(
        zero_point: torch.Tensor, dtype: Foreign, packed: bool = False, num_groups_per_mma: int = 1
    ) -> torch.Tensor:
        options = {"dtype": dtype, "packed": packed, "num_groups_per_mma": num_groups_per_mma}
        if not packed or num_groups_per_mma != 1 or zero_point.dtype != torch.int32:
            return original(zero_point, **options)
        return transform_zero_point(original, zero_point, dtype.num_bits, **options)

    return transform_humming_zero_point


def seams(modules: SimpleNamespace) -> Iterator[tuple[Foreign, str, Foreign]]:
    """(owner, attribute, replacement) of this file's seams."""
    owner = modules.transform
    yield owner, "transform_humming_zero_point", _transform_zero_point(owner.transform_humming_zero_point)
    yield owner, "transform_humming_weight_scale", _transform_scale(owner.transform_humming_weight_scale)
