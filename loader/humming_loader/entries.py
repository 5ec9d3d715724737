"""What a manifest holds, as frozen data. `manifest` reads and writes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from humming_loader.fingerprint import Fingerprint


@dataclass(frozen=True, slots=True)
class FileEntry:
    """A file of the output: its path in the folder, bytes, and sha256."""

    name: str
    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class SourceFileEntry:
    """A file of the source; `sha256` is None when the converter was told not to hash the source."""

    name: str
    size: int
    sha256: str | None


@dataclass(frozen=True, slots=True)
class Source:
    """Where the checkpoint came from."""

    name: str
    revision: str | None
    files: tuple[SourceFileEntry, ...]


@dataclass(frozen=True, slots=True)
class TargetEntry:
    """What the bytes were made for: sm (90), CUDA compiler version (13, 0), PPU or not."""

    sm: int
    cuda: tuple[int, int]
    is_ppu: bool


@dataclass(frozen=True, slots=True)
class Producer:
    """The program that wrote the output."""

    name: str
    version: str


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One packed tensor: file (relative to the output), stored name, dtype code, shape, sha256."""

    file: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SublayerEntry:
    """w13 or w2 of a layer. `shape_n`, `shape_k` are one expert's logical weight, before padding.

    `source_schema` and `source_input_schema` say what the checkpoint had, `weight_schema` and `input_schema`
    what the packed tensors are (plain values that Humming's `from_config` takes); None: 16-bit activations.
    """

    tensors: Mapping[str, TensorEntry]
    shape_n: int
    shape_k: int
    shape_n_stacks: tuple[int, ...]
    source_schema: Mapping[str, Any]
    source_input_schema: Mapping[str, Any] | None
    weight_schema: Mapping[str, Any]
    input_schema: Mapping[str, Any] | None
    layer_config: str
    fingerprint: Fingerprint
    slicing: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorParallelEntry:
    """Which part of a layer was packed for one tensor-parallel rank, cut before it was converted.

    `layer` is vLLM's name of the whole layer, `intermediate_size` the whole one, of which the rank has the values from
    `begin` to `end`. Where its own intermediate size is larger, the rest are weights of zero.
    """

    layer: str
    rank: int
    size: int
    intermediate_size: int
    begin: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerEntry:
    """One MoE layer; its key in the manifest is vLLM's layer name.

    With `tensor_parallel` it is one rank's part, `intermediate_size` the rank's own, and the key `parts.part_name`.
    """

    family: str
    num_experts: int
    hidden_size: int
    intermediate_size: int
    activation_function: str
    is_gated: bool
    gate_up: str
    has_bias: bool
    format: str
    sublayers: Mapping[str, SublayerEntry]
    tensor_parallel: TensorParallelEntry | None = None


@dataclass(frozen=True, slots=True)
class Passthrough:
    """What was not converted: the files it is in, how many tensors, and the bytes of those tensors."""

    files: tuple[FileEntry, ...]
    tensors: int
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The whole output. `created` is UTC in ISO 8601."""

    format_version: int
    producer: Producer
    created: str
    source: Source
    target: TargetEntry
    humming_version: str
    param_dtype: str
    activation: str
    layers: Mapping[str, LayerEntry]
    passthrough: Passthrough
    side_files: tuple[FileEntry, ...]

    def experts_files(self) -> tuple[str, ...]:
        """The experts files, each once, in the order of the layers."""
        return tuple(
            dict.fromkeys(
                tensor.file
                for layer in self.layers.values()
                for sublayer in layer.sublayers.values()
                for tensor in sublayer.tensors.values()
            )
        )
