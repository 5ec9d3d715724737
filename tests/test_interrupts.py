"""Signals at any moment of a run: the right exit code, and nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from humming_convert import interrupts
from humming_convert.output import OutputFolder
from tests.support.checkpoints import make_checkpoint


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Enough layers that a run is under way for a while after its imports."""
    return make_checkpoint(tmp_path_factory.mktemp("interrupts") / "source", layers=24, experts=16)


def wait_for(process: subprocess.Popen[str], found: Path, pattern: str) -> None:
    """Until something in `found` matches `pattern`."""
    end = time.monotonic() + 60
    while not any(found.glob(pattern)):
        assert process.poll() is None
        assert time.monotonic() < end
        time.sleep(0.002)


# The staging folder is made right before torch and Humming are imported, which takes a second or more.
@pytest.mark.parametrize(
    ("number", "pattern", "delay"),
    [
        (signal.SIGINT, ".out.humming-partial", 0.0),
        (signal.SIGINT, ".out.humming-partial", 0.2),
        (signal.SIGINT, ".out.humming-partial", 0.5),
        (signal.SIGINT, ".out.humming-partial", 0.9),
        (signal.SIGINT, ".out.humming-partial/humming/.*", 0.0),
        (signal.SIGINT, ".out.humming-partial/humming/experts-00002*", 0.01),
        (signal.SIGTERM, ".out.humming-partial", 0.3),
        (signal.SIGTERM, ".out.humming-partial/humming/*", 0.0),
        (signal.SIGHUP, ".out.humming-partial/humming/*", 0.02),
    ],
)
def test_a_signal_leaves_its_code_and_nothing_else(
    number: signal.Signals, pattern: str, delay: float, source: Path, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "humming_convert.cli", str(source), str(tmp_path / "out"), "--target", "sm90"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        wait_for(process, tmp_path, pattern)
        time.sleep(delay)
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 128 + number, err
    assert err.splitlines()[-1] == "error: interrupted; nothing that looks whole was left behind"
    assert "Traceback" not in err
    assert "Exception ignored" not in err
    assert out == ""
    assert list(tmp_path.iterdir()) == []


def test_a_signal_that_the_caller_ignores_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with interrupts.raising(), interrupts.held_back():
            os.kill(os.getpid(), signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def held_back_for(number: signal.Signals, done: list[str]) -> None:
    with interrupts.held_back():
        signal.raise_signal(number)
        done.append("whole")
    done.append("not reached")


def test_held_back_signals_come_at_the_end() -> None:
    done: list[str] = []
    before = [signal.getsignal(number) for number in interrupts.SIGNALS]
    with pytest.raises(KeyboardInterrupt):
        held_back_for(signal.SIGINT, done)
    with pytest.raises(interrupts.Interrupted) as caught, interrupts.raising():
        held_back_for(signal.SIGTERM, done)
    assert caught.value.code == 143
    assert done == ["whole", "whole"]
    assert [signal.getsignal(number) for number in interrupts.SIGNALS] == before


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_signal_lost_in_a_destructor_is_not_forgotten(tmp_path: Path) -> None:
    folder = OutputFolder(tmp_path / "out", source_root=tmp_path / "source", overwrite=False)

    class Unlucky:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGINT)

    def lose() -> None:
        with interrupts.raising():
            unlucky = Unlucky()
            del unlucky
            folder.path("config.json")

    with pytest.raises(interrupts.Interrupted):
        lose()


def test_other_threads_set_no_handlers() -> None:
    seen = []

    def work() -> None:
        with interrupts.raising(), interrupts.held_back():
            seen.append(signal.getsignal(signal.SIGTERM))

    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [before]
