"""A progress bar by bytes that is silent when the output is not a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from tqdm import tqdm


class ByteProgress(Protocol):
    """What long work reports to: how many bytes there are, how many are done, and what is being done."""

    def total(self, count: int) -> None: ...

    def advance(self, count: int) -> None: ...

    def label(self, text: str) -> None: ...


class _Bar:
    def __init__(self, bar: Any) -> None:  # noqa: ANN401 - tqdm carries no types
        self._bar = bar

    def total(self, count: int) -> None:
        self._bar.reset(total=count)

    def advance(self, count: int) -> None:
        self._bar.update(count)

    def label(self, text: str) -> None:
        self._bar.set_postfix_str(text, refresh=False)


@contextmanager
def byte_progress(description: str) -> Iterator[ByteProgress]:
    """A tqdm bar in bytes on standard error; tqdm itself stays quiet when that is not a terminal."""
    with tqdm(desc=description, unit="B", unit_scale=True, disable=None, total=0) as bar:
        yield _Bar(bar)
