"""Write one experts file: payload at known offsets while it is hashed, header last, then fsync and rename.

Until `finish()` returns there is no file under the final name, so a file that exists is whole.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from humming_convert.errors import OutputError
from humming_convert.files import PAGE, TempFile
from humming_loader.dtypes import dtype_info, tensor_nbytes


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor to write: its name, safetensors dtype code and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the payload."""
        return tensor_nbytes(self.dtype, self.shape, self.name)


def storage_order(tensors: Sequence[TensorSpec]) -> list[TensorSpec]:
    """Tensors of whole pages first, then widest elements first, else as given.

    Each tensor then begins at a multiple of its element size, and the large ones (a packed weight always fills whole
    pages) at a page, so that a writer and a reader may go past the page cache.
    """
    return sorted(tensors, key=lambda spec: (spec.nbytes % PAGE != 0, -dtype_info(spec.dtype, spec.name).bits))


def offsets_of(ordered: Sequence[TensorSpec]) -> dict[str, tuple[int, int]]:
    """Begin and end of each tensor in the payload, one after the other without gaps."""
    offsets: dict[str, tuple[int, int]] = {}
    position = 0
    for spec in ordered:
        offsets[spec.name] = (position, position + spec.nbytes)
        position += spec.nbytes
    return offsets


def header_bytes(ordered: Sequence[TensorSpec], metadata: Mapping[str, str]) -> bytes:
    """The JSON header of a safetensors file, without its length and padding."""
    offsets = offsets_of(ordered)
    document: dict[str, object] = {"__metadata__": dict(metadata)}
    for spec in ordered:
        begin, end = offsets[spec.name]
        document[spec.name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": [begin, end]}
    return json.dumps(document, separators=(",", ":"), allow_nan=False).encode()


def metadata_size(metadata: Mapping[str, str]) -> int:
    """Bytes that `metadata` takes in a header: what `ExpertsFileWriter` must be told to reserve."""
    return len(header_bytes([], metadata)) - len(header_bytes([], {}))


class ExpertsFileWriter:
    """A safetensors file whose tensors grow chunk by chunk, several at a time.

    `metadata_reserve` is `metadata_size()` of the metadata that `finish` will be given, or more. Use it as a
    context manager: leaving it without `finish` removes what was written. Any thread may call `place`; each tensor's
    `append_digest` is called by one thread at a time.
    """

    def __init__(self, path: Path, tensors: Sequence[TensorSpec], metadata_reserve: int) -> None:
        names = [spec.name for spec in tensors]
        repeated = sorted({name for name in names if names.count(name) > 1})
        if repeated:
            raise OutputError(f"{path}: tensor named twice: {', '.join(repeated)}")
        self.path = path
        self._ordered = storage_order(tensors)
        self._offsets = offsets_of(self._ordered)
        header = 8 + len(header_bytes(self._ordered, {})) + metadata_reserve
        self._payload = -(-header // PAGE) * PAGE
        self._hashed = dict.fromkeys(names, 0)
        self._digests = {name: hashlib.sha256() for name in names}
        self._file = TempFile(path)
        self._finished = False
        self._stopped = False

    @property
    def nbytes(self) -> int:
        """Size of the file, once finished."""
        return self._payload + sum(spec.nbytes for spec in self._ordered)

    def write(self, name: str, data: memoryview | bytes | bytearray) -> None:
        """Append the next bytes of tensor `name`: `place` and `append_digest` in one.

        Raises OutputError for an unknown name, for more bytes than the tensor has, and when the disk fails.
        """
        self.place(name, self._hashed.get(name, 0), data)
        self.append_digest(name, data)

    def place(self, name: str, start: int, data: memoryview | bytes | bytearray) -> None:
        """Put bytes of tensor `name` at its byte `start`; several threads may place different pieces at once.

        Raises OutputError for an unknown name, for a piece that is not inside the tensor, and when the disk fails.
        """
        view = self._piece(name, start, data)
        self._file.write_at(view, self._payload + self._offsets[name][0] + start)

    def append_digest(self, name: str, data: memoryview | bytes | bytearray) -> None:
        """Hash the next bytes of tensor `name`, in order. Raises OutputError for more bytes than the tensor has."""
        view = self._piece(name, self._hashed.get(name, 0), data)
        self._digests[name].update(view)
        self._hashed[name] += view.nbytes

    def _piece(self, name: str, start: int, data: memoryview | bytes | bytearray) -> memoryview:
        self._require_open()
        if name not in self._offsets:
            raise OutputError(f"{self.path}: tensor {name!r} is not one of the file's")
        view = memoryview(data)
        # A view with a zero in its shape cannot be cast.
        view = view.cast("B") if view.nbytes else memoryview(b"")
        begin, end = self._offsets[name]
        if start < 0 or begin + start + view.nbytes > end:
            raise OutputError(
                f"{self.path}: tensor {name!r} has {end - begin} bytes, "
                f"{start} were written and {view.nbytes} more came"
            )
        return view

    def digests(self) -> dict[str, str]:
        """The sha256 of each tensor by name. Raises OutputError when a tensor is not complete."""
        missing = [
            f"{spec.name} has {self._hashed[spec.name]} of {spec.nbytes} bytes"
            for spec in self._ordered
            if self._hashed[spec.name] != spec.nbytes
        ]
        if missing:
            raise OutputError(f"{self.path}: not complete: {'; '.join(missing)}")
        return {name: digest.hexdigest() for name, digest in self._digests.items()}

    def finish(self, metadata: Mapping[str, str]) -> dict[str, str]:
        """Write the header with `metadata` as its `__metadata__`, flush and rename; the same as `digests()`.

        Raises OutputError when a tensor is not complete, the metadata does not fit, or the disk fails.
        """
        self._require_open()
        digests = self.digests()
        header = header_bytes(self._ordered, metadata)
        space = self._payload - 8
        if len(header) > space:
            raise OutputError(f"{self.path}: the header takes {len(header)} bytes, {space} were reserved")
        self._file.write_at(memoryview(space.to_bytes(8, "little") + header.ljust(space)), 0)
        self._file.commit()
        self._finished = True
        return digests

    def stop(self) -> None:
        """Let every further call fail, in whichever thread; `abort` then removes what was written."""
        self._stopped = True

    def abort(self) -> None:
        """Remove what was written; nothing happens after `finish`."""
        if not self._finished:
            self._file.abort()
            self._finished = True

    def _require_open(self) -> None:
        if self._finished or self._stopped:
            raise OutputError(f"{self.path}: the file was {'stopped' if self._stopped else 'finished'} already")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()
