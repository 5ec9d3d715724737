"""Model families as rows of one table, and the names that experts' tensors go by."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from humming_convert.errors import Problem

Config = dict[str, Any]

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
FUSED_PROJECTIONS: dict[str, str] = {"gate_up_proj": "gate_up", "down_proj": "down"}


def _field(config: Config, name: str, default: int) -> int:
    value = config.get(name, default)
    return value if type(value) is int else default


def every_layer(config: Config, layer: int) -> bool:
    """All layers hold experts."""
    return True


def sparse_step_layers(config: Config, layer: int) -> bool:
    """Qwen's rule: every `decoder_sparse_step`-th layer that is not in `mlp_only_layers`."""
    dense = config.get("mlp_only_layers") or []
    return layer not in dense and (layer + 1) % max(1, _field(config, "decoder_sparse_step", 1)) == 0


def layers_after_dense(config: Config, layer: int) -> bool:
    """DeepSeek's rule: from `first_k_dense_replace` on, every `moe_layer_freq`-th layer."""
    return (
        layer >= _field(config, "first_k_dense_replace", 0) and layer % max(1, _field(config, "moe_layer_freq", 1)) == 0
    )


@dataclass(frozen=True, slots=True)
class Family:
    """One row: which config fields give E, H and I, which layers hold experts, and where they hang.

    `parents` are the modules between `layers.N.` and `.experts.`; `activation_function` is what vLLM calls
    it, `is_interleaved` says that a fused gate_up tensor alternates gate and up rows, `predicts_tokens` that
    layers from `num_hidden_layers` on may follow, for multi-token prediction.
    """

    name: str
    model_types: tuple[str, ...]
    experts_fields: tuple[str, ...]
    intermediate_field: str
    is_moe_layer: Callable[[Config, int], bool]
    parents: tuple[str, ...] = ("mlp",)
    hidden_field: str = "hidden_size"
    prefixes: tuple[str, ...] = ("model.", "")
    activation_function: str = "silu"
    is_interleaved: bool = False
    predicts_tokens: bool = False


# Fields of the rules above; what is stated must be a whole number, or the rules would go by something else.
_LAYER_FIELDS = ("decoder_sparse_step", "first_k_dense_replace", "moe_layer_freq", "num_nextn_predict_layers")
MAX_LAYERS = 10_000


def check_config(family: Family, config: Mapping[str, Any]) -> list[Problem]:
    """What is wrong with the form of the fields of config.json that decide about experts."""
    names = (
        "num_hidden_layers",
        *family.experts_fields,
        family.intermediate_field,
        family.hidden_field,
        *_LAYER_FIELDS,
    )
    problems = []
    for name in names:
        value = config.get(name)
        if value is not None and (type(value) is not int or value < 0):
            problems.append(Problem(f"config.json: {name}", "a whole number", f"{str(value)[:80]!a}"))
    layers = config.get("num_hidden_layers")
    if type(layers) is int and layers > MAX_LAYERS:
        problems.append(Problem("config.json: num_hidden_layers", f"at most {MAX_LAYERS}", f"{layers:.3g}"))
    dense = config.get("mlp_only_layers")
    if dense is not None and not (isinstance(dense, list) and all(type(layer) is int for layer in dense)):
        problems.append(Problem("config.json: mlp_only_layers", "a list of whole numbers", f"{str(dense)[:80]!a}"))
    return problems


FAMILIES: tuple[Family, ...] = (
    Family(
        name="mixtral",
        model_types=("mixtral",),
        experts_fields=("num_local_experts",),
        intermediate_field="intermediate_size",
        is_moe_layer=every_layer,
        parents=("block_sparse_moe",),
    ),
    Family(
        name="qwen2_moe",
        model_types=("qwen2_moe",),
        experts_fields=("num_experts", "num_local_experts"),
        intermediate_field="moe_intermediate_size",
        is_moe_layer=sparse_step_layers,
    ),
    Family(
        name="qwen3_moe",
        model_types=("qwen3_moe",),
        # transformers 5 renames num_experts to num_local_experts when it saves.
        experts_fields=("num_experts", "num_local_experts"),
        intermediate_field="moe_intermediate_size",
        is_moe_layer=sparse_step_layers,
    ),
    Family(
        name="deepseek_v2",
        model_types=("deepseek_v2",),
        experts_fields=("n_routed_experts", "num_local_experts"),
        intermediate_field="moe_intermediate_size",
        is_moe_layer=layers_after_dense,
    ),
    Family(
        name="deepseek_v3",
        model_types=("deepseek_v3",),
        experts_fields=("n_routed_experts", "num_local_experts"),
        intermediate_field="moe_intermediate_size",
        is_moe_layer=layers_after_dense,
        predicts_tokens=True,
    ),
    Family(
        name="glm4_moe",
        model_types=("glm4_moe",),
        experts_fields=("n_routed_experts", "num_local_experts"),
        intermediate_field="moe_intermediate_size",
        is_moe_layer=layers_after_dense,
        predicts_tokens=True,
    ),
    Family(
        name="gpt_oss",
        model_types=("gpt_oss",),
        experts_fields=("num_local_experts",),
        intermediate_field="intermediate_size",
        is_moe_layer=every_layer,
        activation_function="swigluoai",
        is_interleaved=True,
    ),
)

