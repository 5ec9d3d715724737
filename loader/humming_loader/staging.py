"""Pinned host memory on the way to a GPU, kept between layers: pinning costs more than copying."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping

import torch

# Two a thread: while one is on its way to the device the other is read. 16 threads pin 512 MiB. Smaller ones are
# slower: threads then wait for each other in Python, 0.4 ms a piece (16 threads: 8 MiB 13 GB/s, 16 MiB 23).
BUFFER_BYTES = 16 << 20
BUFFERS = 2
# What is kept when nothing loads; a larger buffer, for an expert that needs one, is not.
KEPT_BUFFERS = 32

_kept: list[torch.Tensor] = []
_lock = threading.Lock()


def _take(size: int) -> torch.Tensor:
    if size <= BUFFER_BYTES:
        with _lock:
            if _kept:
                return _kept.pop()
    return torch.empty(max(size, BUFFER_BYTES), dtype=torch.uint8, device="cpu", pin_memory=True)


def _give_back(buffer: torch.Tensor) -> None:
    with _lock:
        if buffer.numel() == BUFFER_BYTES and len(_kept) < KEPT_BUFFERS:
            _kept.append(buffer)


def release() -> None:
    """Let go of the memory that is kept for the next layer."""
    with _lock:
        _kept.clear()


class Staging:
    """One thread's pinned buffers and its stream: a buffer is read into while the one before it is copied."""

    def __init__(self, ready: Mapping[torch.device, torch.cuda.Event]) -> None:
        """`ready` holds, for each device, what a copy to it must wait for."""
        self._ready = ready
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._under_way: deque[tuple[torch.Tensor, torch.cuda.Event]] = deque()
        self._held: torch.Tensor | None = None

    def buffer(self, size: int) -> torch.Tensor:
        """`size` bytes of pinned memory that no copy uses, until `send`; more than BUFFER_BYTES if asked for."""
        if len(self._under_way) >= BUFFERS:
            self._finish_one()
        self._held = _take(size)
        return self._held[:size]

    def send(self, buffer: torch.Tensor, target: torch.Tensor) -> None:
        """Copy `buffer`, the last one asked for, to `target` behind whatever this thread copied before."""
        stream = self._streams.get(target.device)
        if stream is None:
            stream = self._streams[target.device] = torch.cuda.Stream(target.device)  # type: ignore[no-untyped-call]
            # The allocator may have handed out memory that a kernel queued earlier still writes.
            stream.wait_event(self._ready[target.device])
        with torch.cuda.stream(stream):
            target.copy_(buffer, non_blocking=True)
        if self._held is not None:
            self._under_way.append((self._held, stream.record_event()))
            self._held = None

    def close(self) -> None:
        """Return when everything is copied; the buffers are for others then."""
        while self._under_way:
            self._finish_one()

    def _finish_one(self) -> None:
        buffer, copied = self._under_way.popleft()
        copied.synchronize()
        _give_back(buffer)
