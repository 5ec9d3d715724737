"""A Hub on loopback, and the command line against it in processes of their own: the genuine client, nothing patched.

The client reads HF_ENDPOINT and its other variables when it is imported, hence the processes.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.hub_server.server import HubServer, running
from tests.support import hub_process
from tests.support.hub_process import ROOT

__all__ = ["ROOT", "Hub"]


@dataclass(slots=True)
class Hub:
    """The server, and how a process of the command line sees it."""

    server: HubServer
    home: Path

    def environ(self, **more: str) -> dict[str, str]:
        """The variables of a process that sees this Hub."""
        return hub_process.environment(self.server.url, self.home, **more)

    def run(self, *args: object, **more: str) -> subprocess.CompletedProcess[str]:
        """`humming-convert ARGS`."""
        words = [sys.executable, "-m", "humming_convert.cli", *map(str, args)]
        return hub_process.run(words, self.environ(**more))

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
        return hub_process.run_python(code, self.environ(**more))


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    """A Hub with nothing on it."""
    with running(tmp_path / "hub-objects") as server:
        yield Hub(server, tmp_path / "hf-home")
