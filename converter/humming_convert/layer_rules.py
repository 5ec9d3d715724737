"""Which layers of a model hold routed experts: one pure function of config.json for each rule that families use."""

from __future__ import annotations

from typing import Any

Config = dict[str, Any]


def whole(config: Config, name: str, default: int) -> int:
    """A whole number of the config, `default` where it says nothing (or something else: see `check_config`)."""
    value = config.get(name, default)
    return value if type(value) is int else default


def _has_type(config: Config, layer: int) -> bool | None:
    """What `mlp_layer_types` (dense, sparse, moe, hash_moe) says of a layer, None where there is no such field."""
    types = config.get("mlp_layer_types")
    if not isinstance(types, list):
        return None
    return layer < len(types) and types[layer] != "dense"


def every_layer(config: Config, layer: int) -> bool:
    """All layers hold experts."""
    return True


def sparse_step_layers(config: Config, layer: int) -> bool:
    """Qwen's rule: every `decoder_sparse_step`-th layer that is not in `mlp_only_layers`."""
    dense = config.get("mlp_only_layers") or []
    return layer not in dense and (layer + 1) % max(1, whole(config, "decoder_sparse_step", 1)) == 0


def layers_after_dense(config: Config, layer: int) -> bool:
    """DeepSeek's rule: from `first_k_dense_replace` on, every `moe_layer_freq`-th layer.

    `mlp_layer_types` goes before it, and a `moe_layer_freq` that is a list says of each layer whether it has experts.
    """
    typed = _has_type(config, layer)
    if typed is not None:
        return typed
    frequency = config.get("moe_layer_freq")
    if isinstance(frequency, list):
        return layer < len(frequency) and bool(frequency[layer])
    return (
        layer >= whole(config, "first_k_dense_replace", 0) and layer % max(1, whole(config, "moe_layer_freq", 1)) == 0
    )


def layers_from_first(config: Config, layer: int) -> bool:
    """Sarvam's rule: as DeepSeek's, but steps are counted from the first layer with experts, layer 1 if not told."""
    first, step = whole(config, "first_k_dense_replace", 1), max(1, whole(config, "moe_layer_freq", 1))
    return layer >= first and (layer - first) % step == 0


def layers_after_num_dense(config: Config, layer: int) -> bool:
    """LFM2's rule: from `num_dense_layers` on."""
    return layer >= whole(config, "num_dense_layers", 0)


def interleaved_layers(config: Config, layer: int) -> bool:
    """Llama 4's rule: the list `moe_layers`, else every `interleave_moe_layer_step`-th layer."""
    listed = config.get("moe_layers")
    if isinstance(listed, list):
        return layer in listed
    return (layer + 1) % max(1, whole(config, "interleave_moe_layer_step", 1)) == 0


def interval_layers(config: Config, layer: int) -> bool:
    """ERNIE's rule: every `moe_layer_interval`-th layer from the start to the end index, -1 being the last layer.

    Where text and vision experts have indices of their own, a layer of either counts.
    """
    starts, ends = config.get("moe_layer_start_index"), config.get("moe_layer_end_index")
    start = min(starts, default=0) if isinstance(starts, list) else whole(config, "moe_layer_start_index", 0)
    end = max(ends, default=-1) if isinstance(ends, list) else whole(config, "moe_layer_end_index", -1)
    is_inside = layer >= start and (end < 0 or layer <= end)
    return is_inside and (layer + 1) % max(1, whole(config, "moe_layer_interval", 1)) == 0


def pattern_layers(config: Config, layer: int) -> bool:
    """Nemotron-H's rule: E in `hybrid_override_pattern`, or `moe` in `layers_block_type` (transformers 5)."""
    types = config.get("layers_block_type")
    if isinstance(types, list):
        return layer < len(types) and types[layer] == "moe"
    pattern = config.get("hybrid_override_pattern")
    return isinstance(pattern, str) and layer < len(pattern) and pattern[layer] == "E"


def period_layers(config: Config, layer: int) -> bool:
    """Jamba's rule: layers of `expert_layer_period` at `expert_layer_offset`; one expert alone is a dense layer."""
    if whole(config, "num_experts", 2) < 2:
        return False
    return layer % max(1, whole(config, "expert_layer_period", 2)) == whole(config, "expert_layer_offset", 1)


def enumerated_layers(config: Config, layer: int) -> bool:
    """Step3's rule: `moe_layers_enum`, numbers between commas; `mlp_layer_types`; else all but the first."""
    typed = _has_type(config, layer)
    if typed is not None:
        return typed
    listed = config.get("moe_layers_enum")
    if isinstance(listed, str):
        return str(layer) in [number.strip() for number in listed.split(",")]
    return layer > 0


def frequency_layers(config: Config, layer: int) -> bool:
    """Arctic's rule: every `moe_layer_frequency`-th layer."""
    return (layer + 1) % max(1, whole(config, "moe_layer_frequency", 2)) == 0


def swiglustep_layers(config: Config, layer: int) -> str:
    """Step3.5's activation: layers whose entry of `swiglu_limits` is not zero clamp, the others are plain SiLU."""
    limits = config.get("swiglu_limits")
    return "swiglustep" if isinstance(limits, list) and layer < len(limits) and limits[layer] else "silu"
