"""What a row of the families' table says, and what can be asked of it with a model's config at hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from humming_convert.errors import Problem
from humming_convert.expert_names import ExpertName
from humming_convert.layer_rules import Config

# Where a language model hangs in a checkpoint, and where vLLM 0.33.0 hangs it: multimodal wrappers rename.
PREFIXES: Mapping[str, str] = {
    "model.": "model.",
    "": "model.",
    "model.language_model.": "language_model.model.",
    "language_model.model.": "language_model.model.",
    "language_model.": "language_model.model.",
    "thinker.model.": "language_model.model.",
    "language.model.": "language_model.model.",
    "llm.model.": "llm.model.",
}
# Modules that are no part of the language model's own layers, whatever the family: token prediction, towers, drafts.
_ELSEWHERE = frozenset(
    ("mtp", "mtp_block", "talker", "code2wav", "visual", "vision_model", "vision_tower", "audio_tower", "eagle")
)
# What config.json may call an activation, and what vLLM calls it.
_ACTIVATIONS: Mapping[str, str] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_tanh": "gelu_tanh",
    "relu2": "relu2",
    "situ": "situ",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One row: which config fields give E, H and I, which layers hold experts, and where they hang.

    Of several fields for one number the first that config.json has counts; a list gives one number per layer.
    `parents` maps the module between `layers.N.` and `.experts.` ("" for none) to vLLM's name of it, `prefixes` what
    stands before `layers.`; `routers` are the modules, beside the experts, that choose among them: one must be there.

    `activation` is what vLLM calls it (without the ending for experts that have no gate), unless `activation_field`
    of the config says another; `layer_activation` is for models in which layers differ. `is_interleaved` says that
    vLLM wants gate and up rows alternating, as they are in a fused tensor of this family. `predicts_tokens` says that
    layers from the last on may follow, for multi-token prediction; `prediction_field` counts them. Where vLLM 0.33.0
    has no model of a family (`is_served` false), its layers keep the checkpoint's names. `groups` are vLLM's names of
    layers of their own for which the checkpoint has one list of experts; fields of the config then hold a list of them.
    """

    name: str
    model_types: tuple[str, ...]
    experts: tuple[str, ...]
    intermediate: tuple[str, ...]
    is_moe_layer: Callable[[Config, int], bool]
    parents: Mapping[str, str] = field(default_factory=lambda: {"mlp": "mlp"})
    routers: tuple[str, ...] = ("gate",)
    hidden: tuple[str, ...] = ("hidden_size",)
    layers: tuple[str, ...] = ("num_hidden_layers",)
    prefixes: Mapping[str, str] = field(default_factory=lambda: PREFIXES)
    activation: str = "silu"
    activation_field: str = "hidden_act"
    layer_activation: Callable[[Config, int], str] | None = None
    is_gated: bool = True
    is_interleaved: bool = False
    predicts_tokens: bool = False
    prediction_field: str = "num_nextn_predict_layers"
    is_served: bool = True
    groups: tuple[str, ...] = ()

    def holds(self, name: ExpertName) -> bool:
        """Whether experts of this family hang where `name` says."""
        return name.prefix in self.prefixes and name.parent in self.parents

    def vllm_name(self, name: ExpertName, group: int = 0) -> str:
        """What vLLM 0.33.0 calls the layer that `name` is one of; the checkpoint's own name if it serves none."""
        if not self.is_served or not self.holds(name):
            return name.layer_name
        parent = self.parents[name.parent]
        own = self.groups[group] if self.groups else "experts"
        return f"{self.prefixes[name.prefix]}layers.{name.layer}.{parent}{'.' if parent else ''}{own}"

    def number_of_layers(self, config: Mapping[str, Any]) -> int | None:
        """How many layers the language model has, None where config.json does not say."""
        for name in self.layers:
            value = config.get(name)
            if type(value) is int:
                return value
            if isinstance(value, list | str):
                return len(value)
        return None

    def activation_in(self, config: Mapping[str, Any], layer: int) -> str:
        """vLLM's name of the activation of a layer's experts."""
        stated = _ACTIVATIONS.get(str(config.get(self.activation_field)).lower()) if self.activation_field else None
        chosen = stated or self.activation
        if self.layer_activation is not None:
            chosen = self.layer_activation(dict(config), layer)
        return chosen if self.is_gated else f"{chosen}_no_mul"


