"""When Python's cyclic garbage collector may run: not while a plan grows and torch is imported, where it only walks."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused() -> Iterator[None]:
    """No collection in the block: reading headers, planning and importing torch make objects that all stay.

    A quarter of the time that they take would go into walking them again and again.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def resumed() -> Iterator[None]:
    """Collections inside a `paused` block again, but of what comes now: a plan lives as long as the run."""
    was_enabled = gc.isenabled()
    gc.freeze()
    gc.enable()
    try:
        yield
    finally:
        gc.unfreeze()
        if not was_enabled:
            gc.disable()
