"""Convert every layer of a plan, in order; what takes torch and Humming begins here."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch

from humming_convert import experts_file
from humming_convert.activation import input_schema_for
from humming_convert.checks import check_expected
from humming_convert.collector import resumed
from humming_convert.convert import Setting
from humming_convert.devices import devices_of
from humming_convert.errors import CheckpointError, Problem, UnsupportedError
from humming_convert.gather import Gatherer
from humming_convert.host.target import emulate
from humming_convert.layout_probe import check_compatible
from humming_convert.options import ConvertOptions
from humming_convert.output import OutputFolder
from humming_convert.plan import ConversionPlan, LayerPlan
from humming_convert.progress import ByteProgress
from humming_convert.source import Checkpoint, Payload
from humming_convert.unused_checks import check_unused
from humming_loader.entries import LayerEntry

_SUBLAYERS = 2  # w13 and w2
_SLICES_AHEAD = 2


def convert_layers(
    plan: ConversionPlan,
    options: ConvertOptions,
    checkpoint: Checkpoint,
    payload: Payload,
    folder: OutputFolder,
    progress: ByteProgress,
    finished: Callable[[int, str], None] | None = None,
) -> dict[str, LayerEntry]:
    """Write one experts file for each layer of `plan`, or each rank's part of it; the manifest's entries by name.

    `finished` is told the number and the file of each layer in order, once the file is complete.

    Raises UnsupportedError for everything that Humming cannot take before any payload is read, CheckpointError for
    values that cannot be, OutputError when writing fails.
    """
    check_all_compatible(plan, options)
    gatherer = Gatherer(checkpoint, payload)
    parts = plan.packed
    names = [
        experts_file.file_name(number, len(plan.layers), part.part)
        for number, layer in enumerate(plan.layers, 1)
        for part in layer.ranks or (layer,)
    ]
    devices = devices_of(options.device, options.target)
    lanes = max(_SUBLAYERS * len(devices), options.workers // 2)
    with (
        ThreadPoolExecutor(options.workers, thread_name_prefix="convert") as pool,
        ThreadPoolExecutor(max(2, options.workers // 2), thread_name_prefix="disk") as disk,
        ThreadPoolExecutor(1, thread_name_prefix="prepare") as preparer,
        ThreadPoolExecutor(lanes, thread_name_prefix="sublayer") as sublayers,
        ThreadPoolExecutor(1, thread_name_prefix="finish") as finisher,
        emulate(options.target, devices[0]),  # held, so that slices find the seams in place
        _one_thread_per_operation(),
        resumed(),
    ):
        setting = Setting(
            target=options.target,
            activation=options.activation,
            param_dtype=plan.param_dtype,
            pool=pool,
            disk=disk,
            lanes=sublayers,
            finisher=finisher,
            ahead=_SLICES_AHEAD + 2 * options.workers // lanes,
        )

        def prepare(index: int) -> experts_file.LayerRun:
            _check_bookkeeping(parts[index], checkpoint, payload)
            # Layers take turns on the GPUs: a layer's scales then live on one of them only.
            device = devices[index % len(devices)]
            return experts_file.begin_layer(parts[index], gatherer, setting, names[index], device)

        under_way: deque[experts_file.LayerWriting] = deque()
        entries: list[LayerEntry] = []

        def take_finished() -> None:
            entries.append(under_way.popleft().entry.result())
            if finished is not None:
                finished(len(entries) - 1, names[len(entries) - 1])

        try:
            begun = preparer.submit(prepare, 0)
            for index, layer in enumerate(parts):
                current = begun.result()
                if index + 1 < len(parts):
                    begun = preparer.submit(prepare, index + 1)
                # One layer more than the lanes can take: a lane that is done finds the next sublayer waiting.
                while len(under_way) > lanes // _SUBLAYERS:
                    take_finished()
                progress.label(layer.layer_name)
                under_way.append(experts_file.write_layer(current, setting, folder.path(names[index]), progress))
            while under_way:
                take_finished()
        except BaseException:
            payload.stop()  # or leaving would wait for files that are still to come
            for writing in under_way:
                writing.writer.stop()  # or leaving would wait until these layers are written
            raise
        return {layer.layer_name: entry for layer, entry in zip(parts, entries, strict=True)}


def _check_bookkeeping(layer: LayerPlan, checkpoint: Checkpoint, payload: Payload) -> None:
    problems = [
        problem for sublayer in layer.sublayers for problem in check_expected(checkpoint, payload, sublayer)
    ]
    if problems:
        raise CheckpointError(problems)
    check_unused(checkpoint, payload, layer.sublayers)


def check_all_compatible(plan: ConversionPlan, options: ConvertOptions) -> None:
    """Raises UnsupportedError with every sublayer that Humming cannot take for this activation and target."""
    problems: dict[str, Problem] = {}
    for layer in plan.layers:
        for sublayer in layer.sublayers:
            try:
                schema = input_schema_for(options.activation, sublayer.input_schema)
                check_compatible(sublayer.weight_schema, schema, plan.param_dtype, options.target)
            except UnsupportedError as error:
                # Every layer of one kind fails alike: one line says it.
                problems |= {str(problem): problem for problem in error.problems}
    if problems:
        raise UnsupportedError(list(problems.values()))


@contextmanager
def _one_thread_per_operation() -> Iterator[None]:
    """Slices are what runs in parallel; OpenMP's own threads would only spin beside them."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
