from __future__ import annotations

import json
from pathlib import Path

from tests.support.checkpoints import make_checkpoint
from tests.support.genuine import genuine

from humming_convert.formats import FORMATS
from humming_convert.plan_build import build_plan
from humming_convert.report import plan_as_json, plan_as_text, support_as_json, support_as_text
from humming_convert.source import open_checkpoint


def test_a_plan_as_text_joins_alike_layers() -> None:
    checkpoint = open_checkpoint(genuine("hub-layout--gpt_oss-mxfp4"))
    assert plan_as_text(build_plan(checkpoint), checkpoint) == (
        "hub-layout--gpt_oss-mxfp4: 41 tensors in 1 file, 166.8 kB\n"
        "family gpt_oss, quant_method mxfp4 (config.json: quantization_config), parameters in bfloat16\n"
        "\n"
        "layers                                                        experts  hidden  intermediate  "
        "w13            w2             size\n"
        "model.layers.0.mlp.experts to model.layers.1.mlp.experts (2)  4        64      96            "
        "mxfp4-gpt-oss  mxfp4-gpt-oss  82.4 kB\n"
        "\n"
        "converted: 2 MoE layers, 82.4 kB\n"
        "passed through: 29 tensors, 84.4 kB, byte for byte; 0 other files"
    )


def test_a_plan_as_text_keeps_unlike_layers_apart() -> None:
    checkpoint = open_checkpoint(genuine("llmcompressor--mixed"))
    text = plan_as_text(build_plan(checkpoint), checkpoint)
    assert "model.layers.0.mlp.experts  8        256     256           ct-nvfp4 g16 " in text
    assert "model.layers.1.mlp.experts  8        256     256           ct-pack-quantized 4 bit g128 " in text
    assert "left out: 24 tensors with no place in the kernel layout" in text


def test_notes_are_told(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "m", format="fp8_tensor", family="mixtral")
    (path / "config.json").unlink()
    checkpoint = open_checkpoint(path / "model.safetensors")
    text = plan_as_text(build_plan(checkpoint), checkpoint)
    assert "quant_method none given (told by its tensors)" in text
    assert text.endswith("note: no config.json: taken for mixtral from the names of its tensors")


def test_a_plan_as_json_is_json_and_accounts_for_every_byte() -> None:
    checkpoint = open_checkpoint(genuine("llmcompressor--glm4_moe-W4A16"))
    found = plan_as_json(build_plan(checkpoint), checkpoint)
    assert json.loads(json.dumps(found)) == found
    assert found["converted_bytes"] + found["passthrough"]["bytes"] == found["bytes"]
    w13 = found["layers"][0]["sublayers"]["w13"]
    assert w13["tensors"]["weight_packed"] == {"dtype": "I32", "shape": [4, 512, 32], "parts": 8}
    assert w13["unused"] == 8
    assert found["layers"][0]["gate_up"] == "split"


def test_what_is_supported_comes_from_the_tables() -> None:
    found = support_as_json()
    assert found["families"]["qwen3_moe"] == ["qwen3_moe"]
    assert set(found["formats"]) == {row.name for row in FORMATS if row.name != "later"}
    text = support_as_text()
    for name in (*found["families"], *found["formats"]):
        assert f"\n{name} " in text
