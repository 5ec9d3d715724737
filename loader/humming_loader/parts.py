"""The entries of a layer that was packed for tensor-parallel ranks: how they are called, and that they are a whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from humming_loader.entries import LayerEntry, Manifest, TensorParallelEntry
from humming_loader.errors import ManifestError, PreshardedError, RankError, TensorError


def part_name(layer_name: str, rank: int, size: int) -> str:
    """The key of a rank's part in the manifest, and what the names of its tensors begin with."""
    return layer_name + rank_suffix(rank, size)


def rank_suffix(rank: int, size: int) -> str:
    """What tells a rank's part, and its file, from the others."""
    return f".tp{rank}of{size}"


def layer_names(layers: Mapping[str, LayerEntry]) -> tuple[str, ...]:
    """vLLM's name of every layer, once, in order."""
    return tuple(
        dict.fromkeys(
            name if entry.tensor_parallel is None else entry.tensor_parallel.layer for name, entry in layers.items()
        )
    )


def tp_size_of(layers: Mapping[str, LayerEntry]) -> int:
    """The tensor-parallel size that the layers were packed for; 1: whole layers, to be cut while they are read."""
    return next((part.size for entry in layers.values() if (part := entry.tensor_parallel) is not None), 1)


def whole_intermediate_size(entry: LayerEntry) -> int:
    """The layer's intermediate size, of which `entry` may be a rank's part."""
    part = entry.tensor_parallel
    return entry.intermediate_size if part is None else part.intermediate_size


def find_part(manifest: Manifest, layer_name: str, tp_rank: int, tp_size: int) -> LayerEntry:
    """The entry that rank `tp_rank` of `tp_size` takes its experts from: its own part, or the whole layer.

    Raises TensorError when there is no such layer, RankError for a rank out of range, PreshardedError when the layers
    were packed for ranks of another tensor-parallel size.
    """
    packed = tp_size_of(manifest.layers)
    if layer_name not in layer_names(manifest.layers):
        raise TensorError(layer_name, "one of " + ", ".join(layer_names(manifest.layers)), "no such layer")
    if not 0 <= tp_rank < tp_size:
        raise RankError(layer_name, f"a tensor-parallel rank below {tp_size}", str(tp_rank))
    if packed == 1:
        return manifest.layers[layer_name]
    if packed != tp_size:
        raise PreshardedError(layer_name, packed, tp_size, convert_call(manifest, tp_size))
    return manifest.layers[part_name(layer_name, tp_rank, tp_size)]


def convert_call(
    manifest: Manifest,
    tp_size: int,
    *,
    sm: int | None = None,
    cuda: tuple[int, int] | None = None,
    humming_version: str | None = None,
) -> str:
    """The call that makes the checkpoint again for `tp_size`, and for another host where one is given."""
    major, minor = cuda or manifest.target.cuda
    ranks = f" --tp {tp_size}" if tp_size > 1 else ""
    return (
        f"humming-convert {manifest.source.name or 'SRC'} OUT --target sm{sm or manifest.target.sm} "
        f"--cuda {major}.{minor} --activation {manifest.activation} --dtype {manifest.param_dtype}{ranks} "
        f"(with humming-kernels {humming_version or manifest.humming_version})"
    )


def check_parts(layers: Mapping[str, LayerEntry]) -> None:
    """Raises ManifestError unless all layers were packed for one size, each has all its ranks, and they make it up."""
    size = tp_size_of(layers)
    groups: dict[str, list[LayerEntry]] = {}
    for name, entry in layers.items():
        part = entry.tensor_parallel
        found = 1 if part is None else part.size
        if found != size:
            raise ManifestError(f"layers[{name!r}].tensor_parallel", f"a size of {size}, as others have", str(found))
        if part is not None:
            groups.setdefault(part.layer, []).append(entry)
    for layer_name, entries in groups.items():
        _check_ranks(layer_name, entries, size)


def _check_ranks(layer_name: str, entries: list[LayerEntry], size: int) -> None:
    parts = [part for entry in entries if (part := entry.tensor_parallel) is not None]
    ranks = [part.rank for part in parts]
    where = f"layers: parts of {layer_name}"
    if ranks != list(range(size)):
        raise ManifestError(where, f"the ranks 0 to {size - 1} in order", ", ".join(map(str, ranks)))
    common = [_common(entry, part) for entry, part in zip(entries, parts, strict=True)]
    if any(entry != common[0] for entry in common):
        raise ManifestError(where, "the same layer in all of them", "different ones")
    reached = 0
    for entry, part in zip(entries, parts, strict=True):
        if part.begin != reached or not 0 <= part.end - part.begin <= entry.intermediate_size:
            expected = f"at most {entry.intermediate_size} values of the intermediate size from {reached} on"
            raise ManifestError(f"{where}: rank {part.rank}", expected, f"{part.begin} to {part.end}")
        reached = part.end
    if reached != parts[0].intermediate_size:
        raise ManifestError(where, f"all {parts[0].intermediate_size} values of the intermediate size", f"{reached}")


def _common(entry: LayerEntry, part: TensorParallelEntry) -> LayerEntry:
    """What all ranks must agree in."""
    return replace(entry, sublayers={}, tensor_parallel=replace(part, rank=0, begin=0, end=0))
