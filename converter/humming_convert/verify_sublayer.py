"""Compare one packed sublayer with the same sublayer of the source, expert by expert."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from humming_convert.decode import Decoded, PackedLayout, decode, raw_array
from humming_convert.decode_source import Raw, RawTensor, decode_projection, to_float32
from humming_convert.errors import Problem, VerificationError
from humming_convert.expected import Expert, expected, largest_scale, stack
from humming_convert.plan import LayerPlan, Part, StackedTensor, SublayerPlan
from humming_convert.progress import ByteProgress
from humming_convert.source import Checkpoint, Payload
from humming_convert.verify_part import expert_part
from humming_loader.entries import SublayerEntry
from humming_loader.reader import ExpertsFile

CHUNK_CODES = 1 << 22
FIELDS = ("codes", "scale", "zero_point", "scale_2", "bias")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sides:
    """The output folder and the source, and how they are compared: `workers` slices of experts at once."""

    out: Path
    humming_version: str
    checkpoint: Checkpoint
    payload: Payload
    progress: ByteProgress | None
    workers: int


@dataclass(frozen=True, slots=True)
class SublayerComparison:
    """One sublayer on both sides."""

    sides: Sides
    layer: LayerPlan
    plan: SublayerPlan
    entry: SublayerEntry
    layout: PackedLayout

    @property
    def num_experts(self) -> int:
        """Of the layer."""
        return self.layer.num_experts

    def run(self) -> list[Problem]:
        """Compare every expert; at most one problem for each kind of tensor."""
        step = max(1, CHUNK_CODES // (self.layout.shape_n * self.layout.shape_k))
        chunks = [range(a, min(a + step, self.num_experts)) for a in range(0, self.num_experts, step)]
        largest = None
        if self.layout.flags["use_int_weight_scale"]:
            largest = max(largest_scale(self.layout, self._source(chunk)) for chunk in chunks)
        found: dict[str, Problem] = {}
        with ExpertsFile(self.sides.out / self.entry.tensors["weight"].file) as opened:

            def compare(chunk: range) -> list[Problem]:
                return self._compare(opened, chunk, largest)

            with ThreadPoolExecutor(self.sides.workers) as pool:
                for problems in pool.map(compare, chunks):
                    for problem in problems:
                        found.setdefault(problem.where, problem)
            for problem in self._compare_inputs(opened):
                found.setdefault(problem.where, problem)
        return list(found.values())

    def _compare(self, opened: ExpertsFile, chunk: range, largest: float | None) -> list[Problem]:
        try:
            packed = decode(self.layout, self._packed(opened, chunk))
            wanted = expected(self.layout, self._source(chunk), self.sides.humming_version, largest)
        except VerificationError as error:
            return list(error.problems)
        return list(differences(packed, wanted, chunk.start))

    def _packed(self, opened: ExpertsFile, chunk: range) -> dict[str, Raw]:
        tensors = {}
        for key, entry in self.entry.tensors.items():
            if key.startswith("input_scale"):
                continue
            data = bytearray(opened.expert_nbytes(entry.name) * len(chunk))
            opened.read_experts(entry.name, chunk, memoryview(data))
            tensors[key] = raw_array(data, entry.dtype, (len(chunk), *entry.shape[1:]), entry.name)
            if self.sides.progress is not None:
                self.sides.progress.advance(len(data))
        return tensors

    def _source(self, chunk: range) -> list[Expert]:
        return [self._source_expert(expert) for expert in chunk]

    def _source_expert(self, expert: int) -> Expert:
        stacks: dict[int, dict[str, RawTensor]] = {}
        for tensor in self.plan.tensors:
            for part in self._parts(tensor, expert):
                raw = self._read(part.source, part.expert, expert)
                if any(step.name == "transpose" for step in tensor.steps):
                    raw = RawTensor(raw.dtype, np.ascontiguousarray(raw.array.T))
                stacks.setdefault(part.stack, {})[tensor.name] = raw
        projections = [decode_projection(self.entry.source_schema, stacks[index]) for index in sorted(stacks)]
        is_interleaved = any(tensor.is_interleaved for tensor in self.plan.tensors)
        whole = stack(projections, is_interleaved=is_interleaved)
        return expert_part(whole, self.layer, self.plan, has_groups=self.layout.group > 0)

    def _parts(self, tensor: StackedTensor, expert: int) -> Sequence[Part]:
        if tensor.parts[0].expert is None:
            return tensor.parts
        count = len(tensor.parts) // self.num_experts
        return tensor.parts[expert * count : (expert + 1) * count]

    def _read(self, name: str, own_expert: int | None, expert: int) -> RawTensor:
        header = self.sides.checkpoint.tensors[name]
        shape, nbytes, start = header.shape, header.nbytes, 0
        if own_expert is None:
            nbytes = header.nbytes // header.shape[0]
            shape, start = header.shape[1:], expert * nbytes
        data = bytearray(nbytes)
        self.sides.payload.read_into(name, memoryview(data), start)
        return RawTensor(header.dtype, raw_array(data, header.dtype, shape, name))

    def _compare_inputs(self, opened: ExpertsFile) -> Iterator[Problem]:
        """A static activation scale is the largest of all experts and projections."""
        for key, entry in self.entry.tensors.items():
            if not key.startswith("input_scale"):
                continue
            values = []
            for tensor in self.plan.input_tensors:
                for part in tensor.parts:
                    value = to_float32(self._read(part.source, 0, 0)).reshape(-1)
                    values.append(np.float32(1) / value if tensor.name == "input_global_scale" else value)
            data = bytearray(opened.tensors[entry.name].nbytes)
            opened.read_into(entry.name, memoryview(data))
            if self.sides.progress is not None:
                self.sides.progress.advance(len(data))
            found = np.frombuffer(data, np.float32)
            wanted = np.concatenate(values).max() if values else None
            if wanted is None or found.tolist() != [wanted]:
                yield Problem(key, f"[{wanted}], the largest of the source", f"{found.tolist()}")


def differences(found: Decoded, wanted: Decoded, first_expert: int) -> Iterator[Problem]:
    """One problem for each field in which two decoded sublayers differ, with the first place."""
    for field in FIELDS:
        one, other = getattr(found, field), getattr(wanted, field)
        if one is None and other is None:
            continue
        if one is None or other is None or one.shape != other.shape or one.dtype != other.dtype:
            yield Problem(field, _described(other), _described(one))
            continue
        if one.dtype == np.float32:
            one, other = (
                np.ascontiguousarray(one).view(np.uint32),
                np.ascontiguousarray(other).view(np.uint32),
            )
        unequal = one != other
        if unequal.any():
            place = tuple(int(axis) for axis in np.unravel_index(int(unequal.argmax()), unequal.shape))
            index = ", ".join(str(axis) for axis in (place[0] + first_expert, *place[1:]))
            count = int(np.count_nonzero(unequal))
            text = f"{count} that differ, the first at [{index}]: {one[place]} instead of {other[place]}"
            yield Problem(field, "the source's values", text)


def _described(values: Raw | None) -> str:
    return "none" if values is None else f"{values.dtype} of shape {list(values.shape)}"
