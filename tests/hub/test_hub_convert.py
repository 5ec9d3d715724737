"""Converting from the Hub gives the bytes that converting a folder gives, whatever happens on the way."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from tests.hub.conftest import ROOT, Hub
from tests.hub.outputs import contents, split_in_order
from tests.hub_server.faults import Fault, Seen
from tests.hub_server.server import Hold
from tests.support.checkpoints import make_checkpoint

SHARDS = 6
TARGET = ("--target", "sm90")


def packed(out: Path) -> dict[str, bytes]:
    """The files whose bytes depend on the source's alone."""
    return {name: data for name, data in contents(out).items() if name.endswith((".safetensors", "index.json"))}


def manifest_of(out: Path) -> dict[str, Any]:
    """The manifest's document."""
    document: dict[str, Any] = json.loads((out / "humming" / "manifest.json").read_text())
    return document


@pytest.fixture
def tiny(hub: Hub, tmp_path: Path) -> Hub:
    """A Hub with `org/tiny`: four layers in six files, each layer's tensors in neighbouring ones."""
    source = make_checkpoint(tmp_path / "tiny", layers=4, shards=SHARDS)
    (source / "README.md").write_text("---\nlicense: other\nlicense_name: own\nlicense_link: LICENSE\n---\n# tiny\n")
    (source / "LICENSE").write_text("words")
    hub.server.store.publish("org/tiny", source)
    return hub


def test_same_bytes_and_provenance(tiny: Hub, tmp_path: Path) -> None:
    commit = tiny.server.store.repositories["org/tiny"].find("main")
    assert commit is not None
    tiny.ok("convert", "org/tiny", tmp_path / "there", *TARGET)
    tiny.ok("convert", tmp_path / "tiny", tmp_path / "here", *TARGET)
    assert packed(tmp_path / "there") == packed(tmp_path / "here")
    there, here = manifest_of(tmp_path / "there"), manifest_of(tmp_path / "here")
    assert there["layers"] == here["layers"]
    assert there["source"]["name"] == "org/tiny"
    assert there["source"]["revision"] == commit.oid
    known = {name: blob.oid for name, blob in commit.files.items() if blob.is_lfs}
    assert {file["name"]: file["sha256"] for file in there["source"]["files"]} == known
    assert {file["sha256"] for file in here["source"]["files"]} == {None}

    tiny.server.traffic.clear()
    words = tiny.ok("verify", tmp_path / "there", "--source", "org/tiny")
    assert "codes and scales all equal" in words
    # Everything is in the cache now: no network is needed.
    tiny.server.traffic.clear()
    words = tiny.ok("verify", tmp_path / "there", "--source", "org/tiny", HF_HUB_OFFLINE="1")
    assert "codes and scales all equal" in words
    tiny.ok("convert", "org/tiny", tmp_path / "offline", *TARGET, HF_HUB_OFFLINE="1")
    assert not tiny.server.traffic.seen
    assert packed(tmp_path / "offline") == packed(tmp_path / "here")
    assert manifest_of(tmp_path / "offline")["source"] == there["source"]


def test_a_download_that_is_cut_goes_on_where_it_was(hub: Hub, tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "large", layers=2, experts=16, hidden=512, intermediate=512, shards=2)
    commit = hub.server.store.publish("org/large", source)
    blob = commit.files["model-00002-of-00002.safetensors"]
    # Later than the client's own pieces of 10 MiB, of which it keeps whole ones.
    cut = Fault("GET", f"/cdn/{blob.oid}", cut_after=11 << 20, is_whole=True)
    hub.server.traffic.faults.append(cut)
    hub.ok("convert", "org/large", tmp_path / "there", *TARGET)
    ranges = [seen.range for seen in hub.server.traffic.matching("GET", f"/cdn/{blob.oid}")]
    assert ranges[1:] == ["", f"bytes={10 << 20}-"]
    hub.ok("convert", source, tmp_path / "here", *TARGET)
    assert packed(tmp_path / "there") == packed(tmp_path / "here")


def test_low_disk_keeps_few_files_and_leaves_none(tiny: Hub, tmp_path: Path) -> None:
    # Tensors in the order of their layers, as real checkpoints have them.
    split_in_order(make_checkpoint(tmp_path / "ordered-one", layers=12, experts=2), tmp_path / "ordered", 12)
    tiny.server.store.publish("org/ordered", tmp_path / "ordered")
    plan = json.loads(tiny.ok("plan", "org/ordered", "--json"))
    folder = tmp_path / ".out.humming-source"
    most = 0

    def measure(seen: Seen) -> None:
        nonlocal most
        files = list(folder.glob("*.safetensors")) if folder.is_dir() else []
        most = max(most, sum(path.stat().st_size for path in files if path.exists()))

    tiny.server.traffic.clear()
    tiny.server.traffic.after = measure
    tiny.ok("convert", "org/ordered", tmp_path / "out", *TARGET, "--low-disk", "--workers", "2")
    total = sum(path.stat().st_size for path in (tmp_path / "ordered").glob("*.safetensors"))
    assert 0 < most <= plan["low_disk_bytes"] < 0.6 * total
    # Each file was fetched once, and nothing of them is left: not beside the output, and not in the cache.
    whole = [seen for seen in tiny.server.traffic.matching("GET", "/cdn/") if not seen.range]
    assert len(whole) == len({seen.path for seen in whole}) == 12
    assert not folder.exists()
    assert not list(tiny.home.rglob("*.safetensors"))
    tiny.ok("convert", tmp_path / "ordered", tmp_path / "here", *TARGET)
    assert packed(tmp_path / "out") == packed(tmp_path / "here")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_in_the_middle_of_a_download(tiny: Hub, tmp_path: Path, number: signal.Signals) -> None:
    tiny.server.hold = hold = Hold("/cdn/")
    words = [sys.executable, "-m", "humming_convert.cli", "convert", "org/tiny", str(tmp_path / "out"), *TARGET]
    process = subprocess.Popen(
        [*words, "--low-disk"], env=tiny.environ(), cwd=ROOT, stderr=subprocess.PIPE, text=True
    )
    assert hold.stuck.wait(60)
    process.send_signal(number)
    threading.Timer(1, hold.go_on.set).start()
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert "Traceback" not in errors
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith((".out", "out"))]


def test_other_bytes_than_the_hub_says_are_refused(tiny: Hub, tmp_path: Path) -> None:
    commit = tiny.server.store.repositories["org/tiny"].find("main")
    assert commit is not None
    blob = commit.files["model-00002-of-00006.safetensors"]
    assert blob.path is not None
    data = bytearray(blob.path.read_bytes())
    data[-1] ^= 1
    blob.path.write_bytes(data)
    words = tiny.fails("convert", "org/tiny", tmp_path / "out", *TARGET, "--hash-source")
    assert f"model-00002-of-00006.safetensors: expected sha256 {blob.oid}, as the Hub says" in words
    assert not (tmp_path / "out").exists()


def test_a_download_that_never_works(tiny: Hub, tmp_path: Path) -> None:
    tiny.server.traffic.faults.append(Fault("GET", "/cdn/", 403, times=99))
    words = tiny.fails("convert", "org/tiny", tmp_path / "out", *TARGET)
    assert "no permission" in words
    assert not (tmp_path / "out").exists()
