"""The manifest of a converted checkpoint: frozen, versioned and strict. Unknown keys are refused.

It is written last, so its presence says that the output is whole. Every experts file also carries its own
layers' entries, so that one file explains itself.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict

from humming_loader.dtypes import SAFETENSORS_DTYPES
from humming_loader.entries import (
    FileEntry,
    LayerEntry,
    Manifest,
    Passthrough,
    Producer,
    Source,
    SourceFileEntry,
    SublayerEntry,
    TargetEntry,
    TensorEntry,
    TensorParallelEntry,
)
from humming_loader.errors import ManifestError
from humming_loader.fields import Fields, load_object
from humming_loader.fingerprint import FLAGS, Fingerprint
from humming_loader.parts import check_parts, part_name

__all__ = [
    "FileEntry",
    "LayerEntry",
    "Manifest",
    "Passthrough",
    "Producer",
    "Source",
    "SourceFileEntry",
    "SublayerEntry",
    "TargetEntry",
    "TensorEntry",
    "TensorParallelEntry",
    "from_json",
    "layer_metadata",
    "parse_layer_metadata",
    "stored_name",
    "to_json",
]

FORMAT_VERSION = 1
PRODUCER = "humming-convert"
MANIFEST_FILE = "humming/manifest.json"
METADATA_LAYERS = "humming_layers"
METADATA_VERSION = "humming_convert"
SUBLAYERS = ("w13", "w2")
TENSOR_NAMES = (
    "weight",
    "weight_scale",
    "zero_point",
    "weight_scale_2",
    "bias",
    "input_scale",
    "input_scale_2",
)


def stored_name(layer_name: str, sublayer: str, tensor: str) -> str:
    """The name of a packed tensor in its file: `model.layers.0.mlp.experts.w13_weight`."""
    return f"{layer_name}.{sublayer}_{tensor}"


def to_json(manifest: Manifest) -> str:
    """The manifest's text."""
    return json.dumps(asdict(manifest), indent=1, allow_nan=False) + "\n"


def from_json(text: str | bytes) -> Manifest:
    """The manifest in `text`. Raises ManifestError, naming the field, for what `to_json` would not write."""
    fields = Fields(load_object(text, "manifest"), "")
    version = fields.count("format_version")
    if version != FORMAT_VERSION:
        raise ManifestError("format_version", f"{FORMAT_VERSION}, the one this version reads", str(version))
    manifest = Manifest(
        format_version=version,
        producer=_producer(fields.take("producer")),
        created=fields.text("created"),
        source=_source(fields.take("source")),
        target=_target(fields.take("target")),
        humming_version=fields.text("humming_version"),
        param_dtype=fields.choice("param_dtype", "bfloat16", "float16"),
        activation=fields.text("activation"),
        layers=fields.mapping("layers", _layer),
        passthrough=_passthrough(fields.take("passthrough")),
        side_files=fields.sequence("side_files", _file),
    )
    fields.done()
    check_parts(manifest.layers)
    return manifest


def layer_metadata(layers: Mapping[str, LayerEntry], version: str) -> dict[str, str]:
    """The `__metadata__` of the experts file that holds `layers`; `version` is the converter's."""
    text = json.dumps({name: asdict(entry) for name, entry in layers.items()}, separators=(",", ":"))
    return {"format": "pt", METADATA_VERSION: version, METADATA_LAYERS: text}


def parse_layer_metadata(metadata: Mapping[str, str]) -> dict[str, LayerEntry]:
    """The layers that an experts file says it holds. Raises ManifestError when it does not, or wrongly."""
    text = metadata.get(METADATA_LAYERS)
    if text is None:
        raise ManifestError(
            "__metadata__", f"the key {METADATA_LAYERS}", ", ".join(sorted(metadata)) or "nothing"
        )
    entries = load_object(text, METADATA_LAYERS)
    return {name: _layer(entry, f"{METADATA_LAYERS}[{name!r}]", name) for name, entry in entries.items()}


def _producer(value: object) -> Producer:
    fields = Fields(value, "producer")
    producer = Producer(fields.choice("name", PRODUCER), fields.text("version"))
    fields.done()
    return producer


def _file(value: object, where: str) -> FileEntry:
    fields = Fields(value, where)
    entry = FileEntry(fields.file("name"), fields.count("size"), fields.sha256("sha256"))
    fields.done()
    return entry


def _source_file(value: object, where: str) -> SourceFileEntry:
    fields = Fields(value, where)
    digest = fields.optional("sha256", fields.sha256)
    entry = SourceFileEntry(fields.file("name"), fields.count("size"), digest)
    fields.done()
    return entry


def _source(value: object) -> Source:
    fields = Fields(value, "source")
    revision = fields.optional("revision", fields.text)
    source = Source(fields.text("name"), revision, fields.sequence("files", _source_file))
    fields.done()
    return source


