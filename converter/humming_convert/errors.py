"""The closed family of errors. An error holds facts; text is made from them in one place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# What torch (a RuntimeError), the C++ library and the operating system call it; Python's own is MemoryError.
_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "cannot allocate memory", "not enough memory", "bad_alloc")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, of the machine or of a GPU: that says nothing about the checkpoint."""
    if isinstance(error, MemoryError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError | OSError) and any(words in text for words in _OUT_OF_MEMORY)


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong with an input: where, what was expected, what was found, what to do."""

    where: str
    expected: str
    found: str
    hint: str = ""

    def __str__(self) -> str:
        text = f"{self.where}: expected {self.expected}, found {self.found}"
        return f"{text}; {self.hint}" if self.hint else text


class ConvertError(Exception):
    """Base of every error that this package raises on purpose; the command line prints it and exits with 1."""


class CheckpointError(ConvertError):
    """The source cannot be read as one whole, consistent checkpoint; carries every problem found."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))


class UnsupportedError(ConvertError):
    """The source is sound, but it or the requested target is outside what Humming's kernels take."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))


class NothingToConvertError(ConvertError):
    """The source holds no quantized routed experts."""


class OutputError(ConvertError):
    """The output folder cannot be made, written or trusted."""


class VerificationError(ConvertError):
    """A finished output is not what its manifest, or its source, says."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))
