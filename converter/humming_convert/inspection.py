"""What an output folder, or a single experts file, holds: a table for people and JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from humming_convert.errors import OutputError
from humming_convert.safetensors_header import read_header
from humming_convert.verify_output import read_manifest
from humming_loader.dtypes import tensor_nbytes
from humming_loader.entries import LayerEntry, Manifest, SublayerEntry
from humming_loader.manifest import METADATA_LAYERS, METADATA_VERSION, parse_layer_metadata
from humming_loader.parts import tp_size_of


def inspect_as_json(path: Path) -> dict[str, Any]:
    """The manifest of an output folder, or the layers that an experts file describes, as plain values."""
    if path.is_dir():
        return json.loads(json.dumps(asdict(read_manifest(path))))  # type: ignore[no-any-return]
    layers, version = _layers_of_file(path)
    document = {"file": path.name, "producer": {"name": "humming-convert", "version": version}}
    return document | {"layers": {name: json.loads(json.dumps(asdict(entry))) for name, entry in layers.items()}}


def inspect_as_text(path: Path) -> str:
    """The same as a table: one line a packed tensor, sizes in MB."""
    if not path.is_dir():
        layers, version = _layers_of_file(path)
        return "\n".join(
            [f"{path.name}: {_count(len(layers), 'MoE layer')}, humming-convert {version}", *_table(layers)]
        )
    manifest = read_manifest(path)
    return "\n".join([*_head(manifest), *_table(manifest.layers)])


def _layers_of_file(path: Path) -> tuple[dict[str, LayerEntry], str]:
    if not path.is_file():
        found = "not a regular file" if path.exists() else "nothing"
        raise OutputError(f"{path}: expected an output folder or a .safetensors file, found {found}")
    metadata = read_header(path, path.name).metadata
    if METADATA_LAYERS not in metadata:
        raise OutputError(f"{path}: expected an experts file of humming-convert, found a file without its metadata")
    return parse_layer_metadata(metadata), metadata.get(METADATA_VERSION, "unknown")


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _head(manifest: Manifest) -> list[str]:
    target = manifest.target
    cuda = ".".join(str(number) for number in target.cuda)
    passed = manifest.passthrough
    tp_size = tp_size_of(manifest.layers)
    ranks = [f"ranks        each of tensor parallelism {tp_size} for itself"] if tp_size > 1 else []
    return [
        f"source       {manifest.source.name} ({_count(len(manifest.source.files), 'file')})",
        f"target       sm{target.sm}, CUDA {cuda}, humming-kernels {manifest.humming_version}",
        f"activations  {manifest.activation}, parameters {manifest.param_dtype}",
        *ranks,
        f"made by      {manifest.producer.name} {manifest.producer.version} on {manifest.created}",
        f"passed on    {_count(passed.tensors, 'tensor')}, {passed.bytes / 1e6:.2f} MB in "
        f"{_count(len(passed.files), 'file')}",
        "",
    ]


def _table(layers: Mapping[str, LayerEntry]) -> list[str]:
    lines = [f"{'packed tensor':<54} {'dtype':<8} {'shape':<22} {'MB':>9}  weight as"]
    for name, layer in layers.items():
        lines.append(
            f"{name}  ({layer.family}, {layer.format}, {layer.num_experts} experts, "
            f"hidden {layer.hidden_size}, intermediate {_intermediate(layer)}, gate/up {layer.gate_up})"
        )
        for key, sublayer in layer.sublayers.items():
            lines += _rows(key, sublayer)
    return lines


def _intermediate(layer: LayerEntry) -> str:
    part = layer.tensor_parallel
    if part is None:
        return str(layer.intermediate_size)
    text = f"{part.begin} to {part.end} of {part.intermediate_size}"
    return text if part.end - part.begin == layer.intermediate_size else f"{text}, made up to {layer.intermediate_size}"


def _rows(key: str, sublayer: SublayerEntry) -> list[str]:
    rows = []
    for name, tensor in sublayer.tensors.items():
        shape = "x".join(str(extent) for extent in tensor.shape)
        size = tensor_nbytes(tensor.dtype, tensor.shape, tensor.name) / 1e6
        kind = str(sublayer.weight_schema.get("b_dtype", "")) if name == "weight" else ""
        rows.append(f"{'  ' + key + '_' + name:<54} {tensor.dtype:<8} {shape:<22} {size:>9.3f}  {kind}".rstrip())
    return rows