BY_MODEL_TYPE: dict[str, Family] = {model_type: row for row in FAMILIES for model_type in row.model_types}


class ExpertName(NamedTuple):
    """An experts' tensor name in its parts; `expert` is None for a tensor that holds all experts.

    `layer_name` is vLLM's name of the MoE layer, `layer` its number, `parameter` the tensor's own name
    (`weight_scale`; empty for a fused weight without one).
    """

    layer_name: str
    prefix: str
    layer: int
    parent: str
    expert: int | None
    projection: str
    parameter: str


_HEAD = re.compile(r"(?P<prefix>(?:[\w.]+\.)?)layers\.(?P<layer>0|[1-9][0-9]{0,5})\.(?P<parent>[\w.]+)")
_PER_EXPERT = re.compile(r"(?P<expert>0|[1-9][0-9]{0,5})\.(?P<projection>\w+)\.(?P<parameter>[\w.]+)")
_FUSED = re.compile(r"(?P<projection>gate_up_proj|down_proj)(?:[._](?P<parameter>\w+))?")


# A number of a layer or expert in a form that no writer uses, and that would collide with another's name.
_ODD_NUMBER = re.compile(r"(?:^|\.)(?:layers|experts)\.(?!(?:0|[1-9][0-9]*)\.)(\d+)\.")


def odd_number(name: str) -> str:
    """The layer or expert number in `name` that has leading zeros or other digits than 0 to 9, or ""."""
    match = _ODD_NUMBER.search(name)
    return "" if match is None else match[1]


def parse_expert_name(name: str) -> ExpertName | None:
    """The parts of an experts' tensor name of any family, None for every other tensor.

    Shared experts are not routed experts, and have other names (`shared_experts`).
    """
    head, separator, tail = name.rpartition(".experts.")
    if not separator:
        return None
    layer, tensor = _parse_head(head), _parse_tail(tail)
    return None if layer is None or tensor is None else ExpertName(*layer, *tensor)


# A large checkpoint has 100,000 names, but few different heads and tails.
@lru_cache(maxsize=4096)
def _parse_head(head: str) -> tuple[str, str, int, str] | None:
    match = _HEAD.fullmatch(head)
    return None if match is None else (head + ".experts", match["prefix"], int(match["layer"]), match["parent"])


@lru_cache(maxsize=65536)
def _parse_tail(tail: str) -> tuple[int | None, str, str] | None:
    match = _PER_EXPERT.fullmatch(tail)
    if match is not None:
        alias = PROJECTION_ALIASES.get(match["projection"])
        return None if alias is None else (int(match["expert"]), alias, match["parameter"])
    match = _FUSED.fullmatch(tail)
    return None if match is None else (None, FUSED_PROJECTIONS[match["projection"]], match["parameter"] or "")


def family_from_names(names: list[str]) -> Family:
    """The row for a file without config.json: told by how its experts and their neighbours are called.

    Rows that cannot be told apart this way differ in nothing that the kernel layout depends on.
    """
    text = "\n".join(names)
    if ".experts.gate_up_proj_blocks" in text:
        return BY_MODEL_TYPE["gpt_oss"]
    if ".block_sparse_moe.experts." in text:
        return BY_MODEL_TYPE["mixtral"]
    if ".mlp.shared_expert." in text:
        return BY_MODEL_TYPE["qwen2_moe"]
    if ".mlp.shared_experts." in text:
        return BY_MODEL_TYPE["deepseek_v3"]
    return BY_MODEL_TYPE["qwen3_moe"]
