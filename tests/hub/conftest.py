"""A Hub on loopback, and the command line against it in processes of their own: the genuine client, nothing patched.

The client reads HF_ENDPOINT and its other variables when it is imported, hence the processes.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tests.hub_server.server import HubServer, running

import humming_convert.cli
import humming_loader

ROOT = Path(__file__).parents[2]
# The packages under test, wherever this process has them from.
_PATHS = [str(Path(str(package.__file__)).parents[1]) for package in (humming_convert.cli, humming_loader)]


@dataclass(slots=True)
class Hub:
    """The server, and how a process of the command line sees it."""

    server: HubServer
    home: Path
    env: dict[str, str] = field(default_factory=dict)

    def environ(self, **more: str) -> dict[str, str]:
        """The variables of a process: this Hub and an own cache; storage over LFS, since the server has no Xet."""
        kept = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
        ours = {
            "HF_ENDPOINT": self.server.url,
            "HF_HOME": str(self.home),
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "NO_PROXY": "127.0.0.1,localhost",
            "PYTHONPATH": os.pathsep.join([*_PATHS, os.environ.get("PYTHONPATH", "")]),
        }
        return kept | ours | self.env | more

    def run(self, *args: object, **more: str) -> subprocess.CompletedProcess[str]:
        """`humming-convert ARGS`."""
        words = [sys.executable, "-m", "humming_convert.cli", *map(str, args)]
        return subprocess.run(words, env=self.environ(**more), capture_output=True, text=True, timeout=300, cwd=ROOT)

    def ok(self, *args: object, **more: str) -> str:
        """The output of a command that succeeds."""
        done = self.run(*args, **more)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def fails(self, *args: object, **more: str) -> str:
        """The errors of a command that fails as it should: with words, and without a traceback."""
        done = self.run(*args, **more)
        assert done.returncode == 1, done.stdout
        assert "Traceback" not in done.stderr
        assert "internal" not in done.stderr
        return done.stderr

    def python(self, code: str, **more: str) -> subprocess.CompletedProcess[str]:
        """A program of its own against this Hub."""
        words = [sys.executable, "-c", code]
        return subprocess.run(words, env=self.environ(**more), capture_output=True, text=True, timeout=300, cwd=ROOT)


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    """A Hub with nothing on it."""
    with running(tmp_path / "hub-objects") as server:
        yield Hub(server, tmp_path / "hf-home")
