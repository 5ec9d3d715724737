"""`push`: one commit that is whole or not there, resumed uploads, and what is refused before a byte is sent."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tests.hub.conftest import Hub
from tests.hub.outputs import committed, contents, make_output
from tests.hub_server.faults import Fault
from tests.hub_server.store import Repository


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An output of two layers; tests copy what they change."""
    return make_output(tmp_path_factory.mktemp("made"))


def repository(hub: Hub, name: str = "me/packed") -> Repository:
    """A repository of the server."""
    return hub.server.store.repositories[name]


def test_bytes_arrive_in_one_commit(hub: Hub, made: Path) -> None:
    words = hub.ok("push", made, "me/packed")
    history = repository(hub).branches["main"]
    assert [commit.title for commit in history] == ["initial commit", "out-source, packed for Humming on sm90"]
    assert committed(history[-1]) == contents(made)
    assert "humming-kernels" in history[-1].description
    assert f"are on me/packed: {hub.server.url}/me/packed/commit/{history[-1].oid}" in words
    assert not repository(hub).private
    large = [blob for blob in history[-1].files.values() if blob.is_lfs]
    assert {name for name, blob in history[-1].files.items() if blob.is_lfs} == {
        "humming/experts-00001-of-00002.safetensors",
        "humming/experts-00002-of-00002.safetensors",
        "model.safetensors",
    }
    assert hub.server.traffic.received_bytes("/lfs/") >= sum(blob.size for blob in large)

    hub.server.traffic.clear()
    assert "me/packed has all of" in hub.ok("push", made, "me/packed")
    assert not hub.server.traffic.matching("PUT", "")
    assert len(repository(hub).branches["main"]) == 2


def test_a_connection_cut_in_the_middle_of_an_upload(hub: Hub, made: Path) -> None:
    cut = Fault("PUT", "/lfs/[0-9a-f]+/2", cut_after=100_000)
    busy = Fault("PUT", "/lfs/[0-9a-f]+/1", 503)
    hub.server.traffic.faults += [cut, busy]
    hub.ok("push", made, "me/packed")
    assert cut.times == busy.times == 0
    assert committed(repository(hub).find("main")) == contents(made)
    # The parts that had arrived were not sent again: only the ones that failed.
    parts = [seen.path for seen in hub.server.traffic.matching("PUT", "/lfs/[0-9a-f]+/") if seen.status]
    assert len(parts) == len(set(parts)) + 1


def test_a_broken_push_sends_only_what_is_missing(hub: Hub, made: Path) -> None:
    second = "humming/experts-00002-of-00002.safetensors"
    hub.server.traffic.faults.append(Fault("PUT", "/lfs/[0-9a-f]+/3", 403, times=1))
    words = hub.fails("push", made, "me/packed")
    assert "me/packed: upload: the Hub says: no permission" in words
    assert [commit.title for commit in repository(hub).branches["main"]] == ["initial commit"]
    there = sum(path.stat().st_size for path in hub.server.store.objects.values())
    assert there > 0
    hub.server.traffic.clear()
    hub.ok("push", made, "me/packed")
    assert committed(repository(hub).find("main")) == contents(made)
    everything = sum(path.stat().st_size for path in made.rglob("*.safetensors"))
    assert sum(seen.received for seen in hub.server.traffic.matching("PUT", "")) == everything - there
    assert (made / second).is_file()


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (403, "commit: the Hub says: no permission (on purpose)"),
        (409, "the branch changed meanwhile (on purpose); run the same command again"),
        (412, "the branch changed meanwhile (on purpose); run the same command again"),
        (429, "too many requests (on purpose); wait a while and run it again"),
        (500, "a fault of the Hub (HTTP 500) (on purpose); run it again later; what was transferred is kept"),
    ],
)
def test_a_commit_that_is_not_taken_leaves_nothing(hub: Hub, made: Path, status: int, words: str) -> None:
    hub.server.traffic.faults.append(Fault("POST", "/commit/", status))
    assert words in hub.fails("push", made, "me/packed")
    assert len(repository(hub).branches["main"]) == 1
    hub.server.traffic.clear()
    hub.ok("push", made, "me/packed")
    assert not hub.server.traffic.matching("PUT", "")
    assert committed(repository(hub).find("main")) == contents(made)


