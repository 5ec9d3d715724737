"""The model card: the client reads it, the Hub's rules are kept, it renders, and an example is in the repository."""

from __future__ import annotations

import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from huggingface_hub import ModelCard
from markdown_it import MarkdownIt
from tests.hub.conftest import ROOT, Hub
from tests.hub.sparse import EXPERTS, HIDDEN, INTERMEDIATE, write_qwen3
from tests.support.checkpoints import make_checkpoint

from humming_convert.errors import OutputError
from humming_convert.hub_destination import PushOptions
from humming_convert.hub_id import Origin
from humming_convert.model_card import CARD, CardFacts, check_card, render
from humming_convert.options import ConvertOptions
from humming_convert.plan_build import build_plan
from humming_convert.source import open_checkpoint
from humming_convert.target import Target

EXAMPLE = ROOT / "docs" / "example-card.md"
REPO = "Qwen/Qwen3-30B-A3B-Instruct-2507-FP8"
_LAYERS = 48
# Weights, and a bfloat16 scale for each row and each 128 columns.
_ELEMENTS = 3 * HIDDEN * INTERMEDIATE
_SCALES = 2 * (2 * INTERMEDIATE * (HIDDEN // 128) + HIDDEN * (INTERMEDIATE // 128))
_SOURCE_CARD = """\
---
library_name: transformers
license: apache-2.0
license_link: https://huggingface.co/Qwen/Qwen3-30B-A3B-Instruct-2507-FP8/blob/main/LICENSE
pipeline_tag: text-generation
base_model:
- Qwen/Qwen3-30B-A3B-Instruct-2507
---
# Qwen3
"""


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The card of Qwen3-30B's shapes, as it would be published."""
    folder = tmp_path_factory.mktemp("card") / "source"
    write_qwen3(folder, layers=_LAYERS, shards=7)
    (folder / CARD).write_text(_SOURCE_CARD)
    checkpoint = replace(open_checkpoint(folder), origin=Origin(REPO, "0123456789abcdef" * 2 + "01234567", {}))
    plan = build_plan(checkpoint)
    options = ConvertOptions(
        source=folder,
        out=folder / "out",
        target=Target(90, (13, 0)),
        push=PushOptions("your-org/Qwen3-30B-A3B-Instruct-2507-FP8-humming-sm90"),
    )
    passed = sum(checkpoint.tensors[name].nbytes for name in plan.passthrough)
    facts = CardFacts(_LAYERS * EXPERTS * (_ELEMENTS + _SCALES), passed, 1)
    return render(plan, checkpoint, options, facts)


def test_the_client_reads_it(example: str) -> None:
    data = ModelCard(example).data.to_dict()  # type: ignore[no-untyped-call]
    assert data == {
        "base_model": REPO,
        "base_model_relation": "quantized",
        "library_name": "vllm",
        "license": "apache-2.0",
        "license_link": "https://huggingface.co/Qwen/Qwen3-30B-A3B-Instruct-2507-FP8/blob/main/LICENSE",
        "pipeline_tag": "text-generation",
        "tags": ["humming", "humming-prepacked", "moe", "sm90", "fp8-block"],
    }
    check_card(example)


def test_it_says_how_it_was_made_and_is_served(example: str) -> None:
    assert "$ vllm serve your-org/Qwen3-30B-A3B-Instruct-2507-FP8-humming-sm90" in example
    assert f"$ humming-convert {REPO}@{'0123456789abcdef' * 2}01234567 OUT --target sm90 --cuda 13.0" in example
    assert "| `model.layers.0.mlp.experts` to `model.layers.47.mlp.experts` (48) | 128 | 2048 | 768 |" in example
    assert "| packed experts, `humming/` | 48 | 29.44 |" in example
    assert "/tmp" not in example


def test_it_renders_as_meant(example: str) -> None:
    body = example.split("---\n", 2)[2]
    html = MarkdownIt("commonmark").enable("table").render(body)
    assert html.count("<h1>") == 1
    assert re.findall(r"<h2>(.*)</h2>", html) == ["Serve", "Layers", "Sizes", "How it was made"]
    assert html.count("<table>") == 3
    assert html.count("<pre>") == 2
    rows = re.findall(r"<tr>(.*?)</tr>", html, re.DOTALL)
    assert len(rows) == 6 + 2 + 5
    assert not re.search(r"^\s*\|", re.sub(r"<[^>]*>", "", html), re.MULTILINE)
    assert max(len(line) for line in body.splitlines() if not line.startswith(("|", "$"))) <= 120


def test_the_example_in_the_repository_is_what_is_written_now(example: str) -> None:
    def masked(text: str) -> str:
        return re.sub(r"\b\d+\.\d+\.\d+[\w.+]*", "VERSION", text)

    assert masked(EXAMPLE.read_text()) == masked(example), f"write it again: {EXAMPLE}"


_VALIDATE = "from huggingface_hub import ModelCard; ModelCard.load({path!r}).validate()"


def test_the_hub_takes_it(hub: Hub, example: str, tmp_path: Path) -> None:
    """huggingface_hub's own validation asks the Hub, which here is on loopback."""
    (tmp_path / "card.md").write_text(example)
    (tmp_path / "bad.md").write_text(example.replace("relation: quantized", "relation: packed"))

    def validate(name: str) -> subprocess.CompletedProcess[str]:
        return hub.python(_VALIDATE.format(path=str(tmp_path / name)))

    done = validate("card.md")
    assert done.returncode == 0, done.stderr
    assert '"base_model_relation\\" must be one of' in validate("bad.md").stderr
    assert len(hub.server.traffic.matching("POST", "/api/validate-yaml")) == 2


def test_a_local_folder_names_no_base_model_and_a_broken_card_is_nothing(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "tiny")
    (source / CARD).write_text("---\nlicense: [\n---\n# no YAML\n")
    checkpoint = open_checkpoint(source)
    options = ConvertOptions(source=source, out=tmp_path / "out", target=Target(100, (13, 0)))
    text = render(build_plan(checkpoint), checkpoint, options, CardFacts(1, 1, 1))
    data = ModelCard(text).data.to_dict()  # type: ignore[no-untyped-call]
    assert set(data) == {"library_name", "tags"}
    assert "sm100" in data["tags"]
    assert "$ vllm serve ORG/NAME" in text
    with pytest.raises(OutputError, match=r"README\.md: no model card"):
        check_card("---\nlicense: [\n---\n")
