"""Compile every kernel that serving a converted checkpoint can ask for, and put them beside its experts."""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from humming_convert.device_facts import find_facts
from humming_convert.errors import Problem, UnsupportedError
from humming_convert.files import TempFile, fsync_folder, os_error, read_regular
from humming_convert.progress import byte_progress
from humming_convert.target import Target
from humming_convert.verify_output import read_manifest
from humming_loader._version import __version__
from humming_loader.entries import FileEntry, Manifest, Producer
from humming_loader.host_layout import Host, check_host
from humming_loader.kernel_entries import (
    FORMAT_VERSION,
    KERNELS_FOLDER,
    KERNELS_MANIFEST,
    KernelEntry,
    KernelsManifest,
    to_json,
)
from humming_loader.manifest import PRODUCER
from humming_loader.parts import tp_size_of

if TYPE_CHECKING:
    from humming_convert.kernel_requests import Serving

_TOP_K_FIELDS = ("num_experts_per_tok", "experts_per_token", "moe_topk", "moe_top_k")


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelOptions:
    """What to compile for.

    The GPU by name or by a file of facts; ways of grouping (empty: vLLM's own choice); numbers of tensor-parallel
    (None: what it was packed for, mostly 1) and expert-parallel ranks; experts of a token (None: config.json's).
    `workers` compile at once.
    """

    device_name: str | None = None
    device_facts: Path | None = None
    gemm_types: tuple[str, ...] = ()
    tp_sizes: tuple[int, ...] | None = None
    ep_sizes: tuple[int, ...] = ()
    top_k: int | None = None
    workers: int = 1


@dataclass(frozen=True, slots=True)
class KernelReport:
    """What was compiled: how many kernels, their bytes, for which GPU, by which compiler, in how many seconds."""

    out: Path
    kernels: int
    nbytes: int
    device: str
    compiler: str
    gemm_types: tuple[str, ...]
    seconds: float
    notes: tuple[str, ...]

    def text(self) -> str:
        """A few lines for a terminal."""
        lines = [f"note: {note}" for note in self.notes]
        lines.append(
            f"{self.out}: {self.kernels} kernels ({self.nbytes / 1e6:.1f} MB) for {self.device}, "
            f"{', '.join(self.gemm_types)}, by {self.compiler}, {self.seconds:.0f} s"
        )
        return "\n".join(lines)


def build_kernels(out: Path, options: KernelOptions, target: Target | None = None) -> KernelReport:
    """Compile the kernels of the converted checkpoint `out` into its `humming/kernels/`, replacing those there.

    `target` must be what `out` was converted for (None: that). Needs no GPU; needs NVRTC of the target's CUDA version.
    Raises UnsupportedError for what cannot be compiled here, VerificationError for a damaged manifest, LoaderError for
    numbers of ranks that cannot be, OutputError when writing fails; then the kernels are what they were.
    """
    from humming_convert.host.kernels import KernelHost
    from humming_convert.kernel_requests import Serving, ask, rank_layers

    start = time.perf_counter()
    manifest = read_manifest(out)
    made_for = Target(manifest.target.sm, manifest.target.cuda, manifest.target.is_ppu)
    _check_target(manifest, made_for, target)
    facts = find_facts(made_for, options.device_name, options.device_facts)
    tp_sizes = (tp_size_of(manifest.layers),) if options.tp_sizes is None else options.tp_sizes
    serving = Serving(
        gemm_types=options.gemm_types or _usual_types(tp_sizes, options.ep_sizes),
        tp_sizes=tp_sizes,
        ep_sizes=options.ep_sizes,
        top_k=options.top_k or _top_k(out),
    )
    with KernelHost(made_for, facts) as host, byte_progress("compiling kernels") as progress:
        toolchain = host.toolchain()
        notes = ask(host, rank_layers(manifest, serving), serving)
        requests = host.requests()
        progress.total(sum(len(request.source) for request in requests))
        entries = []
        with _Staging(out) as staging:
            for request, identity, cubin in host.compile(requests, options.workers, toolchain):
                digest = hashlib.sha256(cubin).hexdigest()
                # Named by what determines it: the same text compiled for something else is another file.
                name = f"{hashlib.sha256(repr(identity).encode()).hexdigest()[:32]}.cubin"
                staging.write(name, cubin)
                entries.append(
                    KernelEntry(request.kind, FileEntry(f"{KERNELS_FOLDER}/{name}", len(cubin), digest), identity)
                )
                progress.advance(len(request.source))
            document = _manifest(manifest, facts, serving, entries)
            staging.commit(to_json(document))
    return KernelReport(
        out=out,
        kernels=len(entries),
        nbytes=sum(entry.file.size for entry in entries),
        device=str(facts["name"]),
        compiler=toolchain.name,
        gemm_types=serving.gemm_types,
        seconds=time.perf_counter() - start,
        notes=tuple(notes),
    )


