"""Read one safetensors header, strictly: nothing in a file is believed before it is checked."""

from __future__ import annotations

import json
import math
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from humming_convert.errors import CheckpointError, Problem
from humming_loader.dtypes import SAFETENSORS_DTYPES

# The limit of the safetensors library itself.
MAX_HEADER_BYTES = 100_000_000
_ENTRY_KEYS = {"dtype", "shape", "data_offsets"}
_SURROGATE = re.compile("[\ud800-\udfff]")
_POSITION = attrgetter("offset", "nbytes")
_BITS: Mapping[str, int] = {code: info.bits for code, info in SAFETENSORS_DTYPES.items()}


class TensorHeader(NamedTuple):
    """One tensor: `offset` is absolute in `file` (a name in the checkpoint), `dtype` a safetensors code."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    offset: int
    nbytes: int


class SourceFile(NamedTuple):
    """One weight file as it was when its header was read; any later difference means that it changed.

    `ctime_ns` tells a change whose writer set the time of modification back.
    """

    name: str
    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int

    @property
    def is_remote(self) -> bool:
        """Whether the header came from elsewhere: there was no file yet whose state could be noted."""
        return self.inode < 0


@dataclass(frozen=True, slots=True)
class FileHeader:
    """All that one file says of itself; `tensors` are in the order of their bytes."""

    file: SourceFile
    tensors: tuple[TensorHeader, ...]
    metadata: dict[str, str]


def read_header(path: Path, name: str) -> FileHeader:
    """The header of the file at `path`, `name` in messages. Raises CheckpointError for the first fault."""
    state = require_regular(path, name)
    source = SourceFile(name, state.st_size, state.st_mtime_ns, state.st_ctime_ns, state.st_ino)
    with path.open("rb") as file:
        prefix = file.read(8)
        raw = file.read(header_length(prefix, source))
    return parse_header(prefix, raw, source)


def parse_header(prefix: bytes, raw: bytes, source: SourceFile) -> FileHeader:
    """The header of `source` from its first 8 bytes and the bytes after them. Raises CheckpointError."""
    name, text = source.name, header_length(prefix, source)
    if len(raw) != text:
        raise _fault(name, f"a header of {text} bytes", f"{len(raw)} bytes", "the file is truncated: fetch it again")
    entries = _parse_json(raw, name)
    metadata = _parse_metadata(entries.pop("__metadata__", {}), name)
    return FileHeader(source, _parse_entries(entries, name, 8 + text, source.size), metadata)


def refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An `object_pairs_hook` for json: a dict, or ValueError when a key occurs twice."""
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"key {key!r} occurs twice")
            seen.add(key)
    return found


def _fault(where: str, expected: str, found: str, hint: str = "") -> CheckpointError:
    return CheckpointError([Problem(where, expected, found, hint)])


def is_text(name: str) -> bool:
    """Whether a name can be written down: no NUL, and no half of a surrogate pair, which JSON may hold."""
    return "\0" not in name and (name.isascii() or not _SURROGATE.search(name))


def require_regular(path: Path, name: str) -> os.stat_result:
    """The state of the file. Raises CheckpointError for what is none, `name` in messages.

    Links are followed (the hub's cache is made of them), but what they lead to must be a plain file.
    """
    try:
        state = path.stat()
    except FileNotFoundError:
        if path.is_symlink():
            raise _fault(name, "a regular file", "a link to nothing") from None
        raise _fault(
            name, "a file", "none", "fetch the missing shard" if name.endswith(".safetensors") else ""
        ) from None
    except OSError as error:
        raise _fault(name, "a readable file", error.strerror or str(error)) from None
    if not stat.S_ISREG(state.st_mode):
        raise _fault(name, "a regular file", f"a {_kind(state.st_mode)}")
    return state


def _kind(mode: int) -> str:
    if stat.S_ISDIR(mode):
        return "folder"
    if stat.S_ISFIFO(mode):
        return "named pipe"
    if stat.S_ISSOCK(mode):
        return "socket"
    return "device"


