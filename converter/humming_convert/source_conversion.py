"""A source schema's own conversion: its tensors as Humming's, the small ones once and the weight slice by slice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from humming_convert.errors import Problem, UnsupportedError
from humming_convert.host.foreign import Foreign
from humming_convert.host.shadow import weight_only

Tensors = Mapping[str, torch.Tensor]


@dataclass(slots=True, kw_only=True)
class SourceConversion:
    """Runs `schema.convert_humming`, Humming's code, inside an emulation that the caller holds.

    `weight_attr` is the schema's own entry for its weight `weight_key`, all experts; `small` holds the other tensors.
    Call `whole` first; `packed` then may run in several threads. With `weight_is_packed` the weight comes as what
    `packed` gives, made from the schema's form already.
    """

    schema: Foreign
    stacks: Sequence[int]
    k: int
    param_dtype: torch.dtype
    num_experts: int
    weight_key: str
    weight_attr: Mapping[str, Foreign]
    small: Tensors
    weight_is_packed: bool = False
    _outlines: Tensors = field(init=False, default_factory=dict)
    _row_shape: tuple[int, ...] = field(init=False, default=())  # of one expert's packed words
    _may_be_view: bool = field(init=False, default=False)
    _is_view: bool = field(init=False, default=False)

    def whole(self) -> tuple[Foreign, dict[str, torch.Tensor]]:
        """Humming's schema and its tensors for all experts; the weight is a stand-in on the meta device."""
        meta = torch.empty(self.weight_attr["shape"], dtype=self.weight_attr["dtype"], device="meta")
        schema, converted = self._convert({**self.small, self.weight_key: meta}, self.num_experts)
        packed = converted["weight"]
        self._row_shape = tuple(packed.shape[1:])
        # Where Humming only looks at all the bytes as words, with all scales at hand, slices need no more than that;
        # the first real one has to agree.
        self._may_be_view = self._is_all_of(meta, packed)
        self._outlines = self.small if self._may_be_view else self._outlined(meta)
        return schema, converted

    def packed(self, weight: torch.Tensor, rows: slice | None) -> torch.Tensor:
        """A slice of the source's weight as Humming's packed int32 `[e, N, K * bits / 32]`, of the same memory if that
        is all that Humming does.

        `rows` are its experts; None: any, their scales do not matter. Raises UnsupportedError for a weight of another
        shape or dtype.
        """
        shape, dtype, count = self.weight_attr["shape"], self.weight_attr["dtype"], weight.shape[0]
        if self.weight_is_packed:
            shape, dtype = (self.num_experts, *self._row_shape), torch.int32
        if weight.shape[1:] != tuple(shape[1:]) or weight.dtype != dtype or count == 0:
            expected, found = f"{(count, *shape[1:])} {dtype}", f"{tuple(weight.shape)} {weight.dtype}"
            raise UnsupportedError([Problem(self.weight_key, expected, found)])
        weight = weight.contiguous()
        if self.weight_is_packed:
            return weight
        if self._is_view:
            return self._as_words(weight)
        rows = slice(0, count) if rows is None else rows
        slices = {
            name: tensor[rows] if tensor.ndim and tensor.shape[0] == self.num_experts else tensor
            for name, tensor in self._outlines.items()
        }
        with weight_only():
            _, converted = self._convert({**slices, self.weight_key: weight}, count)
        packed = converted["weight"]
        self._is_view = self._may_be_view = self._may_be_view and self._is_all_of(weight, packed)
        return packed

    def _as_words(self, weight: torch.Tensor) -> torch.Tensor:
        """The bytes of a contiguous weight, in their order, as packed words."""
        return weight.view(-1).view(torch.int32).view(weight.shape[0], *self._row_shape)

    def _is_all_of(self, weight: torch.Tensor, packed: torch.Tensor) -> bool:
        """Whether `packed` is the weight's own memory, all of it and in its order."""
        is_all = packed.shape == (weight.shape[0], *self._row_shape) and packed.nbytes == weight.nbytes
        # By the storages: on the meta device there are no addresses to compare.
        starts = [one.storage_offset() * one.element_size() for one in (packed, weight)]
        is_same = packed.untyped_storage()._cdata == weight.untyped_storage()._cdata and starts[0] == starts[1]
        return is_all and is_same and packed.dtype == torch.int32 and packed.is_contiguous()

    def _convert(self, tensors: Tensors, experts: int) -> tuple[Foreign, dict[str, torch.Tensor]]:
        schema, converted = self.schema.convert_humming(
            tensors=dict(tensors),
            shape_n_stacks=list(self.stacks),
            shape_k_stacks=[self.k],
            param_dtype=self.param_dtype,
            num_experts=experts,
            convert_symmetric_integer=False,
        )
        return schema, converted

    def _outlined(self, weight: torch.Tensor) -> Tensors:
        """What stands for the small tensors when only the weight is converted: their shapes, if those will do.

        Scales of one value per projection, and zero points, are always looked at, and cost little.
        """
        outlines = {
            name: tensor.to("meta") if tensor.ndim == 3 and tensor.dtype != torch.int32 else tensor
            for name, tensor in self.small.items()
        }
        try:
            with weight_only():
                self._convert({**outlines, self.weight_key: weight}, self.num_experts)
        except (RuntimeError, NotImplementedError):
            return self.small
        return outlines
