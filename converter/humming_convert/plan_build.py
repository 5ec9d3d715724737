"""Decide, from headers and config alone, what every tensor of a checkpoint becomes."""

from __future__ import annotations

from collections.abc import Sequence

from humming_convert import hf_config
from humming_convert.errors import CheckpointError, NothingToConvertError, Problem, UnsupportedError
from humming_convert.expert_names import ExpertName
from humming_convert.family import check_config, told
from humming_convert.layer_choice import Building, choose_layers
from humming_convert.layer_index import (
    LayerIndex,
    LayerTensors,
    check_router,
    check_router_present,
    check_same_count,
    count_experts,
    index_layers,
    split_groups,
)
from humming_convert.plan import ConversionPlan, LayerPlan
from humming_convert.plan_config import family_of, method_of, param_dtype_of
from humming_convert.source import Checkpoint
from humming_convert.sublayer_plan import Context, plan_sublayer
from humming_convert.tensor_parallel import cut_layers


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
    source = checkpoint.name
    if not index.layers and not broken:
        raise NothingToConvertError(_nothing(checkpoint, source, "it has no routed experts", index))
    quantized = {name: layer for name, layer in index.layers.items() if layer.is_quantized()}
    if not quantized and not broken:
        codes = sorted({header.dtype for layer in index.layers.values() for header in layer.tensors()})
        reason = f"its routed experts are stored as {', '.join(codes)}, not quantized"
        raise NothingToConvertError(_nothing(checkpoint, source, reason, index))
    method = method_of(checkpoint)
    config = hf_config.text_config(checkpoint.config or {})
    building = Building(
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
    chosen = choose_layers(building, index, quantized)
    layers = [plan for layer in chosen.values() for plan in _plan_groups(building, layer, method)]
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


def _plan_groups(building: Building, layer: LayerTensors, method: str) -> list[LayerPlan | None]:
    """One plan, or one for each layer that vLLM makes of the checkpoint's."""
    family = building.family
    if not family.groups or building.checkpoint.config is None:
        return [_plan_layer(building, layer, method)]
    numbers = [told(building.config, family.experts, group) for group in range(len(family.groups))]
    counts = tuple(number[1] for number in numbers if number is not None)
    if len(counts) < len(family.groups):
        expected = f"{family.experts[0]}: how many experts are {' and '.join(family.groups)}"
        building.broken.append(Problem("config.json", expected, "nothing"))
        return []
    groups = split_groups(layer, counts, building.broken)
    return [_plan_layer(building, one, method, group) for group, one in enumerate(groups)]


def _plan_layer(building: Building, layer: LayerTensors, method: str, group: int | None = None) -> LayerPlan | None:
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
    index = name.layer if group is None else group
    stated, hidden = (told(config, fields, index) for fields in (family.experts, family.hidden))
    experts = count_experts(layer, stated[1] if stated else None, building.broken)
    if experts == 0:
        return None
    if group is None and check_router(layer, family, experts, building.checkpoint.tensors, building.broken):
        building.counts[name.layer_name] = experts
    if building.checkpoint.config is not None:
        check_router_present(layer, family, building.checkpoint.tensors, building.broken)
    context = Context(
        checkpoint=building.checkpoint,
        layer=layer,
        num_experts=experts,
        method=method,
        is_gated=family.is_gated,
        is_interleaved=family.is_interleaved,
        hidden=hidden[1] if hidden else None,
        activation=building.activation,
        param_dtype=building.param_dtype,
        broken=building.broken,
        unsupported=building.unsupported,
        notes=building.notes,
    )
    if _has_others(context):
        return None
    sublayers = [plan_sublayer(context, part) for part in ("w13", "w2")]
    w13, w2 = sublayers
    if w13 is None or w2 is None:
        return None
    plan = LayerPlan(
        # A bare file has no model that vLLM could serve it for.
        layer_name=name.layer_name if building.checkpoint.config is None else family.vllm_name(name, group or 0),
        family=family.name,
        num_experts=experts,
        hidden_size=w13.shape_k,
        intermediate_size=w2.shape_k,
        activation_function=family.activation_in(config, name.layer),
        is_gated=family.is_gated,
        is_interleaved=family.is_interleaved and (layer.is_fused or any(one.is_interleaved for one in w13.tensors)),
        has_bias=w13.has_bias or w2.has_bias,
        sublayers=(w13, w2),
        source_bytes=sum(header.nbytes for header in layer.tensors()),
    )
    _check_sizes(building, name, plan, index)
    return plan


def _has_others(context: Context) -> bool:
    """Whether experts have projections that the family's kernels have no place for: a gate where there is none."""
    layer = context.layer
    known = {name for part in ("w13", "w2") for name in layer.projections(part, is_gated=context.is_gated)}
    others = [header for (_, name), held in layer.headers.items() if name not in known for header in held.values()]
    if others:
        more = f" and {len(others) - 1} more" if len(others) > 1 else ""
        expected = f"no other projections than {', '.join(sorted(known))}"
        context.broken.append(Problem(f"tensor {others[0].name}{more}", expected, "one more"))
    return bool(others)


def _check_sizes(building: Building, name: ExpertName, layer: LayerPlan, index: int) -> None:
    """w13 and w2 must be each other's transpose in shape, and what config.json says."""
    w13, w2 = layer.sublayers
    hidden, intermediate = layer.hidden_size, layer.intermediate_size
    where = name.layer_name
    if set(w13.shape_n_stacks) != {intermediate} or w2.shape_n != hidden:
        rows = "gate and up" if layer.is_gated else "up"
        expected = f"{rows} {intermediate} x {hidden}, as down {w2.shape_n} x {w2.shape_k} asks"
        found = f"{' and '.join(str(rows) for rows in w13.shape_n_stacks)} x {w13.shape_k}"
        building.broken.append(Problem(where, expected, found))
        return
    family = building.family
    for fields, found_size in ((family.hidden, hidden), (family.intermediate, intermediate)):
        stated = told(building.config, fields, index)
        if stated is not None and stated[1] != found_size:
            expected = f"{stated[0]} {stated[1]}, as config.json says"
            building.broken.append(Problem(where, expected, f"{found_size}"))


def _raise_problems(building: Building) -> None:
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
