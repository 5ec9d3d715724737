"""Bring the tensors of one sublayer into memory, stacked as Humming's schemas want them.

Only this file knows how a plan's parts become one tensor. It reads, applies the plan's pure steps and
checks scales; it never decides a layout and never names an output.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from humming_convert import steps
from humming_convert.checks import check_scale, check_unequal
from humming_convert.errors import CheckpointError
from humming_convert.gather_cut import CutReader, whole_of
from humming_convert.plan import Part, StackedTensor
from humming_convert.raw_tensors import bytes_of, torch_dtype
from humming_convert.source import Checkpoint, Payload, TensorHeader


@dataclass(frozen=True, slots=True)
class Gatherer:
    """Reads stacked tensors of a checkpoint; safe to call from several threads at once."""

    checkpoint: Checkpoint
    payload: Payload

    def stack(self, tensor: StackedTensor) -> torch.Tensor:
        """All of `tensor`: what `slices(tensor).read` gives for every expert, and raises."""
        return self.slices(tensor).read(range(tensor.shape[0]))

    def slices(self, tensor: StackedTensor, *, is_pinned: bool = False) -> StackReader | CutReader:
        """A reader of `tensor`, for as many slices of experts as are wanted; pinned ones travel faster to a GPU."""
        if tensor.cut is not None:
            whole = StackReader(self.checkpoint, self.payload, whole_of(tensor), is_pinned=False)
            return CutReader(self.checkpoint, self.payload, tensor, tensor.cut, whole.read, is_pinned)
        return StackReader(self.checkpoint, self.payload, tensor, is_pinned)


class StackReader:
    """Reads one stacked tensor by slices of experts, from several threads if need be."""

    def __init__(self, checkpoint: Checkpoint, payload: Payload, tensor: StackedTensor, is_pinned: bool) -> None:
        self._headers = checkpoint.tensors
        self._payload = payload
        self._tensor = tensor
        self._is_pinned = is_pinned
        self._dtype = torch_dtype(tensor.dtype, tensor.name)
        self._per_expert = len(tensor.parts) // tensor.shape[0]
        # Whether the parts, one after the other as they are stored, are the stacked tensor's bytes.
        self._is_one_run = (
            not tensor.steps
            and not tensor.is_interleaved
            and tensor.axis == 0
            and all(self._headers[part.source].dtype == tensor.dtype for part in tensor.parts)
        )
        is_plain = tensor.axis == 0 and not tensor.is_interleaved
        self._into = steps.packing(tensor.steps[0]) if len(tensor.steps) == 1 and is_plain else None
        self._local = threading.local()

    def read(self, experts: range) -> torch.Tensor:
        """The tensor for `experts`, shape `(len(experts), ...)`, dtype the tensor's, on the CPU.

        Raises CheckpointError when a file changed or when a scale holds a value that cannot be (NaN, infinite,
        or negative where the format forbids it).
        """
        tensor = self._tensor
        shape = (len(experts), *tensor.shape[1:])
        out = torch.empty(shape, dtype=self._dtype, pin_memory=self._is_pinned)
        if tensor.check and tensor.steps and not tensor.is_weight:
            self._check_parts()
        if tensor.parts[0].expert is None:
            self._fill_fused(experts, out)
        elif self._is_one_run:
            self._read_run(experts, out)
        elif self._into is not None:
            self._fill_rows(experts, out, self._into)
        else:
            self._fill_per_expert(experts, out)
        if tensor.check:
            self._check(experts, out)
        return out

    def _check(self, experts: range, out: torch.Tensor) -> None:
        if not self._tensor.steps:
            problem = check_scale(self._tensor.name, out, self._tensor.check)
            if problem is not None:
                self._check_parts()
                raise CheckpointError([problem])
        is_fused = self._tensor.parts[0].expert is None
        parts = self._tensor.parts * len(experts) if is_fused else self._parts(experts)
        unequal = check_unequal([part.source for part in parts], out, self._tensor.check)
        if unequal:
            raise CheckpointError(unequal)

    def _check_parts(self) -> None:
        """Say of the source's own tensors, as they are stored, what is wrong with their values."""
        found = (
            check_scale(part.source, self._value(self._headers[part.source]), self._tensor.check)
            for part in self._tensor.parts
        )
        problems = [problem for problem in found if problem is not None]
        if problems:
            raise CheckpointError(problems)

    def _parts(self, experts: range) -> tuple[Part, ...]:
        return self._tensor.parts[experts.start * self._per_expert : experts.stop * self._per_expert]

    def _read_run(self, experts: range, out: torch.Tensor) -> None:
        """Read every part to where it belongs, with no copy on the way."""
        target = bytes_of(out)
        offset = 0
        for part in self._parts(experts):
            end = offset + self._headers[part.source].nbytes
            self._payload.read_into(part.source, target[offset:end])
            offset = end
        if offset != target.nbytes:
            raise ValueError(f"{self._tensor.name}: parts of {offset} bytes for {target.nbytes}")

    def _fill_per_expert(self, experts: range, out: torch.Tensor) -> None:
        for row, expert in enumerate(experts):
            parts = self._parts(range(expert, expert + 1))
            values = [self._through_steps(self._part(part)) for part in parts]
            _place(values, out[row], self._tensor.axis, is_interleaved=self._tensor.is_interleaved)

    def _fill_rows(self, experts: range, out: torch.Tensor, into: Callable[[torch.Tensor, torch.Tensor], None]) -> None:
        """Let the one step write each part's rows to where they belong; what it reads stays in the cache."""
        for row, expert in zip(out, experts, strict=True):
            first, parts = 0, self._parts(range(expert, expert + 1))
            total = sum(math.prod(self._headers[part.source].shape) for part in parts)
            for part in parts:
                value = self._part(part, is_scratch=True)
                rows = len(row) * value.numel() // total
                into(value, row[first : first + rows])
                first += rows

    def _part(self, part: Part, *, is_scratch: bool = False) -> torch.Tensor:
        """One expert's own tensor; a weight that passes steps has its values looked at now."""
        tensor = self._tensor
        value = self._value(self._headers[part.source], is_scratch=is_scratch)
        problem = check_scale(part.source, value, tensor.check) if tensor.is_weight and tensor.check else None
        if problem is not None:
            raise CheckpointError([problem])
        return value

    def _fill_fused(self, experts: range, out: torch.Tensor) -> None:
        headers = (self._headers[part.source] for part in self._tensor.parts)
        values = [self._through_steps(self._value(header, experts)) for header in headers]
        # One number per expert has no other axis.
        _place(values, out, min(1 + self._tensor.axis, out.ndim - 1), is_interleaved=self._tensor.is_interleaved)

    def _through_steps(self, value: torch.Tensor) -> torch.Tensor:
        for step in self._tensor.steps:
            value = steps.apply(step, value)
        return value

    def _value(
        self, header: TensorHeader, experts: range | None = None, *, is_scratch: bool = False
    ) -> torch.Tensor:
        """The source tensor, or the rows `experts` of one that holds every expert on axis 0.

        A scratch value lies in memory that the thread's next one takes.
        """
        shape: Sequence[int] = header.shape
        start = 0
        if experts is not None:
            start = experts.start * (header.nbytes // header.shape[0])
            shape = (len(experts), *header.shape[1:])
        dtype = torch_dtype(header.dtype, header.name)
        value = self._scratch(shape, dtype) if is_scratch else torch.empty(tuple(shape), dtype=dtype)
        self._payload.read_into(header.name, bytes_of(value), start)
        return value

    def _scratch(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        nbytes = math.prod(shape) * dtype.itemsize
        held: torch.Tensor | None = getattr(self._local, "scratch", None)
        if held is None or held.numel() < nbytes:
            self._local.scratch = held = torch.empty(nbytes, dtype=torch.uint8)
        return held[:nbytes].view(dtype).view(tuple(shape))


def _place(values: Sequence[torch.Tensor], out: torch.Tensor, axis: int, *, is_interleaved: bool = False) -> None:
    """Lay `values` one after the other along `axis` of `out`, or in turns; a value may have its other axes in
    another form.
    """
    if not out.ndim:
        out.copy_(values[0].reshape(()))
        return
    if is_interleaved:
        turns = out.view(*out.shape[:axis], -1, len(values), *out.shape[axis + 1 :])
        for index, value in enumerate(values):
            turn = turns.select(axis + 1, index)
            turn.copy_(value.reshape(turn.shape))
        return
    offset = 0
    for value in values:
        shape = list(out.shape)
        shape[axis] = value.numel() * out.shape[axis] // out.numel()
        out.narrow(axis, offset, shape[axis]).copy_(value.reshape(shape))
        offset += shape[axis]


def chunks_of(experts: int, bytes_per_expert: int, chunk_bytes: int) -> Iterable[range]:
    """Consecutive runs of experts of about `chunk_bytes` each, at least one expert a run."""
    size = max(1, chunk_bytes // max(1, bytes_per_expert))
    return [range(start, min(start + size, experts)) for start in range(0, experts, size)]