def is_elsewhere(name: ExpertName) -> bool:
    """Whether experts hang in a part that is converted in no family, such as a token prediction module."""
    return any(part in _ELSEWHERE for part in name.prefix.split("."))


def told(config: Mapping[str, Any], fields: tuple[str, ...], index: int) -> tuple[str, int] | None:
    """The field that counts and its number, None where config.json does not say.

    `index` is the place in a list: the layer's number, or that of its group of experts.
    """
    for name in fields:
        value = config.get(name)
        if isinstance(value, list) and index < len(value):
            value = value[index]
        if type(value) is int:
            return name, value
    return None


# Fields of the layer rules; what is stated must have the right form, or the rules would go by something else.
_WHOLE = (
    "decoder_sparse_step",
    "first_k_dense_replace",
    "moe_layer_frequency",
    "moe_layer_interval",
    "num_dense_layers",
    "interleave_moe_layer_step",
    "expert_layer_period",
    "expert_layer_offset",
)
_LISTS_OF_NUMBERS = ("mlp_only_layers", "moe_layers")
_LISTS_OF_NAMES = ("mlp_layer_types", "layers_block_type")
MAX_LAYERS = 10_000


def check_config(family: Family, config: Mapping[str, Any]) -> list[Problem]:
    """What is wrong with the form of the fields of config.json that decide about experts."""
    counts = () if family.groups else family.experts
    names = (*family.layers, *counts, *family.hidden, *_WHOLE, family.prediction_field)
    found = [_expected_number(name, config.get(name)) for name in dict.fromkeys(names)]
    # One number, or one for each layer.
    found += [
        _expected_number(name, config.get(name), or_list=True) for name in (*family.intermediate, "moe_layer_freq")
    ]
    if family.groups:
        lists = (*family.experts, *family.intermediate)
        found += [_expected_list(name, config.get(name), int, "whole numbers", len(family.groups)) for name in lists]
    found += [_expected_list(name, config.get(name), int, "whole numbers") for name in _LISTS_OF_NUMBERS]
    found += [_expected_list(name, config.get(name), str, "names") for name in _LISTS_OF_NAMES]
    problems = [problem for problem in found if problem is not None]
    layers = family.number_of_layers(config)
    if layers is not None and layers > MAX_LAYERS:
        problems.append(Problem(f"config.json: {family.layers[0]}", f"at most {MAX_LAYERS}", f"{layers:.3g}"))
    stated = config.get(family.activation_field) if family.activation_field else None
    if stated is not None and str(stated).lower() not in _ACTIVATIONS:
        where = f"config.json: {family.activation_field}"
        problems.append(Problem(where, f"one of {', '.join(_ACTIVATIONS)}", f"{str(stated)[:80]!a}"))
    return problems


def _expected_number(name: str, value: object, *, or_list: bool = False) -> Problem | None:
    values = value if or_list and isinstance(value, list) else [value]
    if name in _LISTS_OF_NAMES or name == "hybrid_override_pattern":
        return None
    if all(one is None or (type(one) is int and one >= 0) for one in values):
        return None
    return Problem(f"config.json: {name}", "a whole number", f"{str(value)[:80]!a}")


def _expected_list(name: str, value: object, kind: type, of: str, count: int | None = None) -> Problem | None:
    is_list = isinstance(value, list) and all(type(one) is kind for one in value)
    if value is None or (is_list and (count is None or len(value) == count)):  # type: ignore[arg-type]
        return None
    many = f"{count} " if count is not None else ""
    return Problem(f"config.json: {name}", f"a list of {many}{of}", f"{str(value)[:80]!a}")
