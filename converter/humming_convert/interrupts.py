"""Ctrl-C, SIGTERM and SIGHUP: one clean way out, and stretches of work that they may not cut in two."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

_received: list[int] = []


class Interrupted(SystemExit):
    """A signal asked the command to stop; the exit code is 128 + the signal's number, as shells have it."""

    def __init__(self, number: int) -> None:
        self.exit_code = 128 + number
        super().__init__(self.exit_code)


@contextmanager
def raising() -> Iterator[None]:
    """Within the block each of the signals raises `Interrupted` in the main thread, unless the caller ignores it."""

    def stop(number: int, frame: FrameType | None) -> None:
        _received.append(number)
        raise Interrupted(number)

    try:
        with _handlers(stop):
            yield
    finally:
        _received.clear()


def raise_received() -> None:
    """Raise `Interrupted` for a signal that came but was lost: what is raised in a destructor is thrown away."""
    if _received:
        raise Interrupted(_received[0])


@contextmanager
def held_back() -> Iterator[None]:
    """Within the block the signals wait; the first that came takes effect at its end.

    For work that breaks when an exception lands in the middle of it: importing C++ extensions, renaming two folders.
    """
    waiting: list[int] = []
    with _handlers(lambda number, _: waiting.append(number)):
        yield
    if waiting:
        signal.raise_signal(waiting[0])


@contextmanager
def _handlers(handle: signal._HANDLER) -> Iterator[None]:
    """Only the main thread may set handlers; in others nothing changes, and no signal arrives there anyway."""
    before = {}
    if threading.current_thread() is threading.main_thread():
        for number in SIGNALS:
            handler = signal.getsignal(number)
            # None: not set by Python, so it could not be put back.
            if handler not in (signal.SIG_IGN, None):
                before[number] = handler
                signal.signal(number, handle)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
