"""SHA-256 of the source files, read once more in the background while layers convert."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

BLOCK_BYTES = 8 << 20


class SourceHasher:
    """Hashes files one after the other in one thread; leaving the context early stops it."""

    def __init__(self, root: Path, names: Sequence[str]) -> None:
        self._root = root
        self._names = tuple(names)
        self._stop = threading.Event()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="source-sha256")
        self._future: Future[dict[str, str]] | None = None

    def __enter__(self) -> SourceHasher:
        self._future = self._pool.submit(self._run)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._pool.shutdown(wait=True)

    def result(self) -> dict[str, str]:
        """Hex digests by file name, once every file is read. Raises OSError when one cannot be read."""
        return self._future.result() if self._future is not None else {}

    def _run(self) -> dict[str, str]:
        return {name: self._digest(self._root / name) for name in self._names if not self._stop.is_set()}

    def _digest(self, path: Path) -> str:
        state = hashlib.sha256()
        block = bytearray(BLOCK_BYTES)
        view = memoryview(block)
        with path.open("rb", buffering=0) as file:
            while not self._stop.is_set() and (count := file.readinto(block)):
                state.update(view[:count])
        return state.hexdigest()