def header_length(prefix: bytes, source: SourceFile) -> int:
    """Bytes of the JSON that follows the first 8 bytes. Raises CheckpointError for what no such file begins with."""
    name, size = source.name, source.size
    hint = "the file is truncated or is no safetensors file: fetch it again"
    if len(prefix) != 8:
        raise _fault(name, "an 8 byte header length", f"a file of {size} bytes", hint)
    length = int.from_bytes(prefix, "little")
    if length > MAX_HEADER_BYTES:
        raise _fault(name, f"a header of at most {MAX_HEADER_BYTES} bytes", f"{length} bytes", hint)
    if 8 + length > size:
        raise _fault(name, f"at least {8 + length} bytes, as its header length says", f"{size} bytes", hint)
    return length


def _parse_json(raw: bytes, name: str) -> dict[str, Any]:
    try:
        entries = json.loads(raw.decode("utf-8"), object_pairs_hook=refuse_duplicates)
    except RecursionError:
        raise _fault(name, "a JSON header of two levels", "one nested too deeply to read") from None
    except ValueError as error:
        # UnicodeDecodeError and JSONDecodeError are both ValueErrors.
        raise _fault(name, "a JSON header", f"one that cannot be read ({error})", "fetch the file again") from None
    if not isinstance(entries, dict):
        raise _fault(name, "a JSON object as header", f"a {type(entries).__name__}")
    return entries


def _parse_metadata(value: object, name: str) -> dict[str, str]:
    if isinstance(value, dict) and all(isinstance(item, str) for item in value.values()):
        return value
    raise _fault(name, "__metadata__ that maps text to text", f"{str(value)[:80]}")


def _parse_entries(entries: dict[str, Any], file: str, base: int, size: int) -> tuple[TensorHeader, ...]:
    tensors = [_parse_entry(name, entry, file, base) for name, entry in entries.items()]
    tensors.sort(key=_POSITION)
    position = base
    for tensor in tensors:
        if tensor.offset != position:
            fault = "overlaps the tensor before it" if tensor.offset < position else "leaves a gap before it"
            found = f"offset {tensor.offset - base}, which {fault}"
            raise _fault(f"{file}: tensor {tensor.name}", f"data at offset {position - base}", found)
        position += tensor.nbytes
    if position != size:
        is_short = position > size
        hint = "the file is truncated: fetch it again" if is_short else "the file has bytes that no tensor owns"
        raise _fault(file, f"{position} bytes, as its header says", f"{size} bytes", hint)
    return tuple(tensors)


def _parse_entry(name: str, entry: dict[str, Any], file: str, base: int) -> TensorHeader:
    """One entry, checked in as few operations as possible: a checkpoint may have 100,000 of them."""
    try:
        dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        size = _BITS[dtype]
        # `type(x) is int` and not isinstance: JSON's true would pass for 1.
        is_sound = type(shape) is list and type(begin) is int and type(end) is int and len(entry) == 3
        for extent in shape:
            is_sound = is_sound and type(extent) is int and extent >= 0
            size *= extent
        is_sound = is_sound and is_text(name)
        if not is_sound or not 0 <= begin <= end or size != (end - begin) * 8:
            raise _explain(name, entry, file)
    except (KeyError, TypeError, ValueError):
        raise _explain(name, entry, file) from None
    return TensorHeader(name, dtype, tuple(shape), file, base + begin, end - begin)


def _explain(name: str, entry: object, file: str) -> CheckpointError:
    """What is wrong with an entry that is not sound."""
    where = f"{file}: tensor {name}"
    if not is_text(name):
        return _fault(file, "names of tensors", f"{name[:80]!a}")
    if not isinstance(entry, dict) or entry.keys() != _ENTRY_KEYS:
        found = sorted(entry) if isinstance(entry, dict) else type(entry).__name__
        return _fault(where, "dtype, shape and data_offsets", f"{found}")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _BITS:
        return _fault(where, "a dtype code of safetensors", f"{str(dtype)[:80]!r}")
    if not _are_whole(shape):
        return _fault(where, "a shape of whole numbers", f"{str(shape)[:80]}")
    if not _are_whole(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        return _fault(where, "data_offsets [begin, end]", f"{str(offsets)[:80]}")
    expected = f"{math.prod(shape) * _BITS[dtype] // 8} bytes for {dtype} {shape}"
    return _fault(where, expected, f"{offsets[1] - offsets[0]} bytes")


def _are_whole(values: object) -> bool:
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)