def test_an_upload_whose_commit_was_overtaken(hub: Hub, made: Path) -> None:
    hub.server.store.create("me/packed")

    def overtake(seen: object) -> None:
        hub.server.traffic.after = None
        repository(hub).add("main", {"notes.txt": hub.server.store.small(b"notes")}, "another")

    hub.server.traffic.after = overtake
    assert "the branch changed meanwhile (A commit has happened since" in hub.fails("push", made, "me/packed")
    hub.ok("push", made, "me/packed")
    assert committed(repository(hub).find("main")) == contents(made) | {"notes.txt": b"notes"}


def test_pull_request_branch_and_private(hub: Hub, made: Path) -> None:
    hub.server.store.create("me/packed")
    words = hub.ok("push", made, "me/packed", "--create-pr")
    assert f"{hub.server.url}/me/packed/discussions/1" in words
    assert len(repository(hub).branches["main"]) == 1
    assert committed(repository(hub).find("refs/pr/1")) == contents(made)

    hub.server.traffic.clear()
    hub.ok("push", made, "me/packed", "--revision", "sm90")
    assert len(repository(hub).branches["main"]) == 1
    assert committed(repository(hub).find("sm90")) == contents(made)
    assert not hub.server.traffic.matching("PUT", "")

    hub.server.required_token = "hf_right"
    hub.ok("push", made, "me/secret", "--private", "--revision", "sm90", HF_TOKEN="hf_right")
    assert repository(hub, "me/secret").private
    assert committed(repository(hub, "me/secret").find("sm90")) == contents(made)


def test_dry_run_changes_nothing(hub: Hub, made: Path) -> None:
    words = hub.ok("push", made, "me/packed", "--dry-run")
    assert "would go to me/packed; nothing was sent" in words
    assert "humming/experts-00002-of-00002.safetensors" in words
    assert not hub.server.store.repositories
    assert {seen.method for seen in hub.server.traffic.seen} == {"GET"}


def test_an_earlier_output_is_replaced_whole(hub: Hub, made: Path, tmp_path: Path) -> None:
    hub.ok("push", made, "me/packed")
    smaller = make_output(tmp_path, layers=1, name="smaller")
    words = hub.ok("push", smaller, "me/packed")
    assert "removed there: humming/experts-00002-of-00002.safetensors" in words
    assert committed(repository(hub).find("main")) == contents(smaller)


def test_what_is_no_whole_output_is_not_sent(hub: Hub, made: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(made, out)
    file = out / "humming" / "experts-00001-of-00002.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert "experts-00001-of-00002.safetensors" in hub.fails("push", out, "me/packed")
    file.unlink()
    assert "experts-00001-of-00002.safetensors" in hub.fails("push", out, "me/packed")
    (out / "humming" / "manifest.json").write_text("{}")
    assert "manifest.json: format_version" in hub.fails("push", out, "me/packed")
    (out / "humming" / "manifest.json").unlink()
    assert "expected a manifest" in hub.fails("push", out, "me/packed")
    assert "expected ORG/NAME, found 'packed'" in hub.fails("push", made, "packed")
    assert not hub.server.traffic.seen


def test_other_weights_are_not_mixed_in(hub: Hub, made: Path, tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "model-00001-of-00002.safetensors").write_bytes(b"weights")
    hub.server.store.publish("me/packed", tmp_path / "theirs")
    words = hub.fails("push", made, "me/packed")
    assert "holds weights that humming-convert did not put there: model-00001-of-00002.safetensors" in words
    assert not hub.server.traffic.matching("(PUT|POST)", "")


def test_nobody_may_push_here(hub: Hub, made: Path) -> None:
    hub.server.required_token = "hf_right"
    assert "You don't have the rights to create a model" in hub.fails("push", made, "me/packed")
    hub.server.store.create("me/packed")
    words = hub.fails("push", made, "me/packed")
    assert "You don't have the rights to do this" in words
    assert "hf auth login" in words
    hub.ok("push", made, "me/packed", HF_TOKEN="hf_right")
    assert {seen.token for seen in hub.server.traffic.matching("PUT", "")} == {""}
    assert committed(repository(hub).find("main")) == contents(made)
    manifest = json.loads(committed(repository(hub).find("main"))["humming/manifest.json"])
    assert manifest["source"]["revision"] is None
