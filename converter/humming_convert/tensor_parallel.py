"""Cut planned layers for tensor parallelism, each rank's part to be packed for itself.

The intermediate size I is shared out as vLLM 0.33.0 does it: gate and up rows each, and the columns of down. Which
axis of a tensor I lies on, and where it can be cut there, follows from its shape.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from humming_convert.errors import Problem, UnsupportedError
from humming_convert.plan import Cut, LayerPlan, RankPart, Run, StackedTensor, SublayerPlan
from humming_loader.parts import part_name
from humming_loader.slicing import LARGEST_TP

_MX_BLOCK = 32
# vLLM rounds a rank's intermediate size up to this for Humming's kernels with MXFP4 weights.
_MX_ROUNDING = 64
_MX_METHODS = ("mxfp4", "gpt_oss_mxfp4")


@dataclass(frozen=True, slots=True)
class Shares:
    """Every rank has `step` values of I, as far as there are any, made up to `width`, with scales of `scale_fill`."""

    step: int
    width: int
    scale_fill: float = 0.0


class _CannotCutError(Exception):
    """Why a layer cannot be cut: what was expected, and what was found."""

    def __init__(self, expected: str, found: str) -> None:
        self.expected = expected
        self.found = found
        super().__init__(expected, found)


def cut_layers(layers: Sequence[LayerPlan], tp_size: int) -> tuple[LayerPlan, ...]:
    """`layers` with the parts of `tp_size` ranks each; as they are for 1.

    Raises UnsupportedError, naming the sizes that work, for every layer that cannot be cut so.
    """
    if tp_size == 1:
        return tuple(layers)
    cut, problems = [], []
    for layer in layers:
        try:
            cut.append(replace(layer, ranks=_ranks(layer, tp_size)))
        except _CannotCutError as error:
            sizes = ", ".join(str(size) for size in possible_sizes(layer))
            hint = f"tensor-parallel sizes that work: {sizes}"
            problems.append(Problem(layer.layer_name, error.expected, error.found, hint))
    if problems:
        raise UnsupportedError(problems)
    return tuple(cut)


def possible_sizes(layer: LayerPlan) -> tuple[int, ...]:
    """The tensor-parallel sizes up to LARGEST_TP that `layer` can be cut for."""
    return tuple(size for size in range(1, LARGEST_TP + 1) if size == 1 or _is_possible(layer, size))


def _is_possible(layer: LayerPlan, tp_size: int) -> bool:
    try:
        _ranks(layer, tp_size)
    except _CannotCutError:
        return False
    return True


def shares_of(layer: LayerPlan, tp_size: int) -> Shares:
    """How vLLM shares the intermediate size of `layer` out. Raises _CannotCutError where it refuses."""
    whole = layer.intermediate_size
    if whole % tp_size:
        raise _CannotCutError(f"an intermediate size that {tp_size} divides, as vLLM asks", str(whole))
    even = whole // tp_size
    found = {_shares(layer, sublayer.source_schema, even, tp_size) for sublayer in layer.sublayers}
    if len(found) != 1:
        formats = " and ".join(sublayer.format for sublayer in layer.sublayers)
        raise _CannotCutError("gate, up and down in formats that are shared out alike", formats)
    return found.pop()


def _shares(layer: LayerPlan, schema: Mapping[str, Any], even: int, tp_size: int) -> Shares:
    block = _block_of(schema)
    if block is not None:
        return _shares_of_blocks(layer, even, block)
    method = schema.get("quant_method")
    if method == "gpt_oss_mxfp4":
        # Whole blocks, of which the last ranks may have fewer.
        step = -(-layer.intermediate_size // (_MX_BLOCK * tp_size)) * _MX_BLOCK
        return Shares(step, _round_up(step, _MX_ROUNDING))
    return Shares(even, _round_up(even, _MX_ROUNDING) if method in _MX_METHODS else even)


def _shares_of_blocks(layer: LayerPlan, even: int, block: tuple[int, int]) -> Shares:
    """Where blocks do not come out even each rank has whole ones, and scales of one beside weights of zero."""
    whole, rows = layer.intermediate_size, block[0]
    if all(even % extent == 0 for extent in block):
        return Shares(even, even)
    blocks = f"blocks of {rows} x {block[1]}"
    if rows != block[1] or layer.has_bias:
        raise _CannotCutError(f"a rank's part of {whole} in whole {blocks}", str(even))
    if whole % rows or layer.hidden_size % rows:
        found = f"{whole} and {layer.hidden_size}"
        raise _CannotCutError(f"an intermediate and a hidden size in whole {blocks}, as vLLM asks", found)
    step = _round_up(even, rows)
    return Shares(step, step, scale_fill=1.0)


def _block_of(schema: Mapping[str, Any]) -> tuple[int, int] | None:
    block = schema.get("weight_block_size") or schema.get("block_structure")
    return (int(block[0]), int(block[1])) if block else None


def _ranks(layer: LayerPlan, tp_size: int) -> tuple[LayerPlan, ...]:
    shares = shares_of(layer, tp_size)
    _require_packable(layer, shares)
    return tuple(_rank(layer, shares, rank, tp_size) for rank in range(tp_size))


def _require_packable(layer: LayerPlan, shares: Shares) -> None:
    """Humming packs the codes of a row into words, 32 at a time but for FP8."""
    weights = [tensor for sublayer in layer.sublayers for tensor in sublayer.tensors if tensor.is_weight]
    multiple = 4 if all(tensor.dtype == "F8_E4M3" for tensor in weights) else 32
    if shares.width % multiple:
        expected = f"a rank's part of {layer.intermediate_size} to be a multiple of {multiple}"
        raise _CannotCutError(expected, f"{shares.width}")


def _rank(layer: LayerPlan, shares: Shares, rank: int, tp_size: int) -> LayerPlan:
    whole = layer.intermediate_size
    begin, end = min(rank * shares.step, whole), min((rank + 1) * shares.step, whole)
    part = RankPart(
        layer=layer.layer_name,
        rank=rank,
        size=tp_size,
        intermediate_size=whole,
        begin=begin,
        end=end,
        scale_fill=shares.scale_fill,
    )
    cutter = _Cutter(layer, part, shares.width)
    total = layer.source_bytes
    return replace(
        layer,
        layer_name=part_name(layer.layer_name, rank, tp_size),
        intermediate_size=shares.width,
        sublayers=tuple(cutter.sublayer(one) for one in layer.sublayers),
        source_bytes=total * (rank + 1) // tp_size - total * rank // tp_size,
        part=part,
    )


@dataclass(frozen=True, slots=True)
class _Cutter:
    """Cuts the tensors of a layer for one rank, whose intermediate size is `width`."""

    layer: LayerPlan
    part: RankPart
    width: int

    def sublayer(self, plan: SublayerPlan) -> SublayerPlan:
        is_w13 = plan.name == "w13"
        stacks = tuple(self.width for _ in plan.shape_n_stacks) if is_w13 else plan.shape_n_stacks
        return replace(
            plan,
            shape_n=sum(stacks),
            shape_k=plan.shape_k if is_w13 else self.width,
            shape_n_stacks=stacks,
            tensors=tuple(self._rows(plan, one) if is_w13 else self._columns(plan, one) for one in plan.tensors),
            # What they say is said of the whole.
            expected=plan.expected if self.part.rank == 0 else (),
        )

    def _rows(self, plan: SublayerPlan, tensor: StackedTensor) -> StackedTensor:
        """A tensor of w13, along N. One number for each projection stays as it is."""
        shape, stacks = tensor.shape[1:], len(plan.shape_n_stacks)
        if not shape or (len(shape) == 1 and shape[0] <= stacks):
            return tensor
        extent = shape[tensor.axis]
        # Gate and up follow each other, or alternate; either way each value of I has `stacks` rows.
        elements = self._elements(plan, tensor, extent, stacks)
        if self.layer.is_interleaved:
            elements, starts = elements * stacks, [0]
        else:
            starts = [index * extent // stacks for index in range(stacks)]
        return self._cut(tensor, tensor.axis, starts, elements)

    def _columns(self, plan: SublayerPlan, tensor: StackedTensor) -> StackedTensor:
        """A tensor of w2, along K. A scale for each row belongs to all ranks, a bias is added once, by the first."""
        shape = tensor.shape[1:]
        if tensor.name == "bias":
            count = 0 if self.part.rank else shape[0]
            return replace(tensor, cut=Cut(0, shape[0], (Run(0, count, shape[0]),)))
        if not shape or shape == (1,):
            return tensor
        if len(shape) != 2:
            found = f"{tensor.name} of shape {list(tensor.shape)}"
            raise _CannotCutError("tensors that can be cut along K", found)
        axis = 1 - tensor.axis
        if shape[axis] == 1 and not _has_groups(plan.weight_schema):
            return tensor
        return self._cut(tensor, axis, [0], self._elements(plan, tensor, shape[axis], 1))

    def _elements(self, plan: SublayerPlan, tensor: StackedTensor, extent: int, stacks: int) -> Fraction:
        """Elements of an axis of `extent` for each value of I, in each of `stacks`."""
        whole = self.part.intermediate_size
        elements = Fraction(extent, stacks * whole)
        multiple = elements.denominator  # values of I that an element has a share in
        for value in (self.part.end - self.part.begin, self.part.begin, self.width):
            if value % multiple:
                where = f"{plan.name} {tensor.name}"
                expected = f"a rank's part of {whole} to be a multiple of {multiple}, as {where} asks"
                raise _CannotCutError(expected, str(value))
        return elements

    def _cut(self, tensor: StackedTensor, axis: int, starts: Sequence[int], elements: Fraction) -> StackedTensor:
        begin, end, width = (int(value * elements) for value in (self.part.begin, self.part.end, self.width))
        cut = Cut(
            axis=axis,
            extent=tensor.shape[axis + 1],
            runs=tuple(Run(start + begin, end - begin, width) for start in starts),
            fill=self.part.scale_fill if "scale" in tensor.name else 0.0,
        )
        shape = (*tensor.shape[: axis + 1], width * len(starts), *tensor.shape[axis + 2 :])
        return replace(tensor, shape=shape, cut=cut)


def _has_groups(schema: Mapping[str, Any]) -> bool:
    """Whether scales are shared by groups of columns; a group may be as large as K."""
    group = schema.get("group_size") or 0
    return group > 0 or _block_of(schema) is not None or schema.get("quant_method") in _MX_METHODS


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
