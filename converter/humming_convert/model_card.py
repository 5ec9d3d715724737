"""The README.md of a converted checkpoint, and the one way that JSON files are written there."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from humming_convert.options import ConvertOptions
from humming_convert.plan import ConversionPlan
from humming_loader._version import __version__

_CARD = """\
# {name}, packed for Humming on {target}

The routed experts of this checkpoint are stored in the final layout of Humming's MoE kernels (`humming/`), converted
once from `{source}` by humming-convert {version}. Every other tensor is the source's, byte for byte.

| | |
|---|---|
| GPU architecture | {target} |
| activations | {activation} |
| parameter dtype | {dtype} |
| MoE layers | {layers} |
| experts a layer | {experts} |
| formats | {formats} |{ranks}

The packed bytes fit only {target} and the Humming version named in `humming/manifest.json`. Check the folder with
`humming-convert verify .`, see what is in it with `humming-convert inspect .`, and make it again for another GPU with
`humming-convert SRC OUT --target smNN`.
"""


def to_text(document: dict[str, Any]) -> str:
    """A JSON document as Hugging Face's tools write it."""
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"


def render(plan: ConversionPlan, options: ConvertOptions) -> str:
    """The card's text. It names no path of the machine that made it."""
    formats = Counter(sublayer.format for layer in plan.layers for sublayer in layer.sublayers)
    return _CARD.format(
        name=plan.source,
        source=plan.source,
        version=__version__,
        target=options.target,
        activation=options.activation,
        dtype=plan.param_dtype,
        layers=len(plan.layers),
        experts=", ".join(str(count) for count in sorted({layer.num_experts for layer in plan.layers})),
        ranks=f"\n| tensor parallelism | {plan.tp_size}, and no other |" if plan.tp_size > 1 else "",
        formats=", ".join(f"{name} ({count} sublayers)" for name, count in sorted(formats.items())),
    )
