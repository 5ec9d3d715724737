"""The checkpoint on disk: its files, tensor headers and config files. Expert names mean nothing here."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Protocol

from humming_convert import hf_config
from humming_convert.errors import CheckpointError, Problem
from humming_convert.hub_id import HubId, Origin, origin_of_snapshot
from humming_convert.model_folder import (
    index_naming,
    is_there,
    left_out_of,
    list_weight_files,
    read_json,
    side_files_of,
)
from humming_convert.safetensors_header import (
    FileHeader,
    SourceFile,
    TensorHeader,
    read_header,
)

__all__ = ["Checkpoint", "Payload", "SourceFile", "TensorHeader", "is_unchanged", "open_checkpoint"]

_MAX_OPEN_FILES = 64


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Everything that a checkpoint says without its payload.

    `tensors` are in file order, `quantization` is the section that counts and `quantization_origin` where it
    was found; `side_files` are the other files worth keeping (tokenizer, generation config, ...); `metadata`
    maps a weight file to its `__metadata__`. `left_out` are entries of the folder that nothing here reads or
    copies (folders, links to nowhere, weights in other formats); `index` is the name of an index beside a bare
    file that says that the file is one of several. `origin` is the Hub's repository that the files are of, where
    that is known.
    """

    root: Path
    is_single_file: bool
    files: tuple[SourceFile, ...]
    tensors: Mapping[str, TensorHeader]
    config: dict[str, Any] | None
    quantization: dict[str, Any] | None
    quantization_origin: str
    side_files: tuple[str, ...]
    metadata: Mapping[str, Mapping[str, str]]
    left_out: tuple[str, ...] = ()
    index: str = ""
    origin: Origin | None = None

    @property
    def name(self) -> str:
        """What the checkpoint is called: the repository, the folder or the file."""
        if self.origin is not None:
            return self.origin.repo
        return self.files[0].name if self.is_single_file else str(self.root.name or self.root)


def open_checkpoint(path: Path | HubId, quant_config: Path | None = None) -> Checkpoint:
    """Read every header of the .safetensors file, model folder or repository at `path`, and its config files.

    `quant_config` is a JSON file used in place of the checkpoint's own quantization section. Raises
    CheckpointError with every fault found. Of a repository headers and config files are fetched, no payload; HubError
    says why it cannot be had.
    """
    if isinstance(path, HubId):
        from humming_convert.hub_source import open_hub_checkpoint

        return open_hub_checkpoint(path, quant_config)
    if not path.exists():
        raise CheckpointError([Problem(str(path), "a .safetensors file or a model folder", "nothing there")])
    is_single_file = not path.is_dir()
    if is_single_file and path.suffix != ".safetensors":
        raise CheckpointError([Problem(str(path), "a .safetensors file or a model folder", f"{path.name}")])
    root = path.parent if is_single_file else path
    names, index = ((path.name,), None) if is_single_file else list_weight_files(root)
    problems: list[Problem] = []
    headers = _read_headers(root, names, problems)
    tensors = merge_headers(headers, index, problems)
    config = read_json(root / "config.json", "config.json") if is_there(root, "config.json") else None
    quantization, where = find_quantization(root, config, quant_config)
    return Checkpoint(
        root=root,
        is_single_file=is_single_file,
        files=tuple(header.file for header in headers),
        tensors=MappingProxyType(tensors),
        config=config,
        quantization=quantization,
        quantization_origin=where,
        side_files=() if is_single_file else side_files_of(root),
        metadata={header.file.name: header.metadata for header in headers},
        left_out=() if is_single_file else left_out_of(root, names),
        index=index_naming(path) if is_single_file else "",
        origin=None if is_single_file else origin_of_snapshot(root, names),
    )


def is_unchanged(file: SourceFile, state: os.stat_result) -> bool:
    """Whether `state`, a later look at `file`, shows what was there when its header was read."""
    if file.is_remote:
        return file.size == state.st_size
    known = (file.size, file.mtime_ns, file.ctime_ns, file.inode)
    return known == (state.st_size, state.st_mtime_ns, state.st_ctime_ns, state.st_ino)


def _read_headers(root: Path, names: tuple[str, ...], problems: list[Problem]) -> list[FileHeader]:
    headers = []
    for name in names:
        try:
            headers.append(read_header(root / name, name))
        except CheckpointError as error:
            problems.extend(error.problems)
    return headers


def merge_headers(
    headers: list[FileHeader], index: dict[str, str] | None, problems: list[Problem]
) -> dict[str, TensorHeader]:
    """Every tensor by name, as the index says. Raises CheckpointError with `problems` and those found here."""
    tensors = _merge(headers, problems)
    if index is not None and not problems:
        problems += _compare_index(index, tensors)
    if problems:
        raise CheckpointError(problems)
    return tensors


def _merge(headers: list[FileHeader], problems: list[Problem]) -> dict[str, TensorHeader]:
    tensors: dict[str, TensorHeader] = {}
    for header in headers:
        for tensor in header.tensors:
            other = tensors.setdefault(tensor.name, tensor)
            if other is not tensor:
                hint = "they belong to different checkpoints, or each holds a slice of it, which cannot be told"
                found = f"it in {other.file} and in {tensor.file}"
                problems.append(Problem(f"tensor {tensor.name}", "it in one file", found, hint))
    return tensors


