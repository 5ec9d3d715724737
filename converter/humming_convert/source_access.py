"""Where the bytes of a conversion come from: files that are there, or files of the Hub that come and may go again."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from humming_convert.errors import OutputError
from humming_convert.files import os_error
from humming_convert.hub_shards import HubShards, temporary_folder
from humming_convert.passthrough import Reader
from humming_convert.plan import ConversionPlan
from humming_convert.provenance import SourceHasher
from humming_convert.shard_schedule import LAYERS_AT_ONCE, ShardSchedule, schedule
from humming_convert.source import Checkpoint, Payload

_COPY_BYTES = 8 << 20


class LocalAccess:
    """A checkpoint whose files are there already; `hash_source` has them read once more for their digests."""

    def __init__(self, payload: Payload, hasher: SourceHasher) -> None:
        self.payload = payload
        self.reader: Reader = payload
        self._hasher = hasher

    def layer_finished(self, number: int) -> None:
        """Nothing to do: the files stay."""

    def finish_layers(self) -> None:
        """Nothing to do either."""

    def digests(self) -> Mapping[str, str]:
        """SHA-256 by file name, of the files that were to be hashed. Raises OSError."""
        return self._hasher.result()


@dataclass(slots=True)
class HubAccess:
    """A checkpoint on the Hub. With a `spool` (--low-disk) a file goes once the layers that read it are finished.

    Its passed-through tensors, which are written last, are kept in the spool until then.
    """

    payload: Payload
    shards: HubShards
    schedule: ShardSchedule
    spool: Spool | None
    reader: Reader = field(init=False)

    def __post_init__(self) -> None:
        self.reader = self.spool or self.payload

    def layer_finished(self, number: int) -> None:
        """Layers are reported in order: whatever no later one needs can go."""
        if self.spool is not None:
            for file in self.schedule.layers[number]:
                if self.schedule.last_layer(file) <= number:
                    self._drop(file)

    def finish_layers(self) -> None:
        """Keep the passed-through tensors of the files that no layer had, one file after the other."""
        if self.spool is not None:
            for file in self.schedule.order:
                if self.schedule.last_layer(file) < 0:
                    self._drop(file)

    def digests(self) -> Mapping[str, str]:
        """SHA-256 by file name: what the Hub says, or for small files what was read."""
        return self.shards.sha256

    def _drop(self, file: str) -> None:
        if self.spool is not None:
            for name in self.schedule.passthrough.get(file, ()):
                self.spool.keep(name)
        self.payload.forget(file)
        self.shards.release(file)


class Spool:
    """Tensors copied to one temporary file, read again as from the payload."""

    def __init__(self, folder: Path, payload: Payload, sizes: Mapping[str, int]) -> None:
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - closed by `close`
        self._payload, self._sizes = payload, sizes
        self._offsets: dict[str, int] = {}
        self._end = 0

    def keep(self, name: str) -> None:
        """Copy a tensor. Raises CheckpointError or OutputError."""
        size, buffer = self._sizes[name], memoryview(bytearray(_COPY_BYTES))
        for start in range(0, size, _COPY_BYTES):
            piece = buffer[: min(_COPY_BYTES, size - start)]
            self._payload.read_into(name, piece, start)
            try:
                os.pwrite(self._file.fileno(), piece, self._end + start)
            except OSError as error:
                raise os_error(Path("tensors that are passed through"), "keep them", error) from error
        self._offsets[name] = self._end
        self._end += size

    def read_into(self, name: str, buffer: memoryview, start: int = 0) -> None:
        """What `Payload.read_into` does, from the copy where there is one."""
        offset = self._offsets.get(name)
        if offset is None:
            self._payload.read_into(name, buffer, start)
        elif os.preadv(self._file.fileno(), [buffer], offset + start) != buffer.nbytes:
            raise OutputError(f"{name}: its temporary copy ends too early")

    def close(self) -> None:
        """Delete the copies."""
        self._file.close()


SourceAccess = LocalAccess | HubAccess


@contextmanager
def open_access(
    checkpoint: Checkpoint, plan: ConversionPlan, out: Path, *, hash_source: bool, low_disk: bool, workers: int
) -> Iterator[SourceAccess]:
    """Access to the source for one conversion. `out` is where it goes: temporary files lie beside it."""
    with ExitStack() as stack:
        if checkpoint.origin is None or not checkpoint.origin.is_remote:
            payload = stack.enter_context(Payload(checkpoint))
            names = [file.name for file in checkpoint.files] if hash_source else []
            yield LocalAccess(payload, stack.enter_context(SourceHasher(checkpoint.root, names)))
            return
        plan_of_files = schedule(plan, checkpoint.tensors)
        sizes = {file.name: file.size for file in checkpoint.files}
        budget = plan_of_files.peak_bytes(sizes, max(LAYERS_AT_ONCE, workers // 4 + LAYERS_AT_ONCE))
        folder = None
        if low_disk:
            folder = stack.enter_context(temporary_folder(out.with_name(f".{out.name}.humming-source")))
        _require_space(checkpoint, folder, budget, sizes)
        shards = stack.enter_context(
            HubShards(checkpoint, plan_of_files.order, folder=folder, budget=budget, verify=hash_source)
        )
        payload = stack.enter_context(Payload(checkpoint, shards))
        spool = None
        if folder is not None:
            spool = Spool(folder, payload, {name: checkpoint.tensors[name].nbytes for name in plan.passthrough})
            stack.callback(spool.close)
        yield HubAccess(payload, shards, plan_of_files, spool)


def _require_space(checkpoint: Checkpoint, folder: Path | None, budget: int, sizes: Mapping[str, int]) -> None:
    """Raises OutputError when what is still to be downloaded does not fit where it goes."""
    missing = sum(size for name, size in sizes.items() if not (checkpoint.root / name).exists())
    needed, where = (missing, checkpoint.root) if folder is None else (min(budget, missing), folder)
    while not where.exists():
        where = where.parent
    free = shutil.disk_usage(where).free
    if free < needed:
        hint = "free space, or use --low-disk" if folder is None else "free space"
        raise OutputError(f"{where}: the download needs {needed} bytes, {free} are free; {hint}")
