"""Decide, from headers and config alone, what every tensor of a checkpoint becomes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from humming_convert import hf_config
from humming_convert.errors import CheckpointError, NothingToConvertError, Problem, UnsupportedError
from humming_convert.families import BY_MODEL_TYPE, FAMILIES, Family, family_from_names
from humming_convert.formats import METHODS, METHODS_TO_COME
from humming_convert.layer_index import (
    LayerIndex,
    LayerTensors,
    check_layers_present,
    count_experts,
    index_layers,
    shorten,
)
from humming_convert.plan import ConversionPlan, LayerPlan
from humming_convert.source import Checkpoint
from humming_convert.sublayer_plan import Context, plan_sublayer

_MAX_LAYERS = 10_000


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


def build_plan(
    checkpoint: Checkpoint, *, activation: str = "a16", dtype: str | None = None
) -> ConversionPlan:
    """The plan of a whole conversion; `dtype` overrides the parameter dtype that config.json gives.

    Raises NothingToConvertError when no routed experts are quantized, CheckpointError when the checkpoint is
    not whole, UnsupportedError when it is whole but outside what is supported; the last two carry every
    problem.
    """
    broken: list[Problem] = []
    index = index_layers(checkpoint.tensors, broken)
    source = (
        checkpoint.files[0].name
        if checkpoint.is_single_file
        else str(checkpoint.root.name or checkpoint.root)
    )
    if not index.layers and not broken:
        raise NothingToConvertError(_nothing(source, "it has no routed experts", index))
    quantized = {name: layer for name, layer in index.layers.items() if layer.is_quantized()}
    if not quantized and not broken:
        codes = sorted({header.dtype for layer in index.layers.values() for header in layer.tensors()})
        reason = f"its routed experts are stored as {', '.join(codes)}, not quantized"
        raise NothingToConvertError(_nothing(source, reason, index))
    method = _check_method(checkpoint)
    config = hf_config.text_config(checkpoint.config or {})
    building = _Building(
        checkpoint=checkpoint,
        config=config,
        family=_family_of(checkpoint),
        activation=activation,
        param_dtype=dtype or _param_dtype(checkpoint.config, config),
        broken=broken,
    )
    chosen = _choose_layers(building, index, quantized)
    layers = [_plan_layer(building, layer, method) for layer in chosen.values()]
    _raise_problems(building)
    claimed = {header.name for layer in chosen.values() for header in layer.tensors()}
    return ConversionPlan(
        source=source,
        param_dtype=building.param_dtype,
        layers=tuple(layer for layer in layers if layer is not None),
        passthrough=tuple(name for name in checkpoint.tensors if name not in claimed),
        notes=tuple(building.notes),
    )


def _nothing(source: str, reason: str, index: LayerIndex) -> str:
    hint = "" if index.layers or not index.others else f" (unknown names such as {index.others[0]})"
    return f"nothing to convert: {source}: {reason}{hint}"


def _check_method(checkpoint: Checkpoint) -> str:
    """The quantization method by its own name; "" when the checkpoint says nothing."""
    quantization = checkpoint.quantization
    if quantization is None:
        return ""
    stated = str(quantization.get("quant_method", "")).lower()
    method = METHODS.get(stated)
    if method is not None:
        return method
    where, known = checkpoint.quantization_origin, ", ".join(sorted(set(METHODS.values())))
    if stated == "gptq" and quantization.get("desc_act"):
        expected = "weights in the order of their columns"
        hint = "Humming's kernels have no g_idx, which activation order needs: use desc_act false"
        raise UnsupportedError([Problem(where, expected, "GPTQ with desc_act", hint)])
    if stated in METHODS_TO_COME:
        hint = "this method is not supported yet"
        raise UnsupportedError([Problem(where, f"a quant_method among {known}", repr(stated), hint)])
    raise UnsupportedError([Problem(where, f"a quant_method among {known}", repr(stated))])


def _family_of(checkpoint: Checkpoint) -> Family:
    if checkpoint.config is None:
        return family_from_names(
            [name for name in checkpoint.tensors if ".layers." in name or name.startswith("layers.")]
        )
    stated = [
        str(part.get("model_type")) for part in (checkpoint.config, hf_config.text_config(checkpoint.config))
    ]
    for model_type in stated:
        if model_type in BY_MODEL_TYPE:
            return BY_MODEL_TYPE[model_type]
    known = ", ".join(model_type for row in FAMILIES for model_type in row.model_types)
    problem = Problem(
        "config.json", f"a model_type among {known}", repr(stated[-1]), "this family is not supported yet"
    )
    raise UnsupportedError([problem])


def _param_dtype(config: Mapping[str, Any] | None, inner: Mapping[str, Any]) -> str:
    """float16 if the model runs in it; everything else runs in bfloat16."""
    for part in (inner, config or {}):
        stated = str(part.get("dtype") or part.get("torch_dtype") or "").removeprefix("torch.")
        if stated:
            return "float16" if stated == "float16" else "bfloat16"
    return "bfloat16"


def _choose_layers(
    building: _Building, index: LayerIndex, quantized: Mapping[str, LayerTensors]
) -> dict[str, LayerTensors]:
    """The layers to convert; what is left out is passed through, with a note that says why."""
    family, config = building.family, building.config
    last = config.get("num_hidden_layers")
    last = last if type(last) is int and 0 <= last <= _MAX_LAYERS else None
    if building.checkpoint.config is None:
        building.notes.append(f"no config.json: taken for {family.name} from the names of its tensors")
    chosen: dict[str, LayerTensors] = {}
    predicted, foreign, plain = [], list(index.others), []
    for name, layer in index.layers.items():
        if layer.name.prefix not in family.prefixes or layer.name.parent not in family.parents:
            foreign.append(name)
        elif last is not None and layer.name.layer >= last:
            predicted.append(layer.name.layer)
        elif name not in quantized:
            plain.append(layer.name.layer)
        else:
            chosen[name] = layer
    for name in index.others:
        if name.rpartition(".experts.")[0] + ".experts" in chosen:
            expected = "only tensors of experts' projections beside converted ones"
            building.broken.append(Problem(f"tensor {name}", expected, "an unknown name"))
            foreign.remove(name)
    if predicted:
        building.notes.append(f"layer {shorten(predicted)}: multi-token prediction, passed through")
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
            f"nothing to convert: {source}: no quantized experts of {family.name}; "
            + "; ".join(building.notes)
        )
    return chosen


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
