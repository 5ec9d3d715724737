"""Convert one sublayer, slice of experts by slice.

Reading, converting, hashing and writing of different slices overlap; a slice is small enough to stay in a
processor's cache from the read to the write, and memory does not grow with the layer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from humming_convert import steps
from humming_convert.activation import input_schema_for
from humming_convert.devices import on_device, to_host
from humming_convert.gather import Gatherer, StackReader, chunks_of
from humming_convert.gather_cut import CutReader
from humming_convert.kernel_format import SublayerConverter
from humming_convert.plan import LayerPlan, StackedTensor, SublayerPlan
from humming_convert.source import TensorHeader
from humming_convert.target import Target
from humming_loader.dtypes import tensor_nbytes

Result = TypeVar("Result")
Packed = dict[str, torch.Tensor]
Place = Callable[[range, torch.Tensor], None]

CPU_CHUNK_BYTES = 4 << 20
GPU_CHUNK_BYTES = 32 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What is the same for every layer of a run.

    Slices are read and converted in `pool` and written in `disk`. A sublayer is followed from its first slice to its
    last, and hashed, by a thread of `lanes`, at most `ahead` slices behind the reading; `finisher` completes files.
    """

    target: Target
    activation: str
    param_dtype: str
    pool: ThreadPoolExecutor
    disk: ThreadPoolExecutor
    lanes: ThreadPoolExecutor
    finisher: ThreadPoolExecutor
    ahead: int


@dataclass(slots=True)
class SublayerRun:
    """One sublayer under way: its converter and the slices still to come."""

    plan: SublayerPlan
    converter: SublayerConverter
    chunks: tuple[range, ...]
    weight: StackReader | CutReader
    device: torch.device
    setting: Setting
    source_bytes: int
    first: Packed = field(init=False)

    def start(self) -> None:
        """Scan if the format asks for it, then convert the first slice: the final config is known after it."""
        if self.converter.needs_scan:
            for seen in _ordered(self.setting, self._scan, self.chunks):
                if seen:
                    break
        if self.converter.whole:
            self.chunks = (range(self.chunks[0].start, self.chunks[-1].stop),)
            with on_device(self.device):
                everything = self.converter.convert(self._read(self.chunks[0]), 0)
                self.first = {name: value.cpu() for name, value in everything.items()}
        else:
            self.first = {"weight": self._convert(self.chunks[0])}

    def weights(self, place: Place) -> Iterator[torch.Tensor]:
        """Every slice of the packed weight in expert order, while `place(experts, slice)` runs in a thread for it.

        When the iterator is exhausted, every call of `place` has returned. Raises what `place` raised.
        """
        first = self.first.pop("weight")  # not kept: it would stay in memory as long as the layer is under way

        def convert_and_place(experts: range) -> tuple[torch.Tensor, Future[None]]:
            packed = first if experts == self.chunks[0] else self._convert(experts)
            return packed, self.setting.disk.submit(place, experts, packed)

        for packed, placed in _ordered(self.setting, convert_and_place, self.chunks):
            yield packed
            placed.result()

    def small(self) -> Packed:
        """Every tensor but the weight, all experts."""
        rest = self.first if self.converter.whole else self.converter.small()
        rest = {name: value for name, value in rest.items() if name != "weight"} | self.converter.common()
        return {name: value.cpu() for name, value in rest.items()}

    def _read(self, experts: range) -> torch.Tensor:
        return self.weight.read(experts).to(self.device, non_blocking=True)

    def _scan(self, experts: range) -> bool:
        with on_device(self.device):
            return self.converter.scan(self._read(experts))

    def _convert(self, experts: range) -> torch.Tensor:
        with on_device(self.device):
            return to_host(self.converter.convert_weight(self._read(experts), experts.start))


def _ordered(setting: Setting, work: Callable[[range], Result], chunks: tuple[range, ...]) -> Iterator[Result]:
    """Results of `work` in order, at most `ahead` slices ahead of the one that is taken."""
    pending: deque[Future[Result]] = deque()
    try:
        for chunk in chunks:
            pending.append(setting.pool.submit(work, chunk))
            if len(pending) > setting.ahead:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        for future in pending:
            future.cancel()
        wait(pending)


def begin_sublayer(
    plan: SublayerPlan, layer: LayerPlan, gatherer: Gatherer, setting: Setting, device: torch.device
) -> SublayerRun:
    """Read every small tensor of the sublayer, decide what depends on all experts, convert the first slice.

    Raises CheckpointError for scales that cannot be, UnsupportedError for what Humming cannot take.
    """
    weight = next(tensor for tensor in plan.tensors if tensor.is_weight)
    schema = input_schema_for(setting.activation, plan.input_schema)
    small: dict[str, torch.Tensor] = {}
    inputs = plan.input_tensors if schema is not None else ()
    for tensor in (*plan.tensors, *inputs):
        if not tensor.is_weight:
            small[tensor.name] = gatherer.stack(tensor).to(device)
    converter = SublayerConverter(
        plan.weight_schema,
        schema,
        shape_n=plan.shape_n,
        shape_k=plan.shape_k,
        shape_n_stacks=plan.shape_n_stacks,
        num_experts=layer.num_experts,
        has_bias=plan.has_bias,
        param_dtype=setting.param_dtype,
        target=setting.target,
        small=small,
        weight_is_packed=steps.packs(weight),
    )
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # slices run in streams of their own
    chunk_bytes = CPU_CHUNK_BYTES if device.type == "cpu" else GPU_CHUNK_BYTES
    chunks = chunks_of(layer.num_experts, weight_bytes(weight) // layer.num_experts, chunk_bytes)
    source_bytes = source_bytes_of(plan, layer, gatherer.checkpoint.tensors)
    reader = gatherer.slices(weight, is_pinned=device.type == "cuda")
    run = SublayerRun(plan, converter, tuple(chunks), reader, device, setting, source_bytes)
    run.start()
    return run


def weight_bytes(weight: StackedTensor) -> int:
    """Bytes of the stacked weight, all experts and ranks: what is read of it."""
    return tensor_nbytes(weight.dtype, weight.whole_shape, weight.name)


def source_bytes_of(plan: SublayerPlan, layer: LayerPlan, headers: Mapping[str, TensorHeader]) -> int:
    """Bytes that the sublayer's tensors take in the source, or a rank's share of them."""
    used = {part.source for tensor in (*plan.tensors, *plan.input_tensors) for part in tensor.parts}
    total = sum(headers[name].nbytes for name in used.union(plan.unused))
    if layer.part is None:
        return total
    rank, size = layer.part.rank, layer.part.size
    return total * (rank + 1) // size - total * rank // size


def final_shapes(run: SublayerRun, experts: int) -> Mapping[str, tuple[torch.dtype, tuple[int, ...]]]:
    """dtype and full shape of every tensor that the sublayer will write, from its first slice."""
    weight = run.first["weight"]
    shapes = {name: (value.dtype, tuple(value.shape)) for name, value in run.small().items()}
    return {"weight": (weight.dtype, (experts, *weight.shape[1:]))} | shapes
