"""Read packed tensors: open an experts file by its header, read byte ranges into given buffers.

Nothing is mapped or cast: a tensor is its bytes. One open file may be read from several threads.
"""

from __future__ import annotations

import contextlib
import math
import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from humming_loader.dtypes import SAFETENSORS_DTYPES, tensor_nbytes
from humming_loader.entries import LayerEntry, TensorEntry
from humming_loader.errors import FileError, ManifestError, TensorError
from humming_loader.fields import Fields, load_object
from humming_loader.manifest import parse_layer_metadata

# The limit of the safetensors library.
MAX_HEADER_BYTES = 100_000_000


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as a file's header gives it; `offset` counts from the beginning of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class ExpertsFile:
    """An open experts file. Raises FileError when it is missing or its header is not sound."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise FileError(str(path), "a readable file", error.strerror or str(error)) from error
        with contextlib.ExitStack() as on_error:
            on_error.callback(self.close)
            status = os.fstat(self._fd)
            if not stat.S_ISREG(status.st_mode):
                raise FileError(str(path), "a regular file", "something else")
            self.size = status.st_size
            self.tensors, self.metadata = self._read_header()
            on_error.pop_all()

    def layers(self) -> dict[str, LayerEntry]:
        """The layers that the file says it holds. Raises FileError."""
        try:
            return parse_layer_metadata(self.metadata)
        except ManifestError as error:
            raise FileError(str(self.path), f"{error.field} to be {error.expected}", error.found) from error

    def check(self, entry: TensorEntry) -> StoredTensor:
        """The stored tensor of a manifest's `entry`. Raises TensorError when dtype or shape differ."""
        stored = self._stored(entry.name)
        if (stored.dtype, stored.shape) != (entry.dtype, entry.shape):
            expected = f"{entry.dtype} {list(entry.shape)}, as the manifest says"
            raise TensorError(entry.name, expected, f"{stored.dtype} {list(stored.shape)}")
        return stored

    def read_into(self, name: str, buffer: memoryview, start: int = 0) -> None:
        """Fill `buffer` with the bytes of tensor `name` from `start` on. Raises TensorError or FileError."""
        stored = self._stored(name)
        view = buffer.cast("B") if buffer.nbytes else memoryview(b"")
        if start < 0 or start + view.nbytes > stored.nbytes:
            found = f"a read of {view.nbytes} at {start}"
            raise TensorError(name, f"a range within {stored.nbytes} bytes", found)
        self._read_at(view, stored.offset + start)

    def read_experts(self, name: str, experts: range, buffer: memoryview) -> None:
        """Fill `buffer` with the consecutive `experts` of a tensor whose axis 0 is the expert."""
        per_expert = self.expert_nbytes(name)
        if experts.step != 1 or buffer.nbytes != per_expert * len(experts):
            expected = f"{per_expert} bytes for each of consecutive experts"
            raise TensorError(name, expected, f"{buffer.nbytes} for {experts}")
        self.read_into(name, buffer, experts.start * per_expert)

    def expert_nbytes(self, name: str) -> int:
        """Bytes of one expert of a tensor whose axis 0 is the expert. Raises TensorError."""
        stored = self._stored(name)
        if not stored.shape or stored.shape[0] == 0:
            raise TensorError(name, "experts on axis 0", f"shape {list(stored.shape)}")
        return stored.nbytes // stored.shape[0]

    def iter_experts(self, name: str, max_bytes: int) -> Iterator[tuple[range, bytearray]]:
        """All experts of a tensor in consecutive runs of at most `max_bytes` (at least one expert) each."""
        count = self._stored(name).shape[0] if self._stored(name).shape else 0
        per_expert = self.expert_nbytes(name)
        step = max(1, max_bytes // max(1, per_expert))
        for first in range(0, count, step):
            experts = range(first, min(first + step, count))
            data = bytearray(per_expert * len(experts))
            self.read_experts(name, experts, memoryview(data))
            yield experts, data

    def close(self) -> None:
        """Close the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _stored(self, name: str) -> StoredTensor:
        stored = self.tensors.get(name)
        if stored is None:
            raise TensorError(name, f"a tensor of {self.path}", "none of that name")
        return stored

    def _read_at(self, view: memoryview, offset: int) -> None:
        done = 0
        while done < view.nbytes:
            try:
                got = os.preadv(self._fd, [view[done:]], offset + done)
            except OSError as error:
                raise FileError(str(self.path), "readable bytes", error.strerror or str(error)) from error
            if got == 0:
                raise FileError(str(self.path), f"{view.nbytes} bytes at {offset}", f"{done}, then the end")
            done += got

    def _read_header(self) -> tuple[dict[str, StoredTensor], Mapping[str, str]]:
        path = str(self.path)
        prefix = bytearray(8)
        if self.size < 8:
            raise FileError(path, "a safetensors header", f"a file of {self.size} bytes")
        self._read_at(memoryview(prefix), 0)
        length = int.from_bytes(prefix, "little")
        if length > min(MAX_HEADER_BYTES, self.size - 8):
            raise FileError(path, "a header inside the file", f"a header length of {length}")
        text = bytearray(length)
        self._read_at(memoryview(text), 8)
        try:
            document = load_object(bytes(text), "header")
            metadata = document.pop("__metadata__", {})
            tensors = {name: _stored(name, value, 8 + length) for name, value in document.items()}
        except ManifestError as error:
            raise FileError(path, f"{error.field} to be {error.expected}", error.found) from error
        if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
            raise FileError(path, "__metadata__ of strings", "something else")
        self._check_extent(tensors, 8 + length)
        return tensors, metadata

    def _check_extent(self, tensors: Mapping[str, StoredTensor], begin: int) -> None:
        """Tensors must follow each other without gaps and fill the file."""
        end = begin
        for tensor in sorted(tensors.values(), key=lambda tensor: (tensor.offset, tensor.nbytes)):
            if tensor.offset != end:
                raise FileError(str(self.path), f"tensor {tensor.name!r} at {end}", f"it at {tensor.offset}")
            end += tensor.nbytes
        if end != self.size:
            raise FileError(str(self.path), f"{end} bytes", f"{self.size}")


def _stored(name: str, value: Any, begin: int) -> StoredTensor:  # noqa: ANN401 - parsed JSON
    fields = Fields(value, name)
    dtype = fields.choice("dtype", *SAFETENSORS_DTYPES)
    shape = fields.counts("shape")
    offsets = fields.counts("data_offsets")
    fields.done()
    bits = SAFETENSORS_DTYPES[dtype].bits * math.prod(shape)
    if len(offsets) != 2 or bits % 8 or offsets[1] - offsets[0] != bits // 8:
        raise ManifestError(f"{name}.data_offsets", f"a range of {bits / 8:g} bytes", str(list(offsets)))
    return StoredTensor(name, dtype, shape, begin + offsets[0], tensor_nbytes(dtype, shape, name))
