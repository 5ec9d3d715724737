"""Weight files of a repository, downloaded in the order in which they are needed while others are converted."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from tqdm import tqdm

from humming_convert.errors import CheckpointError, Problem
from humming_convert.hub_id import Origin
from humming_convert.safetensors_header import TensorHeader, read_header
from humming_convert.source import Checkpoint
from humming_loader.hub import explained

THREADS = 4
_BLOCK_BYTES = 8 << 20
_PATIENCE = 1.0


class HubShards:
    """The weight files of a remote `checkpoint`, downloaded by a few threads in the given `order`.

    Without `folder` they go to the Hub's cache and stay there. With it they go there, `release` deletes them, and no
    more are fetched ahead of their need than fit in `budget` bytes. `sha256` holds what the Hub, or a look at the
    downloaded file, says; with `verify` every file is hashed and held against the Hub's digest.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        order: Sequence[str],
        *,
        folder: Path | None = None,
        budget: int = 0,
        verify: bool = False,
    ) -> None:
        if checkpoint.origin is None:
            raise ValueError(f"{checkpoint.name}: no repository")
        self.sha256 = dict(checkpoint.origin.sha256)
        self.peak_bytes = 0
        self._origin: Origin = checkpoint.origin
        self._root = checkpoint.root
        self._sizes = {file.name: file.size for file in checkpoint.files}
        self._tensors = _tensors_by_file(checkpoint)
        self._folder, self._budget, self._verify = folder, budget, verify
        self._ahead = list(order)
        self._wanted: list[str] = []
        self._running: set[str] = set()
        self._ready: dict[str, Path] = {}
        self._failed: dict[str, BaseException] = {}
        self._held = 0
        self._state = threading.Condition()
        self._stopped = threading.Event()
        self._threads = [threading.Thread(target=self._work, name="download", daemon=True) for _ in range(THREADS)]

    def __enter__(self) -> HubShards:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        for thread in self._threads:
            thread.join(_PATIENCE)  # one that hangs on a silent connection ends with the process

    def path(self, name: str) -> Path:
        """Where the file is, once it is there. Raises HubError or CheckpointError when it cannot be had."""
        with self._state:
            while name not in self._ready:
                if name in self._failed:
                    raise self._failed[name]
                if self._stopped.is_set():
                    raise CheckpointError([Problem(name, "it downloaded", "a run that was stopped")])
                if name not in self._wanted and name not in self._running:
                    self._wanted.append(name)
                    self._state.notify_all()
                self._state.wait()
            return self._ready[name]

    def release(self, name: str) -> None:
        """Delete a file that is not needed any more, if it is one of the temporary ones."""
        with self._state:
            path = self._ready.get(name)
            if path is None or self._folder is None or self._folder not in path.parents:
                return
            del self._ready[name]
            path.unlink(missing_ok=True)
            self._held -= self._sizes[name]
            self._state.notify_all()

    def stop(self) -> None:
        """End every wait and, at the next piece that arrives, every download."""
        with self._state:
            self._stopped.set()
            self._state.notify_all()

    def _work(self) -> None:
        while (name := self._next()) is not None:
            try:
                path = self._fetch(name)
            except BaseException as error:  # whoever waits for the file gets it
                self._finished(name, None, error)
            else:
                self._finished(name, path, None)

    def _next(self) -> str | None:
        """The file to fetch next: one that a reader waits for, else the next in order that there is room for."""
        with self._state:
            while not self._stopped.is_set():
                name = self._wanted.pop(0) if self._wanted else self._next_ahead()
                if name is not None:
                    self._ahead = [other for other in self._ahead if other != name]
                    self._running.add(name)
                    if self._folder is not None and not (self._root / name).exists():
                        self._held += self._sizes[name]
                        self.peak_bytes = max(self.peak_bytes, self._held)
                    return name
                self._state.wait()
        return None

    def _next_ahead(self) -> str | None:
        if not self._ahead or (self._folder is not None and self._held + self._sizes[self._ahead[0]] > self._budget):
            return None
        return self._ahead[0]

    def _finished(self, name: str, path: Path | None, error: BaseException | None) -> None:
        with self._state:
            self._running.discard(name)
            if path is not None:
                self._ready[name] = path
            elif error is not None:
                self._failed[name] = error
            self._state.notify_all()

    def _fetch(self, name: str) -> Path:
        from huggingface_hub import hf_hub_download

        path = self._root / name
        if not path.exists():
            with explained(f"{self._origin.repo}: {name}", self._origin.repo):
                path = Path(
                    hf_hub_download(
                        self._origin.repo,
                        name,
                        revision=self._origin.commit,
                        local_dir=self._folder,
                        tqdm_class=_bar_of(self._stopped),
                    )
                )
        self._check(path, name)
        return path

    def _check(self, path: Path, name: str) -> None:
        """The file that came is the one whose header was read, and where it is hashed, the one that the Hub has."""
        if read_header(path, name).tensors != self._tensors[name]:
            raise CheckpointError([Problem(name, "the file whose header was read", "another one", "start again")])
        known = self.sha256.get(name)
        if known is not None and not self._verify:
            return
        found = _sha256(path, self._stopped)
        if known is not None and found != known:
            hint = f"delete {path} and start again"
            raise CheckpointError([Problem(name, f"sha256 {known}, as the Hub says", found, hint)])
        self.sha256[name] = found


def _tensors_by_file(checkpoint: Checkpoint) -> dict[str, tuple[TensorHeader, ...]]:
    found: dict[str, list[TensorHeader]] = {file.name: [] for file in checkpoint.files}
    for tensor in checkpoint.tensors.values():
        found[tensor.file].append(tensor)
    return {name: tuple(tensors) for name, tensors in found.items()}


def _sha256(path: Path, stopped: threading.Event) -> str:
    digest, buffer = hashlib.sha256(), bytearray(_BLOCK_BYTES)
    with path.open("rb", buffering=0) as file:
        while not stopped.is_set() and (count := file.readinto(buffer)):
            digest.update(memoryview(buffer)[:count])
    return digest.hexdigest()


class _StoppedError(Exception):
    """Raised in the middle of a download that nobody waits for any more."""


def _bar_of(stopped: threading.Event) -> type[Any]:
    """A progress bar class that shows nothing, this program having its own, and ends a download when told to stop."""

    class Bar(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - tqdm's own
            kwargs.pop("name", None)
            super().__init__(*args, **kwargs | {"disable": True})

        def update(self, n: float | None = 1) -> bool | None:
            if stopped.is_set():
                raise _StoppedError
            return bool(super().update(n))

    return Bar


@contextmanager
def temporary_folder(path: Path) -> Iterator[Path]:
    """An empty folder for files that are deleted one by one, and with it whatever is left."""
    import shutil

    shutil.rmtree(path, ignore_errors=True)
    path.mkdir()
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
