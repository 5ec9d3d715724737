"""Copy what is not converted: tensors byte for byte into new shards, and the files beside the weights.

Nothing here knows what a tensor means; bytes go through a few bounded buffers and are hashed on the way.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Protocol

from huggingface_hub import split_state_dict_into_shards_factory

from humming_convert.errors import CheckpointError, Problem
from humming_convert.files import BackgroundHash, TempFile, open_regular, os_error
from humming_convert.writer import TensorSpec, header_bytes, storage_order
from humming_loader.entries import FileEntry, Passthrough

BUFFER_BYTES = 8 << 20
_BUFFERS = 3

FILE_PATTERN = "model{suffix}.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_NOT_COPIED_ENDINGS = (".safetensors", ".index.json", ".bin", ".pt", ".pth", ".ckpt", ".gguf")

Progress = Callable[[int], None]
Read = Callable[[memoryview, int], None]


class Reader(Protocol):
    """Bytes of a source tensor from `start` on into `buffer`: `humming_convert.source.Payload`."""

    def read_into(self, name: str, buffer: memoryview, start: int = 0) -> None: ...


@dataclass(frozen=True, slots=True)
class Shard:
    """A file to write and the tensors in it."""

    file: str
    names: tuple[str, ...]


def plan_shards(sizes: Iterable[tuple[str, int]], max_shard_bytes: int) -> tuple[Shard, ...]:
    """Names with their bytes, in order, split by huggingface_hub's own planner so that no shard exceeds the limit.

    A tensor larger than that gets a shard of its own. One shard is called `model.safetensors`, several
    `model-00001-of-00003.safetensors`; no names give no shards.
    """
    given = dict(sizes)
    if not given:
        return ()
    plan = split_state_dict_into_shards_factory(
        given,
        get_storage_size=lambda nbytes: nbytes,
        filename_pattern=FILE_PATTERN,
        max_shard_size=max_shard_bytes,
    )
    return tuple(Shard(file, tuple(names)) for file, names in plan.filename_to_tensors.items())


def write_passthrough(
    tensors: Sequence[TensorSpec],
    reader: Reader,
    folder: Path,
    *,
    max_shard_bytes: int,
    progress: Progress | None = None,
) -> Passthrough:
    """Copy `tensors` into shards in `folder`, with an index; what was written.

    A single shard has an index too: vLLM downloads only the files that one names, and all others without one.
    `progress` is told the bytes of every piece. Raises OutputError; `reader` raises CheckpointError.
    """
    specs = {spec.name: spec for spec in tensors}
    shards = plan_shards(((spec.name, spec.nbytes) for spec in tensors), max_shard_bytes)
    total = sum(spec.nbytes for spec in tensors)
    files = [_write_shard(shard, specs, reader, folder, progress) for shard in shards]
    if shards:
        weight_map = {name: shard.file for shard in shards for name in shard.names}
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        text = json.dumps(index, indent=2) + "\n"
        files.append(_write_bytes(folder, INDEX_FILE, text.encode()))
    return Passthrough(tuple(files), len(tensors), total)


def is_side_file(name: str) -> bool:
    """Whether a file of the source is copied as it is: no weights, no index, no config.json."""
    lower = PurePosixPath(name).name.lower()
    return lower != "config.json" and not lower.endswith(_NOT_COPIED_ENDINGS)


def copy_side_files(
    root: Path, names: Iterable[str], folder: Path, progress: Progress | None = None
) -> tuple[FileEntry, ...]:
    """Copy those of `names` that are side files from `root` into `folder`; each with its sha256.

    Raises CheckpointError for a source that is no regular file or changes, OutputError when writing fails.
    """
    return tuple(_copy_file(root / name, folder, name, progress) for name in names if is_side_file(name))


def _write_shard(
    shard: Shard, specs: Mapping[str, TensorSpec], reader: Reader, folder: Path, progress: Progress | None
) -> FileEntry:
    ordered = storage_order([specs[name] for name in shard.names])
    header = header_bytes(ordered, {"format": "pt"})
    header = header.ljust(-(-len(header) // 8) * 8)
    with _Copy(folder, shard.file, progress) as copy:
        copy.append(len(header).to_bytes(8, "little") + header)
        for spec in ordered:
            copy.stream(spec.nbytes, partial(reader.read_into, spec.name))
        return copy.finish()


def _write_bytes(folder: Path, name: str, data: bytes) -> FileEntry:
    with _Copy(folder, name, None) as copy:
        copy.append(data)
        return copy.finish()


def _copy_file(source: Path, folder: Path, name: str, progress: Progress | None) -> FileEntry:
    try:
        opened = open_regular(source)
    except OSError as error:
        raise CheckpointError([Problem(str(source), "a readable file", error.strerror or str(error))]) from error
    try:
        with opened, _Copy(folder, name, progress) as copy:
            size = os.fstat(opened.fileno()).st_size

            def read(buffer: memoryview, start: int) -> None:
                got = opened.readinto(buffer)
                if got != buffer.nbytes:
                    found = f"{start + (got or 0)}, so it changed while it was copied"
                    raise CheckpointError([Problem(str(source), f"{size} bytes", found)])

            copy.stream(size, read)
            return copy.finish()
    except OSError as error:
        raise os_error(source, "copy the file", error) from error


class _Copy:
    """One file written front to back through a ring of buffers, each reused once it is hashed."""

    def __init__(self, folder: Path, name: str, progress: Progress | None) -> None:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        self._name = name
        self._file = TempFile(path)
        self._digest = hashlib.sha256()
        self._hash = BackgroundHash(_BUFFERS)
        self._position = 0
        self._ring: list[tuple[memoryview, Future[None] | None]] = []
        self._progress = progress

    def append(self, data: bytes) -> None:
        """A small piece."""
        self._put(memoryview(data))

    def stream(self, nbytes: int, read: Read) -> None:
        """`nbytes` in pieces that `read(buffer, start)` fills."""
        for start in range(0, nbytes, BUFFER_BYTES):
            buffer = self._free_buffer()
            piece = buffer[: min(BUFFER_BYTES, nbytes - start)]
            read(piece, start)
            self._ring.append((buffer, self._put(piece)))
            if self._progress is not None:
                self._progress(piece.nbytes)

    def finish(self) -> FileEntry:
        """Flush and rename; size and sha256 of the whole file."""
        self._hash.wait()
        self._file.commit()
        return FileEntry(self._name, self._position, self._digest.hexdigest())

    def _put(self, data: memoryview) -> Future[None]:
        hashed = self._hash.update(self._digest, data)
        self._file.write_at(data, self._position)
        self._position += data.nbytes
        return hashed

    def _free_buffer(self) -> memoryview:
        if len(self._ring) < _BUFFERS:
            return memoryview(bytearray(BUFFER_BYTES))
        buffer, hashed = self._ring.pop(0)
        if hashed is not None:
            hashed.result()
        return buffer

    def __enter__(self) -> _Copy:
        return self

    def __exit__(self, *_: object) -> None:
        self._hash.close()
        self._file.abort()