def _compare_index(weight_map: dict[str, str], tensors: dict[str, TensorHeader]) -> list[Problem]:
    if weight_map == {name: tensor.file for name, tensor in tensors.items()}:
        return []
    problems = []
    for name, file in weight_map.items():
        tensor = tensors.get(name)
        if tensor is None or tensor.file != file:
            found = "it nowhere" if tensor is None else f"it in {tensor.file}"
            problems.append(Problem(f"tensor {name}", f"it in {file}, as the index says", found))
    for name, tensor in tensors.items():
        if name not in weight_map:
            problems.append(Problem(f"tensor {name}", "an entry of the index", f"none, but it is in {tensor.file}"))
    return problems


def find_quantization(
    root: Path, config: dict[str, Any] | None, quant_config: Path | None
) -> tuple[dict[str, Any] | None, str]:
    """The quantization section that counts and where it was found: `quant_config`, config.json, a file beside it."""
    if quant_config is not None:
        where = str(quant_config)
        return hf_config.from_quant_file(read_json(quant_config, where), where=where), where
    found = hf_config.section_of(config)[0] if config is not None else None
    names = () if found is not None else [name for name, _ in hf_config.QUANT_FILES if is_there(root, name)]
    return hf_config.find_quantization(config, {name: read_json(root / name, name) for name in names})


class Shards(Protocol):
    """Files that come while they are needed: `humming_convert.hub_shards.HubShards`."""

    def path(self, name: str) -> Path:
        """Where the file `name` is; waits until it is there."""
        ...

    def stop(self) -> None:
        """End every wait."""
        ...


class Payload:
    """Reads tensors' bytes; safe from several threads, and keeps few files open however many shards."""

    def __init__(self, checkpoint: Checkpoint, shards: Shards | None = None) -> None:
        self._checkpoint = checkpoint
        self._shards = shards
        self._files = {file.name: file for file in checkpoint.files}
        self._lock = threading.Lock()
        self._open: OrderedDict[str, int] = OrderedDict()
        self._users: dict[str, int] = {}

    def __enter__(self) -> Payload:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close every file; the object can be used again afterwards."""
        with self._lock:
            while self._open:
                os.close(self._open.popitem()[1])
            self._users.clear()

    def forget(self, file: str) -> None:
        """Close `file`, which nobody reads any more, so that its disk space can be had."""
        with self._lock:
            if not self._users.get(file) and file in self._open:
                os.close(self._open.pop(file))

    def stop(self) -> None:
        """Let no reader wait for a file that is still to come: the run is over."""
        if self._shards is not None:
            self._shards.stop()

    def read_into(self, name: str, buffer: memoryview, start: int = 0) -> None:
        """Fill `buffer` with the bytes of tensor `name` from byte `start` on.

        Raises CheckpointError when the file is not what it was when its header was read, ValueError when the
        range is not inside the tensor.
        """
        tensor = self._checkpoint.tensors[name]
        view = buffer.cast("B") if buffer.format != "B" or buffer.ndim != 1 else buffer
        if start < 0 or start + len(view) > tensor.nbytes:
            raise ValueError(f"{name}: bytes {start} to {start + len(view)} of {tensor.nbytes}")
        with self._descriptor(tensor) as descriptor:
            offset = tensor.offset + start
            while len(view):
                count = os.preadv(descriptor, [view], offset)
                if count == 0:
                    raise self._changed(tensor, f"it ends at byte {offset}")
                view = view[count:]
                offset += count

    @contextmanager
    def _descriptor(self, tensor: TensorHeader) -> Iterator[int]:
        # Asked before the lock is taken: while one file is on its way, others can be read.
        path = self._shards.path(tensor.file) if self._shards else self._checkpoint.root / tensor.file
        with self._lock:
            descriptor = self._open.get(tensor.file)
            if descriptor is None:
                self._make_room()
                descriptor = self._open_file(tensor, path)
                self._open[tensor.file] = descriptor
            self._open.move_to_end(tensor.file)
            self._users[tensor.file] = self._users.get(tensor.file, 0) + 1
        try:
            self._check_unchanged(tensor, descriptor)
            yield descriptor
        finally:
            with self._lock:
                self._users[tensor.file] = self._users.get(tensor.file, 1) - 1

    def _make_room(self) -> None:
        if len(self._open) < _MAX_OPEN_FILES:
            return
        for file in [file for file in self._open if not self._users.get(file)]:
            os.close(self._open.pop(file))
            if len(self._open) < _MAX_OPEN_FILES:
                return

    def _open_file(self, tensor: TensorHeader, path: Path) -> int:
        try:
            return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise self._changed(tensor, error.strerror or str(error)) from None

    def _check_unchanged(self, tensor: TensorHeader, descriptor: int) -> None:
        state = os.fstat(descriptor)
        known = self._files[tensor.file]
        if not is_unchanged(known, state):
            raise self._changed(tensor, f"a changed file of {state.st_size} bytes")

    def _changed(self, tensor: TensorHeader, found: str) -> CheckpointError:
        known = self._files[tensor.file]
        expected = f"the file of {known.size} bytes whose header was read"
        hint = "start again once nothing writes to the source"
        return CheckpointError([Problem(f"{tensor.file}: tensor {tensor.name}", expected, found, hint)])
