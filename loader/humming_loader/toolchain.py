"""How the installed Humming compiles kernels on this host, as far as it determines them. Imports humming when asked."""

from __future__ import annotations

import hashlib
import importlib
import re
import threading
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from humming_loader.errors import KernelError
from humming_loader.headers import Headers
from humming_loader.kernel_entries import Identity

# The text by which NVIDIA's own tools name the compiler they were built with; every cubin repeats it in a note.
_BUILD = re.compile(rb"cuda_\d+\.\d+\.r\d+\.\d+/compiler\.\d+_\d+")
_BLOCK = 1 << 20
_OVERLAP = 128
# What stands between Humming's source text and the file that it loads, beside the compiler.
_TOOLS = ("nvrtc_compile.cpp", "patch_cubin.cpp")


class Toolchain:
    """Humming's NVRTC compiler with its flags and headers.

    The constructor raises KernelError where Humming finds no NVRTC, or is not as the tested versions are.
    """

    def __init__(self) -> None:
        try:
            self.compiler: Any = importlib.import_module("humming.jit.compiler").NVRTCCompiler
            chosen = importlib.import_module("humming.jit.runtime").KernelRuntime._get_compiler()
            nvrtc = importlib.import_module("humming.utils.nvrtc")
            library = Path(nvrtc.get_nvrtc_library_path())
            self.version: tuple[int, int] = tuple(self.compiler._get_version())
            given = dict(self.compiler._STD_HEADER_SHIMS)
            roots = [Path(folder) for folder in self.compiler._get_include_dirs()]
        except (ImportError, AttributeError, RuntimeError, OSError) as error:
            raise KernelError("kernels", "Humming's NVRTC compiler", str(error)) from error
        if chosen is not self.compiler:
            raise KernelError("kernels", "NVRTC as Humming's compiler", chosen.__name__)
        self.name = f"nvrtc {self.version[0]}.{self.version[1]} {build_of(library)}"
        self.humming = version("humming-kernels")
        self.headers = Headers(roots, given)
        self.tools = _tools(Path(importlib.import_module("humming").__path__[0]) / "csrc")
        self._digests: dict[tuple[str, ...], str] = {}
        self._lock = threading.Lock()

    def identity(self, source: str, expression: str | None, arch: str, disable_fast_math: bool) -> Identity:
        """The identity of the kernel that Humming would compile here. Raises KernelError or OSError."""
        return Identity(
            source=hashlib.sha256(source.encode()).hexdigest(),
            expression=" ".join((expression or "").split()),
            flags=without_folders(self.compiler.get_flags(arch, disable_fast_math)),
            headers=self._headers(source),
            arch=arch,
            compiler=self.name,
            humming=self.humming,
            tools=self.tools,
        )

    def _headers(self, source: str) -> str:
        lines = tuple(line for line in source.splitlines() if "include" in line)
        with self._lock:  # Humming asks for many kernels at once, and most include the same
            if lines not in self._digests:
                self._digests[lines] = self.headers.digest("\n".join(lines))
            return self._digests[lines]


def without_folders(flags: Sequence[str]) -> tuple[str, ...]:
    """Compiler flags without the include folders: what is in those is compared by content, in their order."""
    return tuple(flag for flag in flags if not flag.startswith("-I"))


def build_of(library: Path) -> str:
    """The build that a compiler's library says it is, or the SHA-256 of the file when it does not. Raises OSError."""
    with library.open("rb") as file:
        end = file.seek(0, 2)
        while end > 0:  # the text stands in the last fifth of more than 100 MB
            begin = max(0, end - _BLOCK)
            file.seek(begin)
            found = _BUILD.search(file.read(end - begin + _OVERLAP))
            if found:
                return found[0].decode()
            end = begin
        file.seek(0)
        return hashlib.file_digest(file, "sha256").hexdigest()


def _tools(folder: Path) -> str:
    digest = hashlib.sha256()
    for name in _TOOLS:
        path = folder / name
        text = path.read_bytes() if path.is_file() else b""
        digest.update(f"{name} {hashlib.sha256(text).hexdigest()}\n".encode())
    return digest.hexdigest()
