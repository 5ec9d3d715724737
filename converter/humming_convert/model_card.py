"""The README.md of a converted checkpoint, a model card of the Hub, and the one way that JSON is written there."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from humming_convert.errors import OutputError
from humming_convert.options import ConvertOptions
from humming_convert.plan import ConversionPlan, LayerPlan
from humming_convert.source import Checkpoint
from humming_loader._version import __version__

CARD = "README.md"
# What a quantized model has in common with the one it was made from; the rest of a card is about another repository.
_CARRIED = ("license", "license_name", "license_link", "language", "pipeline_tag")

_BODY = """\
# {title}, packed for Humming on {target}

The routed experts of
{source}
are stored here in the final layout of [Humming](https://pypi.org/project/humming-kernels/)'s MoE kernels (`humming/`),
converted once by [humming-convert](https://pypi.org/project/humming-convert/). Every other tensor is the source's, byte
for byte.

| | |
|---|---|
| GPU architecture | {target} only, CUDA {cuda} |
| activations | {activation} |
| parameter dtype | {dtype} |
| humming-kernels | {humming} |{ranks}
| made from | {source}{commit} |

## Serve

```console
$ pip install vllm humming-convert    # the plugin is found by vLLM's entry points
$ vllm serve {serve}{serve_flags}
```

No flag, and nothing is converted at start-up. A GPU of another architecture, or a Humming version with another layout,
is refused before any kernel runs. `humming-convert verify .` checks every byte of a downloaded copy.

## Layers

{layers}

## Sizes

| part | files | GB |
|---|---:|---:|
| packed experts, `humming/` | {packed_files} | {packed_gb} |
| other tensors, `model*.safetensors` | {passed_files} | {passed_gb} |
| together | {all_files} | {all_gb} |
| the source's tensors | {source_files} | {source_gb} |

## How it was made

```console
$ {command}
```

With humming-convert {version}, {versions}.
The SHA-256 of every tensor, and what the source was, are in `humming/manifest.json`.
"""


@dataclass(frozen=True, slots=True)
class CardFacts:
    """What a card says beyond the plan: bytes and files of the packed experts and of what was passed through."""

    packed_bytes: int
    passed_bytes: int
    passed_files: int


def to_text(document: dict[str, Any]) -> str:
    """A JSON document as Hugging Face's tools write it."""
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"


def render(plan: ConversionPlan, checkpoint: Checkpoint, options: ConvertOptions, facts: CardFacts) -> str:
    """The card's text: metadata of the Hub, then Markdown. It names no path of the machine that made it."""
    origin = checkpoint.origin
    link = f"[{plan.source}](https://huggingface.co/{plan.source})" if origin is not None else f"`{plan.source}`"
    source_bytes = sum(header.nbytes for header in checkpoint.tensors.values())
    body = _BODY.format(
        title=plan.source,
        source=link,
        commit=f" at commit `{origin.commit}`" if origin is not None else "",
        target=options.target,
        cuda=".".join(str(part) for part in options.target.cuda),
        version=__version__,
        humming=version("humming-kernels"),
        activation=options.activation,
        dtype=plan.param_dtype,
        ranks=f"\n| tensor parallelism | {plan.tp_size}, and no other |" if plan.tp_size > 1 else "",
        serve=options.push.repo if options.push is not None else "ORG/NAME",
        serve_flags=f" --tensor-parallel-size {plan.tp_size}" if plan.tp_size > 1 else "",
        layers=_table(_LAYER_HEADS, _layer_rows(plan.layers)),
        packed_files=len(plan.packed),
        packed_gb=_gb(facts.packed_bytes),
        passed_files=facts.passed_files,
        passed_gb=_gb(facts.passed_bytes),
        all_files=len(plan.packed) + facts.passed_files,
        all_gb=_gb(facts.packed_bytes + facts.passed_bytes),
        source_files=len(checkpoint.files),
        source_gb=_gb(source_bytes),
        command=command_of(plan, checkpoint, options),
        versions=", ".join(f"{name} {version(name)}" for name in ("humming-kernels", "torch", "huggingface_hub")),
    )
    return f"---\n{_metadata(plan, checkpoint, options)}\n---\n\n{body}"


def command_of(plan: ConversionPlan, checkpoint: Checkpoint, options: ConvertOptions) -> str:
    """The command that makes the same bytes again."""
    source = f"{plan.source}@{checkpoint.origin.commit}" if checkpoint.origin is not None else plan.source
    words = ["humming-convert", source, "OUT", "--target", str(options.target)]
    words += ["--cuda", ".".join(str(part) for part in options.target.cuda)]
    words += ["--activation", options.activation, "--dtype", plan.param_dtype]
    if plan.tp_size > 1:
        words += ["--tp", str(plan.tp_size)]
    if options.quant_config is not None:
        words += ["--quant-config", options.quant_config.name]
    return " ".join(words)


def check_card(text: str) -> None:
    """Raises OutputError when the Hub's client cannot read the card."""
    from huggingface_hub import ModelCard
    from yaml import YAMLError  # the client's own YAML

    try:
        ModelCard(text)
    except (ValueError, YAMLError) as error:
        raise OutputError(f"{CARD}: no model card: {str(error).splitlines()[0]}") from error


def _metadata(plan: ConversionPlan, checkpoint: Checkpoint, options: ConvertOptions) -> str:
    from huggingface_hub import ModelCardData

    formats = sorted({sublayer.format for layer in plan.layers for sublayer in layer.sublayers})
    known: dict[str, Any] = _carried(checkpoint.root / CARD)
    if checkpoint.origin is not None:
        known |= {"base_model": plan.source, "base_model_relation": "quantized"}
    tags = ["humming", "humming-prepacked", "moe", str(options.target), *formats]
    return str(ModelCardData(**known, library_name="vllm", tags=tags).to_yaml())


def _carried(card: Path) -> dict[str, Any]:
    """What the source's card says that holds for this one too; nothing of a card that cannot be read."""
    from huggingface_hub import ModelCard
    from yaml import YAMLError

    if not card.is_file():
        return {}
    try:
        found = ModelCard(card.read_text(encoding="utf-8"), ignore_metadata_errors=True).data
        data: dict[str, Any] = found.to_dict()  # type: ignore[no-untyped-call]
    except (OSError, ValueError, TypeError, YAMLError):
        return {}
    return {key: data[key] for key in _CARRIED if data.get(key)}


_LAYER_HEADS = ("layers", "experts", "hidden", "intermediate", "w13", "w2")


def _layer_rows(layers: tuple[LayerPlan, ...]) -> list[tuple[str, ...]]:
    """One row for all layers of one kind."""
    kinds: Counter[tuple[str, ...]] = Counter()
    first: dict[tuple[str, ...], list[str]] = {}
    for layer in layers:
        w13, w2 = layer.sublayers
        sizes = (str(layer.num_experts), str(layer.hidden_size), str(layer.intermediate_size))
        kind: tuple[str, ...] = (*sizes, w13.format, w2.format)
        kinds[kind] += 1
        first.setdefault(kind, []).append(layer.layer_name)
    rows: list[tuple[str, ...]] = []
    for kind, names in first.items():
        name = f"`{names[0]}`" if len(names) == 1 else f"`{names[0]}` to `{names[-1]}` ({kinds[kind]})"
        rows.append((name, *kind))
    return rows


def _table(heads: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [heads, ("---", *("---:" for _ in heads[1:4]), "---", "---"), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _gb(size: int) -> str:
    return f"{size / 1e9:.2f}" if size >= 10**7 else f"{size / 1e9:.6f}"
