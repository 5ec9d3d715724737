"""The names that modules have in quantization configs, which may be older than those of the tensors."""

from __future__ import annotations

from collections.abc import Iterable

from humming_convert.families import PROJECTION_ALIASES

_STANDARD_NAMES = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}


def other_names(module: str) -> Iterable[str]:
    """The module as it was called while it was quantized: transformers knows `mlp` and gate/up/down only."""
    head, _, leaf = module.rpartition(".")
    standard = _STANDARD_NAMES[PROJECTION_ALIASES[leaf]] if leaf in PROJECTION_ALIASES else leaf
    if standard != leaf:
        yield f"{head}.{standard}"
    if ".block_sparse_moe." in head:
        yield f"{head.replace('.block_sparse_moe.', '.mlp.')}.{standard}"
