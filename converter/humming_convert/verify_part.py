"""What a tensor-parallel rank has of a decoded expert: rows of gate and up, or columns of down, and zeros beyond.

Numpy alone, on codes and scales, whatever form the source keeps them in.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from humming_convert.decode_source import Raw
from humming_convert.expected import Expert
from humming_convert.plan import LayerPlan, RankPart, SublayerPlan


def expert_part(expert: Expert, layer: LayerPlan, plan: SublayerPlan, *, has_groups: bool) -> Expert:
    """The rank's part of one expert of `plan`, or `expert` itself where `layer` is no rank's part.

    `has_groups` says that a scale belongs to some columns of a row; one for a whole row belongs to every rank.
    """
    if layer.part is None:
        return expert
    if plan.name == "w13":
        return _rows(expert, layer, layer.part)
    return _columns(expert, layer.intermediate_size, layer.part, has_groups=has_groups)


def _rows(expert: Expert, layer: LayerPlan, part: RankPart) -> Expert:
    width, whole = layer.intermediate_size, part.intermediate_size
    stacks = expert.codes.shape[0] // whole
    if layer.is_interleaved:
        pieces = [(part.begin * stacks, part.end * stacks, width * stacks)]
    else:
        pieces = [(index * whole + part.begin, index * whole + part.end, width) for index in range(stacks)]

    def cut(values: Raw, fill: float = 0) -> Raw:
        return np.concatenate([_made_up(values[begin:end], 0, size, fill) for begin, end, size in pieces])

    return replace(
        expert,
        codes=cut(expert.codes),
        scale=expert.scale if expert.scale.ndim == 1 else cut(expert.scale, part.scale_fill),
        zero_point=None if expert.zero_point is None else cut(expert.zero_point),
        bias=None if expert.bias is None else cut(expert.bias),
        rows=tuple(rows * width // whole for rows in expert.rows),
    )


def _columns(expert: Expert, width: int, part: RankPart, *, has_groups: bool) -> Expert:
    def cut(values: Raw, fill: float = 0) -> Raw:
        group = part.intermediate_size // values.shape[1]
        held = values[:, part.begin // group : part.end // group]
        return _made_up(held, 1, width // group, fill)

    # Every rank adds its product to the others': only the first may add the bias.
    bias = expert.bias if part.rank == 0 or expert.bias is None else np.zeros_like(expert.bias)
    expert = replace(expert, codes=cut(expert.codes), bias=bias)
    if not has_groups or expert.scale.ndim == 1:
        return expert
    zero_point = None if expert.zero_point is None else cut(expert.zero_point)
    return replace(expert, scale=cut(expert.scale, part.scale_fill), zero_point=zero_point)


def _made_up(values: Raw, axis: int, size: int, fill: float) -> Raw:
    """`values` with `fill` behind them along `axis`, up to `size`."""
    shape = list(values.shape)
    shape[axis] = size - shape[axis]
    return np.concatenate([values, np.full(shape, fill, values.dtype)], axis=axis)
