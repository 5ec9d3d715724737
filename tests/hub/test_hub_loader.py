"""The loader with a repository instead of a folder: the manifest, then the experts files of the layers it builds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.hub.conftest import Hub
from tests.hub.outputs import make_output

LAYER = "model.layers.1.mlp.experts"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An output of three layers."""
    return make_output(tmp_path_factory.mktemp("made"), layers=3)


_LOAD = """
import hashlib, json, sys
import torch
from humming_loader import read_manifest
from humming_loader.checkpoint import find_output
from humming_loader.load import empty_target, fill
from humming_loader.layer import moves_of
from humming_loader.slicing import slice_layer

where, layer = {where!r}, {layer!r}
manifest = read_manifest(where)
found = {{}}
for rank in range(2):
    part = slice_layer(layer, manifest.layers[layer], tp_rank=0, tp_size=1, experts=[2 * rank, 2 * rank + 1])
    tensors = {{
        name: {{key: empty_target(piece, "cpu") for key, piece in sublayer.tensors.items()}}
        for name, sublayer in part.sublayers.items()
    }}
    fill(find_output(where), moves_of(part, tensors), verify=True)
    for name, sublayer in tensors.items():
        for key, tensor in sublayer.items():
            data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            found[f"{{rank}} {{name}} {{key}}"] = hashlib.sha256(data).hexdigest()
print(json.dumps(found))
"""


def test_only_the_files_of_the_layer_are_fetched(hub: Hub, made: Path) -> None:
    commit = hub.server.store.publish("me/packed", made)
    there = hub.python(_LOAD.format(where="me/packed", layer=LAYER))
    assert there.returncode == 0, there.stderr
    here = hub.python(_LOAD.format(where=str(made), layer=LAYER))
    assert json.loads(there.stdout) == json.loads(here.stdout)
    wanted = {
        f"/me/packed/resolve/{commit.oid}/humming/manifest.json",
        f"/me/packed/resolve/{commit.oid}/humming/experts-00002-of-00003.safetensors",
    }
    assert {seen.path for seen in hub.server.traffic.matching("GET", "/resolve/")} | {
        seen.path for seen in hub.server.traffic.matching("HEAD", "/resolve/")
    } == wanted
    assert len(hub.server.traffic.matching("GET", "/cdn/")) == 1

    # A second process finds everything in the cache, and another layer costs one more file.
    hub.server.traffic.clear()
    again = hub.python(_LOAD.format(where="me/packed", layer=LAYER), HF_HUB_OFFLINE="1")
    assert again.stdout == there.stdout, again.stderr
    assert not hub.server.traffic.seen
    other = hub.python(_LOAD.format(where="me/packed", layer="model.layers.2.mlp.experts"))
    assert other.returncode == 0, other.stderr
    assert len(hub.server.traffic.matching("GET", "/cdn/")) == 1


def test_a_repository_that_moves_on_while_a_process_loads(hub: Hub, made: Path, tmp_path: Path) -> None:
    """Every file of one process is of one commit."""
    first = hub.server.store.publish("me/packed", made)
    other = make_output(tmp_path, layers=2, name="other")

    def move_on(seen: object) -> None:
        hub.server.traffic.after = None
        hub.server.store.publish("me/packed", other)

    hub.server.traffic.after = move_on
    found = hub.python(_LOAD.format(where="me/packed", layer=LAYER))
    assert found.returncode == 0, found.stderr
    experts = hub.server.traffic.matching("HEAD", "/resolve/.*/humming/experts-")
    commits = {seen.path.split("/")[4] for seen in experts}
    assert commits == {first.oid}


_READ = "from humming_loader import read_manifest; read_manifest({where!r})"


def test_reasons(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "config.json").write_text("{}")
    hub.server.store.publish("me/plain", tmp_path / "plain")
    words = hub.python(_READ.format(where="me/plain")).stderr
    assert "HubError: me/plain: humming/manifest.json: the Hub says: no such file in the repository" in words
    words = hub.python(_READ.format(where="me/none")).stderr
    assert "HubError: me/none: the Hub says: no such repository, or a private one" in words
    words = hub.python(_READ.format(where="me/none"), HF_HUB_OFFLINE="1").stderr
    assert "it not in the cache while HF_HUB_OFFLINE is set; fetch it once: hf download me/none" in words
    words = hub.python(_READ.format(where=str(tmp_path / "plain"))).stderr
    assert "OutputMissingError" in words
