"""The output folder: made whole in a staging folder beside it, then renamed into place.

Whatever fails or interrupts a run, the final name holds either nothing, or what it held before, or all of it.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shutil
from pathlib import Path
from types import TracebackType
from typing import Self

from humming_convert.errors import OutputError
from humming_convert.files import TempFile, fsync_folder, os_error
from humming_convert.interrupts import held_back, raise_received
from humming_convert.replacing import refuse_foreign
from humming_loader.manifest import MANIFEST_FILE, FileEntry

_ATTEMPTS = 20
_EXISTS = (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR, errno.EISDIR)


class OutputFolder:
    """`out` in the making. As a context manager it removes the staging folder unless `commit()` was reached.

    `source_root` is the folder (or the one file) that is read; `out` may not lie in it nor around it. The
    constructor makes nothing and raises OutputError for everything that is already wrong.
    """

    def __init__(self, out: Path, *, source_root: Path, overwrite: bool) -> None:
        self.out = _resolved(out)
        self._overwrite = overwrite
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
        for _ in range(_ATTEMPTS):
            self._remove_stale_staging()
            try:
                self.staging.mkdir()
                self._lock = _lock_folder(self.staging)
            except (BlockingIOError, FileExistsError, FileNotFoundError):
                continue  # another run was faster; the next look says whether it is still there
            except OSError as error:
                raise os_error(self.staging, "make the staging folder", error) from error
            if _is_at(self._lock, self.staging):
                return self
            self._unlock()  # another run took it for a dead run's before it was locked
        raise OutputError(f"{self.staging}: other runs keep making and removing it; wait for them")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with held_back():
            if not self._committed:
                shutil.rmtree(self.staging, ignore_errors=True)
            self._unlock()

    def require_space(self, nbytes: int) -> None:
        """Raises OutputError when the disk has less than `nbytes` free, before the long work begins."""
        free = shutil.disk_usage(self.out.parent).free
        if free < nbytes:
            raise OutputError(f"{self.out}: needs {nbytes} bytes, {free} are free; free space or choose another folder")

    def path(self, name: str) -> Path:
        """Where the output's file `name` is to be written for now; its folder is made. Raises OutputError."""
        raise_received()  # asked for before every file, so a lost signal ends the run at the next one
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
            with held_back():
                self._swap()
                self._committed = True
        except OSError as error:
            if error.errno in _EXISTS and not self._overwrite:
                raise OutputError(_exists_already(self.out)) from error
            raise os_error(self.out, "move the finished output into place", error) from error
        fsync_folder(self.out.parent)
        shutil.rmtree(self._old, ignore_errors=True)

    def _swap(self) -> None:
        """Look once more, since the run took its time: what came to `out` meanwhile is refused, not replaced."""
        _refuse_existing(self.out, self._overwrite)
        if not self._overwrite or not self.out.exists():
            self.staging.rename(self.out)  # replaces nothing but an empty folder
            return
        if self._old.exists():
            shutil.rmtree(self._old)
        self.out.rename(self._old)
        try:
            refuse_foreign(self._old, self.out)  # under this name nobody adds files any more
            self.staging.rename(self.out)
        finally:
            if not self.out.exists():
                self._old.rename(self.out)

    def _remove_stale_staging(self) -> None:
        """Remove what a killed run left; raises OutputError when that run is still alive."""
        try:
            self._lock = _lock_folder(self.staging)
            if _is_at(self._lock, self.staging):
                shutil.rmtree(self.staging)
        except FileNotFoundError:
            return
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


def _is_at(descriptor: int, folder: Path) -> bool:
    """Whether the open folder is still the one under its name: a lock on one that was replaced means nothing."""
    try:
        return os.path.samestat(os.fstat(descriptor), folder.stat())
    except FileNotFoundError:
        return False


def _resolved(out: Path) -> Path:
    try:
        resolved = out.resolve()
    except (OSError, RuntimeError, ValueError) as error:
        raise OutputError(f"{out}: not a folder that can be made ({error}); choose another") from error
    if resolved.is_symlink():
        raise OutputError(f"{out}: a link that leads to itself; choose another folder")
    return resolved


def _refuse_overlap(out: Path, source: Path) -> None:
    for root in {source.resolve(), source.parent.resolve() / source.name}:
        if out == root or root in out.parents:
            raise OutputError(f"{out}: lies inside the source {root}; choose a folder outside it")
        if out in root.parents:
            raise OutputError(f"{out}: holds the source {root}; choose another folder")


def _refuse_existing(out: Path, overwrite: bool) -> None:
    if not out.name:
        raise OutputError(f"{out}: not a folder that can be made; choose another")
    if not os.path.lexists(out):
        return
    if not out.is_dir():
        raise OutputError(f"{out}: is a file; choose a folder")
    if not overwrite:
        raise OutputError(_exists_already(out))
    refuse_foreign(out, out)


def _exists_already(out: Path) -> str:
    return f"{out}: exists already; choose another folder, or replace it with --overwrite"
