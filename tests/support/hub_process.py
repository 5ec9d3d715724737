"""Processes that see a Hub on loopback: the client reads its variables when it is imported, so each has its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import humming_convert.cli
import humming_loader

ROOT = Path(__file__).parents[2]
# The packages under test, wherever this process has them from.
_PATHS = [str(Path(str(package.__file__)).parents[1]) for package in (humming_convert.cli, humming_loader)]
_TIMEOUT = 600


def environment(endpoint: str, home: Path, **more: str) -> dict[str, str]:
    """The variables of a process: this Hub and an own cache; storage over LFS, since the server has no Xet."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    ours = {
        "HF_ENDPOINT": endpoint,
        "HF_HOME": str(home),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "NO_PROXY": "127.0.0.1,localhost",
        "PYTHONPATH": os.pathsep.join([*_PATHS, os.environ.get("PYTHONPATH", "")]),
    }
    return kept | ours | more


def run_python(code: str, variables: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """A program of its own."""
    return run([sys.executable, "-c", code], variables)


def run(words: list[str], variables: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """A command, with its output."""
    return subprocess.run(words, env=dict(variables), capture_output=True, text=True, timeout=_TIMEOUT, cwd=ROOT)
