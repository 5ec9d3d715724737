"""What the Hub refuses, and what cannot be reached: its reason, and what to do, without a traceback."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.hub.conftest import Hub
from tests.hub_server.faults import Fault
from tests.support.checkpoints import make_checkpoint


@pytest.fixture
def tiny(hub: Hub, tmp_path: Path) -> Hub:
    """A Hub with one small repository, `org/tiny`, in two files."""
    hub.server.store.publish("org/tiny", make_checkpoint(tmp_path / "tiny", layers=1, shards=2))
    return hub


def test_missing_and_private(tiny: Hub) -> None:
    words = tiny.fails("plan", "org/none")
    assert "org/none: the Hub says: no such repository, or a private one; check the name" in words
    assert "hf auth login" in words
    tiny.server.required_token = "hf_right"
    tiny.server.store.repositories["org/tiny"].private = True
    assert "no such repository, or a private one" in tiny.fails("plan", "org/tiny")
    assert "MoE layer" in tiny.ok("plan", "org/tiny", HF_TOKEN="hf_right")
    # Storage is another host: no token may go there.
    assert {seen.token for seen in tiny.server.traffic.matching("GET", "/cdn/")} == {""}


def test_gated(tiny: Hub) -> None:
    tiny.server.required_token = "hf_right"
    tiny.server.store.repositories["org/tiny"].gated = True
    for token in ({}, {"HF_TOKEN": "hf_other"}):
        tiny.server.required_token = "hf_right" if not token else None
        words = tiny.fails("plan", "org/tiny", **token)
        assert "a gated repository (Access to model org/tiny is restricted" in words
        assert f"ask for access on {tiny.server.url}/org/tiny" in words


def test_a_token_that_is_not_taken(tiny: Hub) -> None:
    tiny.server.required_token = "hf_right"
    words = tiny.fails("plan", "org/tiny", HF_TOKEN="hf_wrong")
    assert "a token that the Hub does not take (Invalid credentials in Authorization header)" in words
    assert "hf auth login" in words


def test_revisions_and_names(tiny: Hub) -> None:
    assert "no such revision (Invalid rev id: none)" in tiny.fails("plan", "org/tiny@none")
    assert "nothing there" in tiny.fails("plan", "org/tiny/extra")
    assert "a repository is named ORG/NAME" in tiny.fails("plan", "org/na--me")


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (403, "no permission (on purpose); use a token that may do this"),
        (404, "nothing there (on purpose)"),
        (429, "too many requests (on purpose); wait 7 seconds and run it again"),
        (500, "a fault of the Hub (HTTP 500) (on purpose); run it again later"),
        (503, "a fault of the Hub (HTTP 503) (on purpose); run it again later"),
    ],
)
def test_status_of_the_first_request(tiny: Hub, status: int, words: str) -> None:
    tiny.server.traffic.faults.append(Fault("GET", "/api/models/", status, {"Retry-After": "7"}, times=99))
    assert words in tiny.fails("plan", "org/tiny")


def test_busy_for_a_moment_is_waited_for(tiny: Hub) -> None:
    tiny.server.traffic.faults += [
        Fault("GET", "/resolve/.*-00001-of", 429, {"Retry-After": "0"}),
        Fault("GET", "/cdn/", 503),
    ]
    assert "MoE layer" in tiny.ok("plan", "org/tiny")
    assert {seen.status for seen in tiny.server.traffic.seen} >= {429, 503}


def test_out_of_reach(tiny: Hub) -> None:
    words = tiny.fails("plan", "org/tiny", HF_ENDPOINT="http://127.0.0.1:9")
    assert "http://127.0.0.1:9 out of reach (ConnectError" in words
    assert "check the network and HF_ENDPOINT" in words


def test_offline_needs_the_cache(tiny: Hub) -> None:
    words = tiny.fails("plan", "org/tiny", HF_HUB_OFFLINE="1")
    assert "org/tiny: expected it in the cache, since HF_HUB_OFFLINE is set, found nothing" in words
    assert "hf download org/tiny" in words
    assert not tiny.server.traffic.seen
    tiny.ok("plan", "org/tiny")
    # Headers were read, the files were not kept.
    assert "fetch the missing shard" in tiny.fails("plan", "org/tiny", HF_HUB_OFFLINE="1")
