"""Checkpoints that real quantizers wrote: a few are in the repository, the others outside of it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

_OWN = Path(__file__).parents[1] / "data" / "checkpoints"
_VARIABLE = "HUMMING_CONVERT_SHARED"


def genuine(name: str) -> Path:
    """The folder of checkpoint `name`; skips the test, saying why, where it is not to be had."""
    if (_OWN / name).is_dir():
        return _OWN / name
    shared = os.environ.get(_VARIABLE)
    if shared is None:
        pytest.skip(f"{name} is not in the repository, and {_VARIABLE} is not set")
    path = Path(shared) / "checkpoints" / name
    if not path.is_dir():
        pytest.skip(f"{name} is not in {_VARIABLE}")
    return path