def check_can_compile(target: Target) -> None:
    """Raises UnsupportedError unless kernels for `target`'s GPU, as far as it is known, can be compiled here."""
    from humming_convert.host.kernels import KernelHost

    with KernelHost(target, find_facts(target, None, None)) as host:
        host.toolchain()


def _check_target(manifest: Manifest, made_for: Target, asked: Target | None) -> None:
    """Raises HostMismatchError for another Humming than the layout's: its kernels could not read the weights."""
    if asked is not None and asked.sm != made_for.sm:
        expected = f"{made_for}, as the checkpoint was converted for"
        raise UnsupportedError([Problem("--target", expected, str(asked), f"convert for {asked} first")])
    check_host(manifest, Host(made_for.sm, version("humming-kernels"), made_for.cuda, made_for.is_ppu))


def parse_gemm_types(text: str) -> tuple[str, ...]:
    """`indexed,grouped` as names, each once; nothing: none. Raises UnsupportedError for a name that is none."""
    from humming_convert.kernel_requests import GEMM_TYPES

    names = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    unknown = [name for name in names if name not in GEMM_TYPES]
    if unknown:
        raise UnsupportedError([Problem("--gemm-type", f"of {', '.join(GEMM_TYPES)}", repr(unknown[0]))])
    return names


def _usual_types(tp_sizes: tuple[int, ...], ep_sizes: tuple[int, ...]) -> tuple[str, ...]:
    """What vLLM takes by itself: grouped with expert parallelism, indexed without."""
    return (("indexed",) if tp_sizes else ()) + (("grouped",) if ep_sizes else ())


def _top_k(out: Path) -> int | None:
    """The experts of a token by config.json, None where it does not say."""
    try:
        config = json.loads(read_regular(out / "config.json"))
    except (OSError, ValueError):
        return None
    for section in (config, config.get("text_config")) if isinstance(config, Mapping) else ():
        if isinstance(section, Mapping):
            for name in _TOP_K_FIELDS:
                if type(section.get(name)) is int:
                    return int(section[name])
    return None


def _manifest(
    manifest: Manifest, facts: Mapping[str, Any], serving: Serving, entries: list[KernelEntry]
) -> KernelsManifest:
    return KernelsManifest(
        format_version=FORMAT_VERSION,
        producer=Producer(PRODUCER, __version__),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        target=manifest.target,
        device=dict(facts),
        gemm_types=serving.gemm_types,
        parallel={"tp": list(serving.tp_sizes), "ep": list(serving.ep_sizes)},
        kernels=tuple(entries),
    )


class _Staging:
    """The kernels' folder in the making, beside the one that it will replace."""

    def __init__(self, out: Path) -> None:
        self._final = out / KERNELS_FOLDER
        self._folder = out.parent / f".{out.resolve().name}.kernels-partial"
        self._old = out.parent / f".{out.resolve().name}.kernels-old"

    def __enter__(self) -> _Staging:
        try:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder.mkdir()
        except OSError as error:
            raise os_error(self._folder, "make the folder", error) from error
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def write(self, name: str, data: bytes) -> None:
        """One file, flushed to the disk. Raises OutputError."""
        file = TempFile(self._folder / name)
        try:
            file.write_at(memoryview(data), 0)
            file.commit()
        finally:
            file.abort()

    def commit(self, manifest: str) -> None:
        """Write the manifest last and put the folder in place. Raises OutputError."""
        self.write(Path(KERNELS_MANIFEST).name, manifest.encode())
        fsync_folder(self._folder)
        try:
            shutil.rmtree(self._old, ignore_errors=True)
            if self._final.exists():
                self._final.rename(self._old)
            try:
                self._folder.rename(self._final)
            except OSError:
                if self._old.exists():
                    self._old.rename(self._final)
                raise
        except OSError as error:
            raise os_error(self._final, "move the kernels into place", error) from error
        fsync_folder(self._final.parent)
        shutil.rmtree(self._old, ignore_errors=True)
