"""Read a tensor-parallel rank's part of a stacked tensor."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from humming_convert.plan import Cut, Run, StackedTensor
from humming_convert.raw_tensors import bytes_of, torch_dtype
from humming_convert.source import Checkpoint, Payload


def whole_of(tensor: StackedTensor) -> StackedTensor:
    """The tensor that `tensor` is a part of."""
    return replace(tensor, shape=tensor.whole_shape, cut=None)


@dataclass(frozen=True, slots=True)
class CutReader:
    """Reads a part by slices of experts, from several threads if need be; `whole` reads the whole of given experts."""

    checkpoint: Checkpoint
    payload: Payload
    tensor: StackedTensor
    cut: Cut
    whole: Callable[[range], torch.Tensor]
    is_pinned: bool

    def read(self, experts: range) -> torch.Tensor:
        """The part for `experts`, shape `(len(experts), ...)`, dtype the tensor's, on the CPU.

        Raises what `whole` raises: the values of all ranks are checked where all have to be read.
        """
        tensor, cut = self.tensor, self.cut
        shape = (len(experts), *tensor.shape[1:])
        out = torch.empty(shape, dtype=torch_dtype(tensor.dtype, tensor.name), pin_memory=self.is_pinned)
        read_rows = self._rows_of()
        source = self.whole(experts) if read_rows is None else None
        axis, place = cut.axis + 1, 0
        for run in cut.runs:
            target = out.narrow(axis, place, run.width)
            if source is not None:
                target.narrow(axis, 0, run.count).copy_(source.narrow(axis, run.start, run.count))
            elif read_rows is not None:
                for row, expert in zip(target, experts, strict=True):
                    read_rows(expert, run, row)
            _fill(target.narrow(axis, run.count, run.width - run.count), cut.fill)
            place += run.width
        return out

    def _rows_of(self) -> Callable[[int, Run, torch.Tensor], None] | None:
        """What reads a run of one expert alone, where its rows lie one after the other in the file."""
        tensor, headers = self.tensor, self.checkpoint.tensors
        if tensor.is_interleaved or tensor.steps or tensor.check or self.cut.axis != 0 or tensor.axis != 0:
            return None
        row_bytes = math.prod(tensor.shape[2:]) * torch_dtype(tensor.dtype, tensor.name).itemsize
        expert_bytes = self.cut.extent * row_bytes
        experts = tensor.shape[0]
        is_fused = tensor.parts[0].expert is None
        parts = tensor.parts if is_fused else tensor.parts[: len(tensor.parts) // experts]
        held = sum(headers[part.source].nbytes for part in parts)
        if held != expert_bytes * (experts if is_fused else 1) or (is_fused and len(parts) > 1):
            return None

        def read(expert: int, run: Run, out: torch.Tensor) -> None:
            view = bytes_of(out[: run.count]) if run.count else memoryview(b"")
            first, last = run.start * row_bytes, (run.start + run.count) * row_bytes
            for source, start, stop, offset in self._places(expert, expert_bytes):
                begin, end = max(first, start), min(last, stop)
                if begin < end:
                    self.payload.read_into(source, view[begin - first : end - first], begin - start + offset)

        return read

    def _places(self, expert: int, expert_bytes: int) -> Iterator[tuple[str, int, int, int]]:
        """Tensor, first and last byte among the expert's, and where in the tensor they begin."""
        parts = self.tensor.parts
        if parts[0].expert is None:
            yield parts[0].source, 0, expert_bytes, expert * expert_bytes
            return
        count, start = len(parts) // self.tensor.shape[0], 0
        for part in parts[expert * count : (expert + 1) * count]:
            stop = start + self.checkpoint.tensors[part.source].nbytes
            yield part.source, start, stop, 0
            start = stop


def _fill(target: torch.Tensor, value: float) -> None:
    """`value` everywhere; zero as bytes of zero, which every dtype has."""
    if value:
        target.fill_(value)
    elif target.numel():
        target.view(torch.uint8).zero_()
