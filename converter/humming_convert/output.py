"""The output folder: made whole in a staging folder beside it, then renamed into place.

Whatever fails or interrupts a run, the final name holds either nothing, or what it held before, or all of it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
from pathlib import Path
from types import TracebackType
from typing import Self

from humming_convert.errors import OutputError
from humming_convert.files import TempFile, fsync_folder, os_error
from humming_loader.manifest import MANIFEST_FILE, PRODUCER, FileEntry


class OutputFolder:
    """`out` in the making. As a context manager it removes the staging folder unless `commit()` was reached.

    `source_root` is the folder (or the one file) that is read; `out` may not lie in it nor around it. The
    constructor makes nothing and raises OutputError for everything that is already wrong.
    """

    def __init__(self, out: Path, *, source_root: Path, overwrite: bool) -> None:
        self.out = out.resolve()
        _refuse_overlap(self.out, source_root)
        _refuse_existing(self.out, overwrite)
        self.staging = self.out.with_name(f".{self.out.name}.humming-partial")
        self._old = self.out.with_name(f".{self.out.name}.humming-old")
        self._lock = -1
        self._committed = False
        parent = self.out.parent
        if not parent.is_dir():
            raise OutputError(f"{parent}: no such folder; make it first")
        if not os.access(parent, os.W_OK | os.X_OK):
            raise OutputError(f"{parent}: not writable; choose another folder for the output")

    def __enter__(self) -> Self:
        self._remove_stale_staging()
        try:
            self.staging.mkdir()
            self._lock = _lock_folder(self.staging)
        except OSError as error:
            raise os_error(self.staging, "make the staging folder", error) from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._committed:
            shutil.rmtree(self.staging, ignore_errors=True)
        self._unlock()

    def require_space(self, nbytes: int) -> None:
        """Raises OutputError when the disk has less than `nbytes` free, before the long work begins."""
        free = shutil.disk_usage(self.out.parent).free
        if free < nbytes:
            raise OutputError(
                f"{self.out}: needs {nbytes} bytes, {free} are free; free space or choose another folder"
            )

    def path(self, name: str) -> Path:
        """Where the output's file `name` is to be written for now; its folder is made. Raises OutputError."""
        path = self.staging / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise os_error(path.parent, "make the folder", error) from error
        return path

    def write_text(self, name: str, text: str) -> FileEntry:
        """A small file of the output, flushed to the disk. Raises OutputError."""
        data = text.encode()
        file = TempFile(self.path(name))
        try:
            file.write_at(memoryview(data), 0)
            file.commit()
        finally:
            file.abort()
        return FileEntry(name, len(data), hashlib.sha256(data).hexdigest())

    def commit(self, manifest: str) -> None:
        """Write the manifest last and move everything into place, replacing an output that was there.

        Raises OutputError; then `out` is what it was before.
        """
        self.write_text(MANIFEST_FILE, manifest)
        for folder, _, _ in os.walk(self.staging, topdown=False):
            fsync_folder(Path(folder))
        try:
            self._swap()
        except OSError as error:
            raise os_error(self.out, "move the finished output into place", error) from error
        self._committed = True
        fsync_folder(self.out.parent)
        shutil.rmtree(self._old, ignore_errors=True)

    def _swap(self) -> None:
        if not self.out.exists():
            self.staging.rename(self.out)
            return
        if self._old.exists():
            shutil.rmtree(self._old)
        self.out.rename(self._old)
        try:
            self.staging.rename(self.out)
        except OSError:
            self._old.rename(self.out)
            raise

    def _remove_stale_staging(self) -> None:
        """Remove what a killed run left; raises OutputError when that run is still alive."""
        if not self.staging.exists():
            return
        try:
            self._lock = _lock_folder(self.staging)
            shutil.rmtree(self.staging)
        except BlockingIOError as error:
            raise OutputError(f"{self.staging}: another run is writing this output; wait for it") from error
        except OSError as error:
            raise os_error(self.staging, "remove what an earlier run left", error) from error
        finally:
            self._unlock()

    def _unlock(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _lock_folder(folder: Path) -> int:
    """A descriptor that holds `folder` locked until closed. Raises BlockingIOError when another has it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise
    except OSError as error:
        # Some network file systems have no locks; a second run then fails in mkdir instead.
        if error.errno not in (errno.ENOLCK, errno.ENOTSUP):
            os.close(descriptor)
            raise
    return descriptor


def _refuse_overlap(out: Path, source: Path) -> None:
    for root in {source.resolve(), source.parent.resolve() / source.name}:
        if out == root or root in out.parents:
            raise OutputError(f"{out}: lies inside the source {root}; choose a folder outside it")
        if out in root.parents:
            raise OutputError(f"{out}: holds the source {root}; choose another folder")


def _refuse_existing(out: Path, overwrite: bool) -> None:
    if not out.name:
        raise OutputError(f"{out}: not a folder that can be made; choose another")
    if not out.exists():
        return
    if not out.is_dir():
        raise OutputError(f"{out}: is a file; choose a folder")
    if not overwrite:
        raise OutputError(f"{out}: exists already; choose another folder, or replace it with --overwrite")
    if any(out.iterdir()) and not _is_ours(out):
        raise OutputError(
            f"{out}: holds files that humming-convert did not write, and --overwrite would delete them; "
            "choose another folder or empty this one"
        )


def _is_ours(out: Path) -> bool:
    """Whether a finished output, of this version or another, is in `out`."""
    with contextlib.suppress(OSError, ValueError):
        document = json.loads((out / MANIFEST_FILE).read_bytes())
        producer = document.get("producer") if isinstance(document, dict) else None
        return isinstance(producer, dict) and producer.get("name") == PRODUCER
    return False
