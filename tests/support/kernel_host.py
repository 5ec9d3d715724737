"""A serving host for kernels that needs neither a GPU nor CUDA: Humming's own compiler class over a made-up toolkit."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from humming_convert.host.foreign import Foreign
from humming_convert.host.target import import_humming
from humming_loader import kernel_entries, kernels
from humming_loader.entries import FileEntry, Producer, TargetEntry
from humming_loader.kernel_entries import KERNELS_FOLDER, KERNELS_MANIFEST, Identity, KernelEntry, KernelsManifest
from humming_loader.toolchain import Toolchain

BUILD = "cuda_13.0.r13.0/compiler.36424714_0"
SOURCE = '#define A 1\n#include <humming/kernel.cuh>\nextern "C" __constant__ int VALUE = 1;\n'
EXPRESSION = "humming<\n    1,\n    2>"
CUBIN = b"\x7fELF machine code of a kernel"


class Host:
    """What a test changes: files below `include`, the compiler's `library`, its `version`; `compiled` are requests that
    reached Humming's own compiler.
    """

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        found = import_humming(("jit.compiler", "utils.nvrtc", "device"))
        self.compiler = found.jit_compiler.NVRTCCompiler
        self.include = folder / "include"
        self.library = folder / "libnvrtc.so.13"
        self.version = (13, 0)
        self.compiled: list[str] = []
        self.monkeypatch = monkeypatch
        self.header("humming/kernel.cuh", '#pragma once\n#include "parts/loader.cuh"\n#include <climits>\n')
        self.header("humming/parts/loader.cuh", "// loads\n#include <stddef.h>\n")
        self.header("humming/unrelated.cuh", "// never included\n")
        self.say_build(BUILD)
        monkeypatch.setenv("HUMMING_COMPILER", "nvrtc")
        monkeypatch.setattr(found.device.current_device, "_value", SimpleNamespace(is_ppu=False, sm_version=90))
        monkeypatch.setattr(found.utils_nvrtc, "get_nvrtc_library_path", lambda: str(self.library))
        monkeypatch.setattr(self.compiler, "_get_version", classmethod(lambda cls: self.version))
        monkeypatch.setattr(self.compiler, "_get_include_dirs", classmethod(lambda cls: [str(self.include)]))
        monkeypatch.setattr(found.jit_compiler.Compiler, "compile", classmethod(self._compile))

    def _compile(
        self,
        _: object,
        code: str,
        sm_version: str,
        kernel_expr: str | None,
        disable_fast_math: bool = False,
        postprocess_cubin: Callable[[str], None] | None = None,
    ) -> str:
        self.compiled.append(code)
        return "compiled here"

    def header(self, name: str, text: str) -> None:
        """Write one header."""
        path = self.include / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def say_build(self, build: str) -> None:
        """Let the compiler's library name its build, far from the end of the file."""
        self.library.write_bytes(b"\0" * 3000 + build.encode() + b"\0" * (1 << 20) + b"tail" * 50_000)

    def ask(self, **changes: Foreign) -> Foreign:
        """Humming's request for the kernel: the path that it gets."""
        arguments: dict[str, Any] = {"code": SOURCE, "sm_version": "90a", "kernel_expr": EXPRESSION}
        return self.compiler.compile(**(arguments | {"disable_fast_math": True, "postprocess_cubin": None} | changes))

    def identity(self) -> Identity:
        """What determines the kernel on this host as it is now."""
        return Toolchain().identity(SOURCE, EXPRESSION, "90a", True)


def ship(out: Path, identity: Identity, cubin: bytes = CUBIN) -> Path:
    """A converted checkpoint's folder with one kernel; the kernel's file."""
    folder = out / KERNELS_FOLDER
    folder.mkdir(parents=True)
    (out / "humming" / "manifest.json").write_text("{}")
    path = folder / "0123.cubin"
    path.write_bytes(cubin)
    file = FileEntry(f"{KERNELS_FOLDER}/0123.cubin", len(cubin), hashlib.sha256(cubin).hexdigest())
    (out / KERNELS_MANIFEST).write_text(kernel_entries.to_json(manifest_of(KernelEntry("gemm", file, identity))))
    return path


def manifest_of(*entries: KernelEntry) -> KernelsManifest:
    """A manifest of these kernels."""
    return KernelsManifest(
        format_version=kernel_entries.FORMAT_VERSION,
        producer=Producer("humming-convert", "0"),
        created="2026-12-01T00:00:00+00:00",
        target=TargetEntry(90, (13, 0), False),
        device={"name": "NVIDIA H200"},
        gemm_types=("indexed",),
        parallel={"tp": [1], "ep": []},
        kernels=entries,
    )


def offered(out: Path) -> tuple[kernels.Offer | None, list[str]]:
    """The offer of `out`, made anew, and the lines that it logs."""
    kernels.withdraw()
    lines: list[str] = []
    return kernels.offer(out, log=lines.append), lines
