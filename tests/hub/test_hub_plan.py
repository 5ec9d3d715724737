"""`plan ORG/NAME`: headers and config files only, counted by the server."""

from __future__ import annotations

import json
from pathlib import Path

from tests.hub.conftest import Hub
from tests.hub.sparse import write_qwen3
from tests.support.checkpoints import make_checkpoint

MOST = 0.02


def test_plan_of_sixty_shards_reads_at_most_two_percent(hub: Hub, tmp_path: Path) -> None:
    total = write_qwen3(tmp_path / "large", layers=8, shards=60)
    commit = hub.server.store.publish("org/large", tmp_path / "large", is_sparse=True)
    found = json.loads(hub.ok("plan", "org/large", "--json"))
    assert found["source"] == "org/large"
    assert found["commit"] == commit.oid
    assert found["files"] == 60
    assert len(found["layers"]) == 8
    sent = hub.server.traffic.sent_bytes()
    assert sent <= MOST * total
    # Far below that: the headers, the index, config.json and the listing, each once.
    headers = hub.server.traffic.matching("GET", "/cdn/")
    assert len(headers) == 60
    assert all(seen.range.startswith("bytes=0-") for seen in headers)
    index = (tmp_path / "large" / "model.safetensors.index.json").stat().st_size
    assert sent <= 3 * index
    assert not hub.server.traffic.matching("GET", "tokenizer")
    # A file goes when its last layer is finished, so never more than a few layers' files are there.
    assert found["low_disk_bytes"] < 0.8 * total


def test_plan_is_that_of_the_local_folder(hub: Hub, tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "tiny", "mixtral", "awq", shards=3)
    (source / "assets").mkdir()
    (source / "assets" / "a.txt").write_text("a")
    (source / "pytorch_model.bin").write_text("other weights")
    commit = hub.server.store.publish("org/tiny", source)
    there, here = (json.loads(hub.ok("plan", where, "--json")) for where in ("org/tiny", source))
    assert there.pop("source") == "org/tiny"
    assert there.pop("commit") == commit.oid
    assert there.pop("low_disk_bytes") > 0
    assert (here.pop("source"), here.pop("commit"), here.pop("low_disk_bytes")) == ("tiny", None, None)
    assert there == here
    assert any("assets/, pytorch_model.bin: not copied" in note for note in here["notes"])


def test_plan_of_one_file_without_an_index(hub: Hub, tmp_path: Path) -> None:
    hub.server.store.publish("org/one", make_checkpoint(tmp_path / "one", "gpt_oss", "mxfp4_gpt_oss"))
    text = hub.ok("plan", "org/one")
    assert "2 MoE layers" in text
    assert "with --low-disk at most" in text


def test_a_revision_is_resolved_once(hub: Hub, tmp_path: Path) -> None:
    store = hub.server.store
    first = store.publish("org/two", make_checkpoint(tmp_path / "a", layers=1, shards=2))
    store.publish("org/two", make_checkpoint(tmp_path / "b", layers=3, shards=2))
    store.repositories["org/two"].branches["old"] = [first]
    assert len(json.loads(hub.ok("plan", "org/two@old", "--json"))["layers"]) == 1
    assert len(hub.server.traffic.matching("GET", "/api/models/")) == 1
    seen = hub.server.traffic.matching("GET", "/resolve/")
    downloads = {one.path.removeprefix("/org/two/resolve/") for one in seen}
    assert downloads
    assert all(path.startswith(first.oid) for path in downloads)
    assert len(json.loads(hub.ok("plan", f"org/two@{first.oid}", "--json"))["layers"]) == 1
    assert len(json.loads(hub.ok("plan", "org/two", "--json"))["layers"]) == 3


def test_a_server_without_ranges_is_not_read_to_the_end(hub: Hub, tmp_path: Path) -> None:
    total = write_qwen3(tmp_path / "large", layers=1, shards=2)
    hub.server.store.publish("org/large", tmp_path / "large", is_sparse=True)
    hub.server.has_ranges = False
    hub.ok("plan", "org/large")
    assert hub.server.traffic.sent_bytes() < 0.1 * total


def test_faults_of_a_repository_are_named(hub: Hub, tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "tiny", shards=3)
    (source / "model-00002-of-00003.safetensors").unlink()
    hub.server.store.publish("org/tiny", source)
    words = "model-00002-of-00003.safetensors: expected a file of the repository, as the index says, found none"
    assert words in hub.fails("plan", "org/tiny")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.json").write_text("{}")
    hub.server.store.publish("org/empty", tmp_path / "empty")
    assert "org/empty: expected one .safetensors file" in hub.fails("plan", "org/empty")
    (source / "model-00002-of-00003.safetensors").write_bytes(b"\xff" * 100)
    hub.server.store.publish("org/broken", source)
    assert "model-00002-of-00003.safetensors: expected a header of at most" in hub.fails("plan", "org/broken")
