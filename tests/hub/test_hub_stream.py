"""`convert --push`: files are sent while others are made, and a run that broke sends nothing twice."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.hub.conftest import ROOT, Hub
from tests.hub.outputs import committed, contents
from tests.hub_server.faults import Fault, Seen
from tests.support.checkpoints import make_checkpoint

TARGET = ("--target", "sm90")
LAYERS = 6


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A checkpoint of several layers."""
    return make_checkpoint(tmp_path / "source", layers=LAYERS, shards=2)


def test_experts_files_are_sent_before_the_output_is_there(hub: Hub, source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    early = 0

    def look(seen: Seen) -> None:
        nonlocal early
        early += seen.path.endswith("/complete") and not out.exists()

    hub.server.traffic.after = look
    hub.server.required_token = "hf_right"
    words = hub.ok("convert", source, out, *TARGET, "--push", "me/packed", "--private", HF_TOKEN="hf_right")
    assert early == LAYERS
    history = hub.server.store.repositories["me/packed"].branches["main"]
    assert len(history) == 2
    assert committed(history[-1]) == contents(out)
    assert "are on me/packed: " in words
    assert hub.server.store.repositories["me/packed"].private
    assert "vllm serve me/packed" in (out / "README.md").read_text()


def test_a_failing_upload_costs_no_conversion(hub: Hub, source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    hub.server.traffic.faults.append(Fault("POST", "/complete", 403, times=99))
    words = hub.fails("convert", source, out, *TARGET, "--push", "me/packed")
    assert f"{out}: is whole, but was not published: me/packed: upload: the Hub says: no permission" in words
    assert f"`humming-convert push {out} me/packed` sends what is missing" in words
    assert len(hub.server.store.repositories["me/packed"].branches["main"]) == 1
    hub.server.traffic.clear()
    hub.ok("push", out, "me/packed")
    assert committed(hub.server.store.repositories["me/packed"].find("main")) == contents(out)


def test_a_killed_run_sends_nothing_twice(hub: Hub, source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = [sys.executable, "-m", "humming_convert.cli", "convert", str(source), str(out), *TARGET]
    process = subprocess.Popen([*words, "--push", "me/packed"], env=hub.environ(), cwd=ROOT)

    def kill(seen: Seen) -> None:
        if seen.path.endswith("/verify"):
            process.kill()

    hub.server.traffic.after = kill
    process.wait(120)
    hub.server.traffic.after = None
    assert not out.exists()
    there = set(hub.server.store.objects)
    assert there
    hub.server.traffic.clear()
    hub.ok("convert", source, out, *TARGET, "--push", "me/packed")
    assert committed(hub.server.store.repositories["me/packed"].find("main")) == contents(out)
    sent_again = [seen.path for seen in hub.server.traffic.matching("PUT", "") if seen.path.split("/")[2] in there]
    assert not sent_again


def test_nothing_is_converted_for_a_repository_that_takes_nothing(hub: Hub, source: Path, tmp_path: Path) -> None:
    hub.server.required_token = "hf_right"
    words = hub.fails("convert", source, tmp_path / "out", *TARGET, "--push", "me/packed")
    assert "You don't have the rights to create a model" in words
    assert not (tmp_path / "out").exists()