def _target(value: object) -> TargetEntry:
    fields = Fields(value, "target")
    cuda = fields.counts("cuda")
    if len(cuda) != 2:
        raise ManifestError("target.cuda", "two integers", str(list(cuda)))
    target = TargetEntry(fields.count("sm", 1), (cuda[0], cuda[1]), fields.flag("is_ppu"))
    fields.done()
    return target


def _passthrough(value: object) -> Passthrough:
    fields = Fields(value, "passthrough")
    entry = Passthrough(fields.sequence("files", _file), fields.count("tensors"), fields.count("bytes"))
    fields.done()
    return entry


def _layer(value: object, where: str, name: str) -> LayerEntry:
    fields = Fields(value, where)
    experts = fields.count("num_experts", 1)

    def sublayer(item: object, place: str, key: str) -> SublayerEntry:
        return _sublayer(item, place, f"{name}.{key}", experts)

    entry = LayerEntry(
        family=fields.text("family"),
        num_experts=experts,
        hidden_size=fields.count("hidden_size", 1),
        intermediate_size=fields.count("intermediate_size", 1),
        activation_function=fields.text("activation_function"),
        is_gated=fields.flag("is_gated"),
        gate_up=fields.choice("gate_up", "split", "interleaved"),
        has_bias=fields.flag("has_bias"),
        format=fields.text("format"),
        sublayers=fields.mapping("sublayers", sublayer),
        tensor_parallel=fields.optional("tensor_parallel", lambda key: _part(fields.take(key), fields.path(key), name)),
    )
    fields.done()
    if tuple(sorted(entry.sublayers)) != SUBLAYERS:
        raise ManifestError(
            f"{where}.sublayers", " and ".join(SUBLAYERS), ", ".join(entry.sublayers) or "nothing"
        )
    return entry


def _part(value: object, where: str, name: str) -> TensorParallelEntry:
    fields = Fields(value, where)
    part = TensorParallelEntry(
        layer=fields.text("layer"),
        rank=fields.count("rank"),
        size=fields.count("size", 2),
        intermediate_size=fields.count("intermediate_size", 1),
        begin=fields.count("begin"),
        end=fields.count("end"),
    )
    fields.done()
    if name != part_name(part.layer, part.rank, part.size):
        raise ManifestError(where, f"that of {name}", f"rank {part.rank} of {part.size} of {part.layer}")
    return part


def _sublayer(value: object, where: str, prefix: str, experts: int) -> SublayerEntry:
    fields = Fields(value, where)

    def tensor(item: object, place: str, key: str) -> TensorEntry:
        return _tensor(item, place, key, f"{prefix}_{key}")

    entry = SublayerEntry(
        tensors=fields.mapping("tensors", tensor),
        shape_n=fields.count("shape_n", 1),
        shape_k=fields.count("shape_k", 1),
        shape_n_stacks=fields.counts("shape_n_stacks"),
        source_schema=fields.plain("source_schema"),
        source_input_schema=fields.optional("source_input_schema", fields.plain),
        weight_schema=fields.plain("weight_schema"),
        input_schema=fields.optional("input_schema", fields.plain),
        layer_config=fields.text("layer_config"),
        fingerprint=_fingerprint(fields.take("fingerprint"), fields.path("fingerprint")),
        slicing=fields.plain("slicing"),
    )
    fields.done()
    if sum(entry.shape_n_stacks) != entry.shape_n:
        raise ManifestError(
            f"{where}.shape_n_stacks", f"a sum of {entry.shape_n}", str(list(entry.shape_n_stacks))
        )
    weight = entry.tensors.get("weight")
    if weight is None or weight.shape[:1] != (experts,):
        found = "none" if weight is None else f"shape {list(weight.shape)}"
        raise ManifestError(f"{where}.tensors", f"a weight with {experts} experts on axis 0", found)
    return entry


def _tensor(value: object, where: str, key: str, name: str) -> TensorEntry:
    if key not in TENSOR_NAMES:
        raise ManifestError(where, "one of " + ", ".join(TENSOR_NAMES), key)
    fields = Fields(value, where)
    entry = TensorEntry(
        file=fields.file("file"),
        name=fields.choice("name", name),
        dtype=fields.choice("dtype", *SAFETENSORS_DTYPES),
        shape=fields.counts("shape"),
        sha256=fields.sha256("sha256"),
    )
    fields.done()
    return entry


def _fingerprint(value: object, where: str) -> Fingerprint:
    fields = Fields(value, where)
    flags = Fields(fields.take("flags"), f"{where}.flags")
    entry = Fingerprint({name: flags.flag(name) for name in FLAGS}, fields.sha256("probe"))
    flags.done()
    fields.done()
    return entry
