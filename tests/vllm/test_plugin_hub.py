"""vLLM with a repository's name instead of a folder: what it and the plugin fetch from a Hub on loopback."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.hub_server.server import running
from tests.support.hub_process import environment, run_python

pytestmark = pytest.mark.vllm

_PROGRAM = """
import json, pickle
from vllm.model_executor.model_loader.weight_utils import download_weights_from_hf
from humming_loader import plugin
from humming_loader.hub import fetch_missing
from humming_loader.quant_config import HummingPrepackedConfig

plugin.register()
section = json.loads({section!r})
config = HummingPrepackedConfig.from_config(section)
config.maybe_update_config("me/packed")
state = pickle.loads(pickle.dumps(config)).humming_prepacked
entry = state.manifest().layers[{layer!r}]
fetch_missing(state.folder(), [entry.sublayers["w13"].tensors["weight"].file])
weights = download_weights_from_hf("me/packed", None, ["*.safetensors", "*.bin"])
print(json.dumps([state.model, state.revision, str(state.folder()), weights]))
"""


def test_vllm_and_the_plugin_fetch_what_they_need(converted: dict[str, Path], tmp_path: Path) -> None:
    out = converted["qwen3-fp8-block"]
    section = json.loads((out / "config.json").read_text())["quantization_config"]
    with running(tmp_path / "objects") as server:
        commit = server.store.publish("me/packed", out)
        program = _PROGRAM.format(section=json.dumps(section), layer="model.layers.1.mlp.experts")
        done = run_python(program, environment(server.url, tmp_path / "home"))
        assert done.returncode == 0, done.stderr
        model, revision, folder, weights = json.loads(done.stdout.splitlines()[-1])
        seen = server.traffic.matching("HEAD", "/resolve/")
    assert (model, revision) == ("me/packed", commit.oid)
    assert folder == weights
    # The other layer's experts are not there, although vLLM's own pattern would match them.
    assert {one.path.rpartition("/resolve/")[2].partition("/")[2] for one in seen} == {
        "humming/manifest.json",
        "humming/experts-00002-of-00002.safetensors",
        "model.safetensors",
        "model.safetensors.index.json",
    }
