"""One MoE layer as one experts file: its tensors, its entry in the manifest, and the same entry in the file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from humming_convert.convert import Setting, SublayerRun, begin_sublayer, final_shapes
from humming_convert.gather import Gatherer
from humming_convert.layout_probe import fingerprint, layer_config_to_str, probe_digest
from humming_convert.plan import LayerPlan, RankPart
from humming_convert.progress import ByteProgress
from humming_convert.schemas import schema_to_dict
from humming_convert.slicing_rules import slicing_rules
from humming_convert.writer import ExpertsFileWriter, TensorSpec, metadata_size
from humming_loader._version import __version__
from humming_loader.dtypes import code_of_torch_dtype
from humming_loader.entries import LayerEntry, SublayerEntry, TensorEntry, TensorParallelEntry
from humming_loader.fingerprint import Fingerprint
from humming_loader.manifest import TENSOR_NAMES, layer_metadata, stored_name
from humming_loader.parts import rank_suffix

UNKNOWN_DIGEST = "0" * 64


def file_name(number: int, count: int, part: RankPart | None = None) -> str:
    """Path in the output folder of the `number`-th of `count` layers, or of a rank's part, which is read alone.

    Tensor names never become paths.
    """
    rank = "" if part is None else rank_suffix(part.rank, part.size)
    return f"humming/experts-{number:05d}-of-{count:05d}{rank}.safetensors"


@dataclass(frozen=True, slots=True)
class LayerRun:
    """A layer whose small tensors are read and whose first slices are converted: all that its file's header needs."""

    layer: LayerPlan
    runs: tuple[SublayerRun, ...]
    entry: LayerEntry


def begin_layer(
    layer: LayerPlan, gatherer: Gatherer, setting: Setting, name: str, device: torch.device
) -> LayerRun:
    """Begin `layer` on `device`; its file is called `name` in the manifest.

    Raises CheckpointError or UnsupportedError.
    """
    runs = tuple(begin_sublayer(sublayer, layer, gatherer, setting, device) for sublayer in layer.sublayers)
    return LayerRun(layer, runs, _entry(layer, runs, setting, name))


@dataclass(frozen=True, slots=True)
class LayerWriting:
    """A layer on its way into its file: `entry` is there once the file is on the disk."""

    writer: ExpertsFileWriter
    entry: Future[LayerEntry]


def write_layer(begun: LayerRun, setting: Setting, path: Path, progress: ByteProgress) -> LayerWriting:
    """Start to convert a layer into the file `path`, in the setting's threads.

    Raises OutputError when there can be no such file; through the result also CheckpointError and UnsupportedError.
    Then there is no file.
    """
    layer, entry = begun.layer, begun.entry
    specs = [
        TensorSpec(tensor.name, tensor.dtype, tensor.shape)
        for sublayer in entry.sublayers.values()
        for tensor in sublayer.tensors.values()
    ]
    reserve = metadata_size(layer_metadata({layer.layer_name: entry}, __version__))
    writer = ExpertsFileWriter(path, specs, reserve)
    # A tensor is hashed front to back by one thread: several sublayers at once keep several processors busy.
    parts = [setting.lanes.submit(_write_sublayer, layer, run, writer, progress) for run in begun.runs]
    return LayerWriting(writer, setting.finisher.submit(_finish, writer, parts, layer.layer_name, entry))


def _finish(
    writer: ExpertsFileWriter, parts: Sequence[Future[None]], layer_name: str, entry: LayerEntry
) -> LayerEntry:
    with writer:
        try:
            for done in wait(parts, return_when=FIRST_EXCEPTION).done:
                done.result()
        except BaseException:
            writer.stop()  # what still runs ends at its next piece
            wait(parts)
            raise
        whole = _with_digests(entry, writer.digests())
        writer.finish(layer_metadata({layer_name: whole}, __version__))
    return whole


def _write_sublayer(layer: LayerPlan, run: SublayerRun, writer: ExpertsFileWriter, progress: ByteProgress) -> None:
    names = {key: stored_name(layer.layer_name, run.plan.name, key) for key in TENSOR_NAMES}

    def place(experts: range, packed: torch.Tensor) -> None:
        data = as_bytes(packed)
        writer.place(names["weight"], experts.start * (data.nbytes // len(experts)), data)

    for key, value in run.small().items():
        writer.write(names[key], as_bytes(value))
    done = 0
    for number, packed in enumerate(run.weights(place), 1):
        writer.append_digest(names["weight"], as_bytes(packed))
        reached = run.source_bytes * number // len(run.chunks)
        progress.advance(reached - done)
        done = reached


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, whatever its dtype; nothing is cast."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data if tensor.numel() else memoryview(b"")


def _entry(layer: LayerPlan, runs: tuple[SublayerRun, ...], setting: Setting, name: str) -> LayerEntry:
    return LayerEntry(
        family=layer.family,
        num_experts=layer.num_experts,
        hidden_size=layer.hidden_size,
        intermediate_size=layer.intermediate_size,
        activation_function=layer.activation_function,
        is_gated=layer.is_gated,
        gate_up="interleaved" if layer.is_interleaved else "split",
        has_bias=layer.has_bias,
        format=" + ".join(sorted({sublayer.format for sublayer in layer.sublayers})),
        sublayers={run.plan.name: _sublayer_entry(layer, run, setting, name) for run in runs},
        tensor_parallel=part_entry(layer.part),
    )


def part_entry(part: RankPart | None) -> TensorParallelEntry | None:
    """What the manifest says of a rank's part; nothing of a whole layer."""
    if part is None:
        return None
    return TensorParallelEntry(
        layer=part.layer,
        rank=part.rank,
        size=part.size,
        intermediate_size=part.intermediate_size,
        begin=part.begin,
        end=part.end,
    )


def _sublayer_entry(layer: LayerPlan, run: SublayerRun, setting: Setting, name: str) -> SublayerEntry:
    tensors = {}
    for key, (dtype, shape) in final_shapes(run, layer.num_experts).items():
        stored = stored_name(layer.layer_name, run.plan.name, key)
        code = code_of_torch_dtype(dtype, stored)
        tensors[key] = TensorEntry(name, stored, code, shape, UNKNOWN_DIGEST)
    converter = run.converter
    has_input = converter.input_schema is not None and converter.config.a_dtype.num_bits != 16
    flags = fingerprint(converter.config, setting.target)
    return SublayerEntry(
        tensors=tensors,
        shape_n=run.plan.shape_n,
        shape_k=run.plan.shape_k,
        shape_n_stacks=run.plan.shape_n_stacks,
        source_schema=run.plan.source_schema,
        source_input_schema=run.plan.input_schema,
        weight_schema=schema_to_dict(converter.weight_schema) or {},
        input_schema=schema_to_dict(converter.input_schema) if has_input else None,
        layer_config=layer_config_to_str(converter.config),
        fingerprint=Fingerprint(flags, probe_digest(converter)),
        slicing=slicing_rules(run.plan.name, converter.config, flags),
    )


def _with_digests(entry: LayerEntry, digests: Mapping[str, str]) -> LayerEntry:
    sublayers = {
        key: replace(
            sublayer,
            tensors={
                name: replace(tensor, sha256=digests[tensor.name])
                for name, tensor in sublayer.tensors.items()
            },
        )
        for key, sublayer in entry.sublayers.items()
    }
    return replace(entry, sublayers=sublayers)
