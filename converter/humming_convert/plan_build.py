"""Decide, from headers and config alone, what every tensor of a checkpoint becomes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from humming_convert import hf_config
from humming_convert.errors import CheckpointError, NothingToConvertError, Problem, UnsupportedError
from humming_convert.families import ExpertName, Family, check_config
from humming_convert.layer_index import (
    LayerIndex,
    LayerTensors,
    check_layers_present,
    check_router,
    check_same_count,
    count_experts,
    index_layers,
    shorten,
)
from humming_convert.plan import ConversionPlan, LayerPlan
from humming_convert.plan_config import family_of, method_of, param_dtype_of
from humming_convert.source import Checkpoint
from humming_convert.sublayer_plan import Context, plan_sublayer
from humming_convert.tensor_parallel import cut_layers


@dataclass(slots=True)
class _Building:
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


def build_plan(
    checkpoint: Checkpoint, *, activation: str = "a16", dtype: str | None = None, tp_size: int = 1
) -> ConversionPlan:
    """The plan of a whole conversion; `dtype` overrides the parameter dtype that config.json gives.

    With a `tp_size` of more than 1 each tensor-parallel rank's part of every layer is packed for itself.

    Raises NothingToConvertError when no routed experts are quantized, CheckpointError when the checkpoint is
    not whole, UnsupportedError when it is whole but outside what is supported; the last two carry every
    problem.
    """
    broken: list[Problem] = []
    index = index_layers(checkpoint.tensors, broken)
    source = checkpoint.files[0].name if checkpoint.is_single_file else str(checkpoint.root.name or checkpoint.root)
    if not index.layers and not broken:
        raise NothingToConvertError(_nothing(checkpoint, source, "it has no routed experts", index))
    quantized = {name: layer for name, layer in index.layers.items() if layer.is_quantized()}
    if not quantized and not broken:
        codes = sorted({header.dtype for layer in index.layers.values() for header in layer.tensors()})
        reason = f"its routed experts are stored as {', '.join(codes)}, not quantized"
        raise NothingToConvertError(_nothing(checkpoint, source, reason, index))
    method = method_of(checkpoint)
    config = hf_config.text_config(checkpoint.config or {})
    building = _Building(
        checkpoint=checkpoint,
        config=config,
        family=family_of(checkpoint),
        activation=activation,
        param_dtype=dtype or "bfloat16",
        broken=broken,
    )
    faults = check_config(building.family, config)
    if dtype is None:
        building.param_dtype = param_dtype_of(checkpoint, faults, building.notes)
    if faults:
        # What follows goes by these fields.
        raise CheckpointError([*broken, *faults])
    if checkpoint.left_out:
        building.notes.append(f"{', '.join(checkpoint.left_out)}: not copied")
    chosen = _choose_layers(building, index, quantized)
    layers = [_plan_layer(building, layer, method) for layer in chosen.values()]
    check_same_count(building.counts, building.broken)
    _raise_problems(building)
    claimed = {header.name for layer in chosen.values() for header in layer.tensors()}
    return ConversionPlan(
        source=source,
        param_dtype=building.param_dtype,
        layers=_cut([layer for layer in layers if layer is not None], tp_size),
        passthrough=tuple(name for name in checkpoint.tensors if name not in claimed),
        notes=tuple(building.notes),
        tp_size=tp_size,
    )


def _cut(layers: Sequence[LayerPlan], tp_size: int) -> tuple[LayerPlan, ...]:
    try:
        return cut_layers(layers, tp_size)
    except UnsupportedError as error:
        raise UnsupportedError(_once(error.problems)) from None


def _nothing(checkpoint: Checkpoint, source: str, reason: str, index: LayerIndex) -> str:
    hint = "" if index.layers or not index.others else f" (unknown names such as {index.others[0]})"
    if checkpoint.index:
        hint += f"; it is one of the files that {checkpoint.index} names: give the folder"
    return f"nothing to convert: {source}: {reason}{hint}"


def _choose_layers(
    building: _Building, index: LayerIndex, quantized: Mapping[str, LayerTensors]
) -> dict[str, LayerTensors]:
    """The layers to convert; what is left out is passed through, with a note that says why."""
    family, config = building.family, building.config
    stated = config.get("num_hidden_layers")
    last = stated if type(stated) is int else None
    if building.checkpoint.config is None:
        building.notes.append(f"no config.json: taken for {family.name} from the names of its tensors")
    chosen: dict[str, LayerTensors] = {}
    predicted, foreign, plain = [], [], []
    for name, layer in index.layers.items():
        if layer.name.prefix not in family.prefixes or layer.name.parent not in family.parents:
            foreign.append(name)
        elif last is not None and layer.name.layer >= last:
            predicted.append(layer.name)
        elif name not in quantized:
            plain.append(layer.name.layer)
        else:
            chosen[name] = layer
    _check_numbers(building, [layer.name for name, layer in index.layers.items() if name not in foreign])
    _check_predicted(building, predicted, last or 0)
    unknown = [name for name in foreign if name in quantized]
    if unknown and not chosen and not plain:
        raise UnsupportedError([_unknown_place(family, unknown)])
    for name in index.others:
        if name.rpartition(".experts.")[0] + ".experts" in chosen:
            expected = "only tensors of experts' projections beside converted ones"
            building.broken.append(Problem(f"tensor {name}", expected, "an unknown name"))
        else:
            foreign.append(name)
    if predicted:
        numbers = shorten([name.layer for name in predicted])
        building.notes.append(f"layer {numbers}: multi-token prediction, passed through")
    if plain:
        building.notes.append(f"layer {shorten(plain)}: experts are not quantized, passed through")
    if foreign:
        names = foreign[0] if len(foreign) == 1 else f"{foreign[0]} and {len(foreign) - 1} more"
        building.notes.append(f"{names}: not experts of {family.name}, passed through")
    if last is not None and not building.checkpoint.is_single_file:
        here = [layer.name.layer for name, layer in index.layers.items() if name not in foreign]
        check_layers_present(family, config, here, last, building.broken)
    if not chosen and not building.broken:
        source = building.checkpoint.root.name
        raise NothingToConvertError(
            f"nothing to convert: {source}: no quantized experts of {family.name}; " + "; ".join(building.notes)
        )
    return chosen


def _check_numbers(building: _Building, names: Sequence[ExpertName]) -> None:
    """A number belongs to one layer; two names for it are two copies, of which one would be wrong."""
    seen: dict[int, str] = {}
    for name in names:
        other = seen.setdefault(name.layer, name.layer_name)
        if other != name.layer_name:
            expected = f"one MoE layer of number {name.layer}"
            building.broken.append(Problem(name.layer_name, expected, f"also {other}"))


def _check_predicted(building: _Building, names: Sequence[ExpertName], last: int) -> None:
    """Layers from num_hidden_layers on are for token prediction, in families that have it; others lose them."""
    family, told = building.family, building.config.get("num_nextn_predict_layers")
    most = last if not family.predicts_tokens else last + told if type(told) is int else None
    for name in names:
        if most is not None and name.layer >= most:
            expected = f"layers below {most}, as config.json says"
            building.broken.append(Problem(name.layer_name, expected, f"layer {name.layer}"))


def _unknown_place(family: Family, names: Sequence[str]) -> Problem:
    """For experts that are there, but not where the family has them: no shard is missing."""
    places = " or ".join(
        f"{prefix}layers.N.{parent}.experts" for prefix in family.prefixes for parent in family.parents
    )
    found = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
    return Problem(
        found, f"experts of {family.name} under {places}", "them under another name", "this prefix is not supported yet"
    )


def _plan_layer(building: _Building, layer: LayerTensors, method: str) -> LayerPlan | None:
    family, config, name = building.family, building.config, layer.name
    if layer.is_mixed:
        fused = next(
            header.name
            for (expert, _), parameters in layer.headers.items()
            if expert is None
            for header in parameters.values()
        )
        hint = "experts with weights of their own and scales in common are not supported yet"
        building.unsupported.append(
            Problem(name.layer_name, "each expert's tensors, or fused ones", f"both ({fused})", hint)
        )
        return None
    told = next((config[key] for key in family.experts_fields if type(config.get(key)) is int), None)
    experts = count_experts(layer, told, building.broken)
    if experts == 0:
        return None
    if check_router(layer, experts, building.checkpoint.tensors, building.broken):
        building.counts[name.layer_name] = experts
    context = Context(
        checkpoint=building.checkpoint,
        layer=layer,
        num_experts=experts,
        method=method,
        is_interleaved=family.is_interleaved and layer.is_fused,
        activation=building.activation,
        param_dtype=building.param_dtype,
        broken=building.broken,
        unsupported=building.unsupported,
        notes=building.notes,
    )
    sublayers = [plan_sublayer(context, part) for part in ("w13", "w2")]
    w13, w2 = sublayers
    if w13 is None or w2 is None:
        return None
    plan = LayerPlan(
        layer_name=name.layer_name,
        family=family.name,
        num_experts=experts,
        hidden_size=w13.shape_k,
        intermediate_size=w2.shape_k,
        activation_function=family.activation_function,
        is_gated=True,
        is_interleaved=context.is_interleaved,
        has_bias=w13.has_bias or w2.has_bias,
        sublayers=(w13, w2),
        source_bytes=sum(header.nbytes for header in layer.tensors()),
    )
    _check_sizes(building, plan)
    return plan


def _check_sizes(building: _Building, layer: LayerPlan) -> None:
    """w13 and w2 must be each other's transpose in shape, and what config.json says."""
    w13, w2 = layer.sublayers
    hidden, intermediate = layer.hidden_size, layer.intermediate_size
    if set(w13.shape_n_stacks) != {intermediate} or w2.shape_n != hidden:
        expected = f"gate and up {intermediate} x {hidden}, as down {w2.shape_n} x {w2.shape_k} asks"
        found = f"{' and '.join(str(rows) for rows in w13.shape_n_stacks)} x {w13.shape_k}"
        building.broken.append(Problem(layer.layer_name, expected, found))
        return
    fields: Sequence[tuple[str, int]] = (
        (building.family.hidden_field, hidden),
        (building.family.intermediate_field, intermediate),
    )
    for name, found_size in fields:
        told = building.config.get(name)
        if type(told) is int and told != found_size:
            problem = Problem(layer.layer_name, f"{name} {told}, as config.json says", f"{found_size}")
            building.broken.append(problem)


def _raise_problems(building: _Building) -> None:
    """A broken checkpoint goes before an unsupported one: what it is can only be told once it is whole."""
    checkpoint = building.checkpoint
    if checkpoint.index and (building.broken or building.unsupported):
        found = f"one of the files that {checkpoint.index} names"
        raise CheckpointError([Problem(checkpoint.files[0].name, "a whole checkpoint", found, "give the folder")])
    if building.broken:
        raise CheckpointError([*building.broken, *building.unsupported])
    if building.unsupported:
        raise UnsupportedError(_once(building.unsupported))


def _once(problems: Sequence[Problem]) -> list[Problem]:
    """Each reason once, with the first place and the number of others: layers share their format."""
    places: dict[tuple[str, str, str], list[str]] = {}
    for problem in problems:
        places.setdefault((problem.expected, problem.found, problem.hint), []).append(problem.where)
    return [
        Problem(where[0] if len(where) == 1 else f"{where[0]} and {len(where) - 1} more", *reason)
        for reason, where in places.items()
    ]
