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
    """Column i of each `block` of columns is row `order[i]` of that block of rows; units of some bytes are moved."""

    order: tuple[int, ...]
    unit: torch.dtype
    result: torch.dtype

    @property
    def block(self) -> int:
        """Rows of one block."""
        return len(self.order)


def learn(function: Function, dtype: torch.dtype, unit: torch.dtype) -> Layout | None:
    """What `function` does to the rows of `[n, groups]` tensors of `dtype`, in units of `unit`'s bytes.

    None when it is no order of rows inside a block of at most half the probe's rows.
    """
    # As many rows as one byte can number apart in two columns; wider units leave room for wider blocks.
    rows = 128 if unit.itemsize == 1 else 512
    numbers = torch.arange(rows * _PROBE_GROUPS, dtype=torch.int32).to(unit).view(rows, _PROBE_GROUPS)
    result = function(numbers.view(dtype))
    if result.ndim != 2 or not result.is_contiguous() or result.nbytes != numbers.nbytes:
        return None
    if result.shape[0] != _PROBE_GROUPS:
        return None
    found = result.view(unit).to(torch.int32) & ((1 << (8 * unit.itemsize)) - 1)
    order = found[0] // _PROBE_GROUPS
    groups = torch.arange(_PROBE_GROUPS, dtype=torch.int32).unsqueeze(1)
    if not torch.equal(found, order * _PROBE_GROUPS + groups):
        return None
    block = 1
    while block <= rows // 2:
        first = order[:block]
        starts = torch.arange(0, rows, block, dtype=torch.int32).unsqueeze(1)
        if int(first.max()) < block and torch.equal(order.view(-1, block), first + starts):
            return Layout(tuple(first.tolist()), unit, result.dtype)
        block *= 2
    return None


def transform(original: Function, scale: torch.Tensor, unit_bytes: int, **options: Foreign) -> torch.Tensor:
    """`original(scale, **options)` for `[..., n, groups]`, natively where its layout allows it."""
    columns = scale.shape[-1] * scale.element_size()
    if scale.device.type != "cpu" or scale.ndim < 2 or not scale.numel() or columns % unit_bytes:
        return original(scale, **options)
    layout = learn(lambda probe: original(probe, **options), scale.dtype, _UNITS[unit_bytes])
    rows, groups = scale.shape[-2], columns // unit_bytes
    if layout is None or rows % layout.block:
        return original(scale, **options)
    # The bytes of one row of the result, in the result's own units.
    width = rows * unit_bytes // layout.result.itemsize
    out = torch.empty((*scale.shape[:-2], groups, width), dtype=layout.result)
    native.transpose(scale.contiguous().view(layout.unit), out.view(layout.unit), layout.order)
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


def seams(modules: SimpleNamespace) -> Iterator[tuple[Foreign, str, Foreign]]:
    """(owner, attribute, replacement) of this file's seam."""
    transform_module = modules.transform
    yield (
        transform_module,
        "transform_humming_weight_scale",
        _transform_scale(transform_module.transform_humming_weight_scale),
    )
