"""The names that experts' tensors go by, in any family: parsed into their parts, and nothing decided about them."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple

# What quantizers and modelling code call the three projections; any of them may occur in any family, because
# quantizers rename (llm-compressor and auto-round write gate/up/down into a Mixtral that had w1/w3/w2).
PROJECTION_ALIASES: dict[str, str] = {
    "gate_proj": "gate",
    "up_proj": "up",
    "down_proj": "down",
    "w1": "gate",
    "w3": "up",
    "w2": "down",
    "wgate": "gate",
    "linear": "gate",
    "linear_v": "up",
    "linear_1": "down",
}
# Tensors below `.experts.` that hold every expert (Aria calls them fc1 and fc2).
FUSED_PROJECTIONS: dict[str, str] = {"gate_up_proj": "gate_up", "down_proj": "down", "fc1": "gate_up", "fc2": "down"}
# Modules that hold every expert's tensors directly, with no `.experts.` in the name: Step3's and Granite's.
STACKED_PROJECTIONS: dict[str, dict[str, str]] = {
    "moe": {"gate_proj": "gate", "up_proj": "up", "down_proj": "down"},
    "block_sparse_moe": {"input_linear": "gate_up", "output_linear": "down"},
}


class ExpertName(NamedTuple):
    """An experts' tensor name in its parts; `expert` is None for a tensor that holds all experts.

    `layer_name` is the checkpoint's name of the layer's experts, `layer` its number, `parent` the module between
    the layer and its experts ("" where there is none), `parameter` the tensor's own name (`weight_scale`; empty for
    a fused weight without one).
    """

    layer_name: str
    prefix: str
    layer: int
    parent: str
    expert: int | None
    projection: str
    parameter: str


_HEAD = re.compile(r"(?P<prefix>(?:[\w.]+\.)?)layers\.(?P<layer>0|[1-9][0-9]{0,5})(?:\.(?P<parent>[\w.]+))?")
_PER_EXPERT = re.compile(r"(?P<expert>0|[1-9][0-9]{0,5})\.(?P<projection>\w+)\.(?P<parameter>[\w.]+)")
_FUSED = re.compile(rf"(?P<projection>{'|'.join(FUSED_PROJECTIONS)})(?:[._](?P<parameter>\w+))?")


# A number of a layer or expert in a form that no writer uses, and that would collide with another's name.
_ODD_NUMBER = re.compile(r"(?:^|\.)(?:layers|experts)\.(?!(?:0|[1-9][0-9]*)\.)(\d+)\.")


def odd_number(name: str) -> str:
    """The layer or expert number in `name` that has leading zeros or other digits than 0 to 9, or ""."""
    match = _ODD_NUMBER.search(name)
    return "" if match is None else match[1]


def may_be_expert(name: str) -> bool:
    """A quick look that lets no experts' tensor pass: most names of a large checkpoint are done with after it."""
    return ".experts." in name or ".moe." in name or "put_linear." in name


def parse_expert_name(name: str) -> ExpertName | None:
    """The parts of an experts' tensor name of any family, None for every other tensor.

    Shared experts are not routed experts, and have other names (`shared_experts`).
    """
    head, separator, tail = name.rpartition(".experts.")
    if not separator:
        return _parse_stacked(name)
    layer, tensor = _parse_head(head), _parse_tail(tail)
    return None if layer is None or tensor is None else ExpertName(*layer, *tensor)


def _parse_stacked(name: str) -> ExpertName | None:
    for parent, projections in STACKED_PROJECTIONS.items():
        head, separator, tail = name.rpartition(f".{parent}.")
        projection, dot, parameter = tail.partition(".")
        if separator and dot and projection in projections:
            layer = _parse_head(f"{head}.{parent}")
            return None if layer is None else ExpertName(*layer, None, projections[projection], parameter)
    return None


# A large checkpoint has 100,000 names, but few different heads and tails.
@lru_cache(maxsize=4096)
def _parse_head(head: str) -> tuple[str, str, int, str] | None:
    match = _HEAD.fullmatch(head)
    return None if match is None else (head + ".experts", match["prefix"], int(match["layer"]), match["parent"] or "")


@lru_cache(maxsize=65536)
def _parse_tail(tail: str) -> tuple[int | None, str, str] | None:
    match = _PER_EXPERT.fullmatch(tail)
    if match is not None:
        alias = PROJECTION_ALIASES.get(match["projection"])
        return None if alias is None else (int(match["expert"]), alias, match["parameter"])
    match = _FUSED.fullmatch(tail)
    return None if match is None else (None, FUSED_PROJECTIONS[match["projection"]], match["parameter"] or "")
