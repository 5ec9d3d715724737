"""One digest over every header that a CUDA source can include, whatever machine the headers lie on.

The preprocessor's conditions are not evaluated: a file counts when any `#include` could reach it. So a digest may
differ where the code would not, never the other way round. Files are known by include folder (its place in the order of
search) and their name below it; absolute paths and file times do not enter.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from humming_loader.errors import KernelError

_INCLUDE = re.compile(rb"^[ \t]*#[ \t]*include(?:_next)?\b[ \t]*(.*)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class _Include:
    """`name` as it is written; quoted: looked for beside the including file too."""

    name: str
    is_quoted: bool


@dataclass(frozen=True, slots=True)
class _File:
    """A text that was read: where it is known to be, its folder (None: in memory only), digest and includes."""

    label: str
    folder: Path | None
    sha256: str
    includes: tuple[_Include, ...]


class Headers:
    """The headers below `roots` (include folders in order) and `given` (text by name, found before any file)."""

    def __init__(self, roots: Sequence[Path], given: Mapping[str, str]) -> None:
        self._roots = tuple(Path(os.path.normpath(root)) for root in roots)
        self._given = {name: _scan(f"given/{name}", None, text.encode()) for name, text in given.items()}
        self._read: dict[Path, _File] = {}

    def digest(self, source: str) -> str:
        """SHA-256 over name and content of all that `source` can include, and the names that are nowhere.

        Raises KernelError for an include whose name is a macro, OSError for a header that cannot be read.
        """
        lines = sorted(f"{label} {sha256}\n" for label, sha256 in self._closure(source).items())
        return hashlib.sha256("".join(lines).encode()).hexdigest()

    def files(self, source: str) -> tuple[Path, ...]:
        """The files that `source` can include. Raises as `digest` does."""
        reached = self._closure(source)
        return tuple(path for path, file in self._read.items() if file.label in reached)

    def _closure(self, source: str) -> dict[str, str]:
        reached: dict[str, str] = {}
        waiting = [_scan("source", None, source.encode())]
        while waiting:
            file = waiting.pop()
            for include in file.includes:
                found = list(self._find(include, file))
                if not found:
                    reached[f"absent/{include.name}"] = ""
                for header in found:
                    if header.label not in reached:
                        reached[header.label] = header.sha256
                        waiting.append(header)
        return reached

    def _find(self, include: _Include, includer: _File) -> Iterator[_File]:
        """Every text of that name: which of them is taken depends on more than the name."""
        if include.name in self._given:
            yield self._given[include.name]
        if include.is_quoted and includer.folder is not None:
            beside = Path(os.path.normpath(includer.folder / include.name))
            if beside.is_file():
                yield self._file(beside, f"{includer.label}: {include.name}")
        for root in self._roots:
            path = Path(os.path.normpath(root / include.name))
            if path.is_file():
                yield self._file(path, include.name)

    def _file(self, path: Path, spelt: str) -> _File:
        if path not in self._read:
            self._read[path] = _scan(self._label(path, spelt), path.parent, path.read_bytes())
        return self._read[path]

    def _label(self, path: Path, spelt: str) -> str:
        """The innermost root that holds `path` and the name below it."""
        inside = [number for number, root in enumerate(self._roots) if path.is_relative_to(root)]
        if not inside:
            return f"outside/{spelt}"
        number = max(inside, key=lambda one: len(self._roots[one].parts))
        return f"{number}/{path.relative_to(self._roots[number]).as_posix()}"


def _scan(label: str, folder: Path | None, text: bytes) -> _File:
    includes = tuple(_parsed(match[1].strip(), label) for match in _INCLUDE.finditer(text))
    return _File(label, folder, hashlib.sha256(text).hexdigest(), includes)


def _parsed(written: bytes, label: str) -> _Include:
    text = written.decode("utf-8", "surrogateescape")
    closing = {"<": ">", '"': '"'}.get(text[:1])
    if closing is None or closing not in text[1:]:
        raise KernelError(f"header {label}", "an include of a name", f"#include {text[:60]}")
    return _Include(text[1 : text.index(closing, 1)], text[0] == '"')
