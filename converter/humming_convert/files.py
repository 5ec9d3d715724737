"""Files that appear whole or not at all, and sha256 computed beside the writing."""

from __future__ import annotations

import ctypes
import errno
import hashlib
import os
import stat
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from io import BufferedReader
from pathlib import Path

from humming_convert.errors import OutputError

# What the disk's blocks, the memory's pages and O_DIRECT's rules are all multiples or divisors of.
PAGE = 4096
_HASH_QUEUE = 4


def os_error(path: Path, action: str, error: OSError) -> OutputError:
    """An OutputError that says what could not be done to `path` and, for a full disk, what to do."""
    hint = "; free space or choose another folder" if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
    return OutputError(f"{path}: cannot {action}: {error.strerror or error}{hint}")


def open_regular(path: Path) -> BufferedReader:
    """`path` opened for reading. Raises OSError, also for what is no regular file: a FIFO would wait for a writer."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return os.fdopen(descriptor, "rb")


def read_regular(path: Path) -> bytes:
    """All of a regular file. Raises OSError."""
    with open_regular(path) as opened:
        return opened.read()


def fsync_folder(folder: Path) -> None:
    """Make renames in `folder` durable. Raises OutputError."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise os_error(folder, "flush the folder", error) from error


class BackgroundHash:
    """Runs sha256 updates on one thread in the order they are given; a bounded number may wait.

    A buffer given to `update` must not change until its future is done. Errors surface in `update` or `wait`.
    """

    def __init__(self, depth: int = _HASH_QUEUE) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="sha256")
        self._pending: deque[Future[None]] = deque()
        self._depth = depth

    def update(self, digest: hashlib._Hash, data: memoryview) -> Future[None]:
        """Queue `digest.update(data)`; waits while too many are queued."""
        while len(self._pending) >= self._depth:
            self._pending.popleft().result()
        future = self._pool.submit(digest.update, data)
        self._pending.append(future)
        return future

    def wait(self) -> None:
        """Return when everything queued is hashed."""
        while self._pending:
            self._pending.popleft().result()

    def close(self) -> None:
        """Drop what is queued and end the thread."""
        self._pool.shutdown(wait=True, cancel_futures=True)


class TempFile:
    """A file under a temporary name: `commit()` gives it its final one, `abort()` removes it.

    What lies in whole pages, in memory and in the file, goes to the disk past the page cache where the file system
    can do that: no copy, no memory taken from others, and nothing is left to flush at the end. Everything else goes
    through the cache. Several threads may write different parts at once.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._temp = path.with_name(f".{path.name}.partial")
        if path.exists():
            raise OutputError(f"{path}: exists already")
        try:
            self._fd = os.open(self._temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise os_error(path, "create the file", error) from error
        self._direct = _open_direct(self._temp)
        self._open = True

    def write_at(self, data: memoryview, offset: int) -> None:
        """All of `data` at `offset`. Raises OutputError with path, bytes and offset."""
        done = self._write_direct(data, offset)
        try:
            while done < data.nbytes:
                done += os.pwrite(self._fd, data[done:], offset + done)
        except OSError as error:
            raise os_error(self.path, f"write {data.nbytes - done} bytes at {offset + done}", error) from error

    def _write_direct(self, data: memoryview, offset: int) -> int:
        """Bytes of `data` that went past the page cache; what is left, and any failure, is for the usual way."""
        if self._direct < 0 or data.nbytes < PAGE or (data.nbytes | offset | _address(data)) % PAGE:
            return 0
        done = 0
        try:
            while done < data.nbytes and not done % PAGE:
                done += os.pwrite(self._direct, data[done:], offset + done)
        except OSError:
            # Some file systems open such a file and refuse to write it; a full disk is told best the usual way.
            pass
        return done if done == data.nbytes else done - done % PAGE

    def commit(self) -> None:
        """Flush to the disk, close, and rename to the final name. Raises OutputError and removes the file."""
        try:
            os.fsync(self._fd)
            self._close()
            self._temp.rename(self.path)
        except OSError as error:
            self.abort()
            raise os_error(self.path, "flush and rename the file", error) from error

    def abort(self) -> None:
        """Close and remove the temporary file; nothing happens after a commit."""
        if self._open:
            self._close()
        self._temp.unlink(missing_ok=True)

    def _close(self) -> None:
        self._open = False
        if self._direct >= 0:
            os.close(self._direct)
        os.close(self._fd)


def _open_direct(path: Path) -> int:
    """A descriptor that writes past the page cache, or -1 where the system or the file system has no such thing."""
    flag: int = getattr(os, "O_DIRECT", 0)
    if not flag:
        return -1
    try:
        return os.open(path, os.O_WRONLY | os.O_CLOEXEC | flag)
    except OSError:
        return -1


def _address(data: memoryview) -> int:
    """Where `data` lies in memory; an odd number for memory that may only be read, which ctypes cannot look at."""
    try:
        return ctypes.addressof(ctypes.c_char.from_buffer(data))
    except TypeError:
        return 1
