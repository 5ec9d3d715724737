"""Which of a checkpoint's MoE layers are converted, and what is said about the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from humming_convert.errors import NothingToConvertError, Problem, UnsupportedError
from humming_convert.expert_names import ExpertName
from humming_convert.family import Family, is_elsewhere
from humming_convert.layer_index import LayerIndex, LayerTensors, check_layers_present, shorten
from humming_convert.source import Checkpoint


@dataclass(slots=True)
class Building:
    """What is common to all layers while a plan is made, and the problems found on the way."""

    checkpoint: Checkpoint
    config: Mapping[str, Any]
    family: Family
    activation: str
    param_dtype: str
    broken: list[Problem] = field(default_factory=list)
    unsupported: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)


def choose_layers(
    building: Building, index: LayerIndex, quantized: Mapping[str, LayerTensors]
) -> dict[str, LayerTensors]:
    """The layers to convert; what is left out is passed through, with a note that says why."""
    family, config = building.family, building.config
    last = family.number_of_layers(config)
    if building.checkpoint.config is None:
        building.notes.append(f"no config.json: taken for {family.name} from the names of its tensors")
    chosen: dict[str, LayerTensors] = {}
    predicted, foreign, plain, elsewhere = [], [], [], []
    for name, layer in index.layers.items():
        if is_elsewhere(layer.name):
            elsewhere.append(name)
        elif not family.holds(layer.name):
            foreign.append(name)
        elif last is not None and layer.name.layer >= last:
            predicted.append(layer.name)
        elif name not in quantized:
            plain.append(layer.name.layer)
        else:
            chosen[name] = layer
    inside = [
        layer.name for layer in index.layers.values() if family.holds(layer.name) and not is_elsewhere(layer.name)
    ]
    _check_numbers(building, inside)
    _check_predicted(building, predicted, last or 0)
    unknown = [name for name in foreign if name in quantized]
    if unknown:
        problem = _unknown_place(family, unknown)
        if not chosen and not plain:
            raise UnsupportedError([problem])
        building.unsupported.append(problem)
    for name in index.others:
        if name.rpartition(".experts.")[0] + ".experts" in chosen:
            expected = "only tensors of experts' projections beside converted ones"
            building.broken.append(Problem(f"tensor {name}", expected, "an unknown name"))
        else:
            foreign.append(name)
    if chosen and not family.is_served:
        building.notes.append(f"vLLM 0.33.0 has no model of {family.name}: layers keep the checkpoint's names")
    if predicted:
        numbers = shorten([name.layer for name in predicted])
        building.notes.append(f"layer {numbers}: multi-token prediction, passed through")
    if plain:
        building.notes.append(f"layer {shorten(plain)}: experts are not quantized, passed through")
    if elsewhere:
        names = elsewhere[0] if len(elsewhere) == 1 else f"{elsewhere[0]} and {len(elsewhere) - 1} more"
        building.notes.append(f"{names}: outside of the language model's layers, passed through")
    if foreign:
        names = foreign[0] if len(foreign) == 1 else f"{foreign[0]} and {len(foreign) - 1} more"
        building.notes.append(f"{names}: not experts of {family.name}, passed through")
    if last is not None and not building.checkpoint.is_single_file:
        check_layers_present(family, config, [name.layer for name in inside], last, building.broken)
    if not chosen and not building.broken:
        source = building.checkpoint.name
        raise NothingToConvertError(
            f"nothing to convert: {source}: no quantized experts of {family.name}; " + "; ".join(building.notes)
        )
    return chosen


def _check_numbers(building: Building, names: Sequence[ExpertName]) -> None:
    """A number belongs to one layer; two names for it are two copies, of which one would be wrong."""
    seen: dict[int, str] = {}
    for name in names:
        other = seen.setdefault(name.layer, name.layer_name)
        if other != name.layer_name:
            expected = f"one MoE layer of number {name.layer}"
            building.broken.append(Problem(name.layer_name, expected, f"also {other}"))


def _check_predicted(building: Building, names: Sequence[ExpertName], last: int) -> None:
    """Layers from num_hidden_layers on are for token prediction, in families that have it; others lose them."""
    family = building.family
    more = building.config.get(family.prediction_field)
    most = last if not family.predicts_tokens else last + more if type(more) is int else None
    for name in names:
        if most is not None and name.layer >= most:
            expected = f"layers below {most}, as config.json says"
            building.broken.append(Problem(name.layer_name, expected, f"layer {name.layer}"))


def _unknown_place(family: Family, names: Sequence[str]) -> Problem:
    """For experts that are there, but not where the family has them: no shard is missing."""
    parents = " or ".join(f"layers.N.{parent}{'.' if parent else ''}experts" for parent in family.parents)
    places = f"{parents} after {', '.join(prefix or 'nothing' for prefix in family.prefixes)}"
    found = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
    return Problem(
        found, f"experts of {family.name} under {places}", "them under another name", "this place is not known here"
    )
