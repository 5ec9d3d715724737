"""The manifest of a checkpoint's compiled kernels: what determines each, and which file holds it. Strict, versioned."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from humming_loader.checkpoint import FOLDER
from humming_loader.entries import FileEntry, Producer, TargetEntry
from humming_loader.errors import ManifestError
from humming_loader.fields import Fields, load_object
from humming_loader.manifest import PRODUCER

FORMAT_VERSION = 1
KERNELS_FOLDER = f"{FOLDER}/kernels"
KERNELS_MANIFEST = f"{KERNELS_FOLDER}/manifest.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Everything that a kernel's machine code depends on; equal identities, equal code.

    `source`: SHA-256 of the text; `expression`: the template instance that is compiled; `flags`: the compiler's, but
    for include folders; `headers`: digest of `Headers`; `arch`: `90a`; `compiler`: name, version and build; `humming`:
    its version; `tools`: SHA-256 over the sources of what runs the compiler and edits its output.
    """

    source: str
    expression: str
    flags: tuple[str, ...]
    headers: str
    arch: str
    compiler: str
    humming: str
    tools: str

    def differences(self, here: Identity) -> dict[str, tuple[Any, Any]]:
        """The fields in which `here` is another, each with both values."""
        pairs = {field.name: (getattr(self, field.name), getattr(here, field.name)) for field in fields(self)}
        return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


@dataclass(frozen=True, slots=True)
class KernelEntry:
    """One compiled kernel: what it is (`gemm` or `process_input`), its file, and what determines it."""

    kind: str
    file: FileEntry
    identity: Identity


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelsManifest:
    """All kernels of a checkpoint. `device`: the facts about the GPU that Humming chose by; `parallel`: the numbers of
    ranks (`tp`, `ep`) and `gemm_types` the kinds of grouping that they are for; `created`: UTC in ISO 8601.
    """

    format_version: int
    producer: Producer
    created: str
    target: TargetEntry
    device: Mapping[str, Any]
    gemm_types: tuple[str, ...]
    parallel: Mapping[str, Any]
    kernels: tuple[KernelEntry, ...]

    def files(self) -> tuple[str, ...]:
        """Names of all files, the manifest's included, relative to the output folder."""
        return (KERNELS_MANIFEST, *(kernel.file.name for kernel in self.kernels))


def to_json(manifest: KernelsManifest) -> str:
    """The manifest's text."""
    return json.dumps(asdict(manifest), indent=1, allow_nan=False) + "\n"


def from_json(text: str | bytes) -> KernelsManifest:
    """The manifest in `text`. Raises ManifestError, naming the field, for what `to_json` would not write."""
    outer = Fields(load_object(text, KERNELS_MANIFEST), "")
    version = outer.count("format_version")
    if version != FORMAT_VERSION:
        raise ManifestError("format_version", f"{FORMAT_VERSION}, the one this version reads", str(version))
    producer = Fields(outer.take("producer"), "producer")
    target = Fields(outer.take("target"), "target")
    cuda = target.counts("cuda")
    if len(cuda) != 2:
        raise ManifestError("target.cuda", "two integers", str(list(cuda)))
    manifest = KernelsManifest(
        format_version=version,
        producer=Producer(producer.choice("name", PRODUCER), producer.text("version")),
        created=outer.text("created"),
        target=TargetEntry(target.count("sm", 1), (cuda[0], cuda[1]), target.flag("is_ppu")),
        device=outer.plain("device"),
        gemm_types=outer.sequence("gemm_types", _text),
        parallel=outer.plain("parallel"),
        kernels=outer.sequence("kernels", _kernel),
    )
    for group in (producer, target, outer):
        group.done()
    return manifest


def _text(value: object, where: str) -> str:
    if not isinstance(value, str):
        raise ManifestError(where, "a string", repr(value)[:80])
    return value


def _kernel(value: object, where: str) -> KernelEntry:
    outer = Fields(value, where)
    file = Fields(outer.take("file"), f"{where}.file")
    identity = Fields(outer.take("identity"), f"{where}.identity")
    entry = KernelEntry(
        kind=outer.choice("kind", "gemm", "process_input"),
        file=FileEntry(file.file("name"), file.count("size", 1), file.sha256("sha256")),
        identity=Identity(
            source=identity.sha256("source"),
            expression=identity.text("expression"),
            flags=identity.sequence("flags", _text),
            headers=identity.sha256("headers"),
            arch=identity.text("arch"),
            compiler=identity.text("compiler"),
            humming=identity.text("humming"),
            tools=identity.sha256("tools"),
        ),
    )
    if not entry.file.name.startswith(f"{KERNELS_FOLDER}/"):
        raise ManifestError(f"{where}.file.name", f"a file in {KERNELS_FOLDER}", entry.file.name)
    for group in (file, identity, outer):
        group.done()
    return entry
