"""A plan, and what is supported at all, as text for people and as plain values for programs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from humming_convert.families import FAMILIES, REFUSED_FAMILIES
from humming_convert.family import Family
from humming_convert.formats import FORMATS, METHODS
from humming_convert.plan import ConversionPlan, LayerPlan, SublayerPlan
from humming_convert.shard_schedule import schedule
from humming_convert.source import Checkpoint


def plan_as_json(plan: ConversionPlan, checkpoint: Checkpoint) -> dict[str, Any]:
    """The plan as JSON values: every layer, the passed-through tensors by name, sizes in bytes."""
    passed = [checkpoint.tensors[name] for name in plan.passthrough]
    return {
        "source": plan.source,
        "commit": checkpoint.origin.commit if checkpoint.origin is not None else None,
        "low_disk_bytes": low_disk_bytes(plan, checkpoint),
        "files": len(checkpoint.files),
        "tensors": len(checkpoint.tensors),
        "bytes": sum(tensor.nbytes for tensor in checkpoint.tensors.values()),
        "quantization": {
            "origin": checkpoint.quantization_origin or None,
            "quant_method": (checkpoint.quantization or {}).get("quant_method"),
        },
        "param_dtype": plan.param_dtype,
        "tp_size": plan.tp_size,
        "layers": [_layer_as_json(layer) for layer in plan.layers],
        "converted_bytes": sum(layer.source_bytes for layer in plan.layers),
        "passthrough": {
            "bytes": sum(tensor.nbytes for tensor in passed),
            "tensors": list(plan.passthrough),
            "side_files": list(checkpoint.side_files),
        },
        "notes": list(plan.notes),
    }


def plan_as_text(plan: ConversionPlan, checkpoint: Checkpoint) -> str:
    """The plan as a table, alike layers on one row."""
    method = (checkpoint.quantization or {}).get("quant_method", "none given")
    origin = checkpoint.quantization_origin or "told by its tensors"
    total = sum(tensor.nbytes for tensor in checkpoint.tensors.values())
    passed = sum(checkpoint.tensors[name].nbytes for name in plan.passthrough)
    converted = sum(layer.source_bytes for layer in plan.layers)
    parts = _parts(plan)
    unused = sum(len(part.unused) for layer in plan.layers for part in layer.sublayers)
    families = ", ".join(dict.fromkeys(layer.family for layer in plan.layers))
    lines = [
        f"{plan.source}: {_count(len(checkpoint.tensors), 'tensor')} in "
        f"{_count(len(checkpoint.files), 'file')}, {_size(total)}",
        f"family {families}, quant_method {method} ({origin}), parameters in {plan.param_dtype}",
        *([parts] if parts else []),
        "",
        *_table(["layers", "experts", "hidden", "intermediate", "w13", "w2", "size"], _rows(plan.layers)),
        "",
        f"converted: {_count(len(plan.layers), 'MoE layer')}, {_size(converted)}",
        f"passed through: {_count(len(plan.passthrough), 'tensor')}, {_size(passed)}, byte for byte; "
        f"{_count(len(checkpoint.side_files), 'other file')}",
    ]
    low_disk = low_disk_bytes(plan, checkpoint)
    if checkpoint.origin is not None:
        lines[0] += f", commit {checkpoint.origin.commit}"
    if low_disk is not None:
        lines.append(
            f"to download: {_size(sum(file.size for file in checkpoint.files))}; with --low-disk at most "
            f"{_size(low_disk)} of it on the disk at once, and the passed-through tensors once more"
        )
    if unused:
        lines.append(f"left out: {_count(unused, 'tensor')} with no place in the kernel layout")
    lines += [f"note: {note}" for note in plan.notes]
    return "\n".join(lines)


def _parts(plan: ConversionPlan) -> str:
    """What each rank gets of the intermediate sizes, where ranks are packed for themselves."""
    shares: dict[str, None] = {}
    for layer in plan.layers:
        held = [(rank.part.end - rank.part.begin, rank.intermediate_size) for rank in layer.ranks if rank.part]
        words = [str(count) if count == width else f"{count} made up to {width}" for count, width in held]
        if words:
            equal = len(set(words)) == 1
            shares[f"{layer.intermediate_size} into {f'{words[0]} each' if equal else ', '.join(words)}"] = None
    return f"tensor parallelism {plan.tp_size}: intermediate size {'; '.join(shares)}" if shares else ""


FAMILY_HEADS = ("family", "model_type", "layers in vLLM 0.33.0", "experts", "router")
FORMAT_HEADS = ("format", "what it is")


def family_rows() -> list[list[str]]:
    """The families' table in words, one row each, under FAMILY_HEADS."""
    return [
        [row.name, ", ".join(row.model_types), _place(row), _kind(row), " or ".join(row.routers)] for row in FAMILIES
    ]


def format_rows() -> list[list[str]]:
    """The formats' table in words, one row each, under FORMAT_HEADS."""
    return [[row.name, row.summary] for row in FORMATS if row.summary]


def low_disk_bytes(plan: ConversionPlan, checkpoint: Checkpoint) -> int | None:
    """The most bytes of downloaded files that `convert --low-disk` keeps; None for what needs no download."""
    if checkpoint.origin is None or not checkpoint.origin.is_remote:
        return None
    return schedule(plan, checkpoint.tensors).peak_bytes({file.name: file.size for file in checkpoint.files})


def support_as_json() -> dict[str, Any]:
    """Families, formats and quantization methods from the tables that decide about them."""
    return {
        "families": {row.name: list(row.model_types) for row in FAMILIES},
        "refused_model_types": {name: found for name, (_, found) in REFUSED_FAMILIES.items()},
        "formats": {row.name: row.summary for row in FORMATS if row.summary},
        "quant_methods": sorted(METHODS),
    }


def support_as_text() -> str:
    """Families and formats as two tables."""
    return "\n".join([*_table(FAMILY_HEADS, family_rows()), "", *_table(FORMAT_HEADS, format_rows())])


def _place(row: Family) -> str:
    """`model.layers.N.mlp.experts`, as vLLM calls it in a model without wrappers."""
    if not row.is_served:
        return "none"
    prefix = row.prefixes.get("model.", "model.")
    parents = dict.fromkeys(row.parents.values())
    own = row.groups or ("experts",)
    return " or ".join(f"{prefix}layers.N.{parent}{'.' if parent else ''}{name}" for parent in parents for name in own)


def _kind(row: Family) -> str:
    words = [row.activation if row.is_gated else f"{row.activation}, no gate"]
    if row.layer_activation is not None:
        words.append("by layer")
    if row.is_interleaved:
        words.append("gate and up rows alternate")
    if len(row.hidden) > 1:
        words.append(f"hidden size {row.hidden[0]}")
    return ", ".join(words)


def _layer_as_json(layer: LayerPlan) -> dict[str, Any]:
    return {
        "layer_name": layer.layer_name,
        "family": layer.family,
        "num_experts": layer.num_experts,
        "hidden_size": layer.hidden_size,
        "intermediate_size": layer.intermediate_size,
        "activation_function": layer.activation_function,
        "gate_up": "interleaved" if layer.is_interleaved else "split",
        "has_bias": layer.has_bias,
        "source_bytes": layer.source_bytes,
        "ranks": [_rank_as_json(rank) for rank in layer.ranks],
        "sublayers": {part.name: _sublayer_as_json(part) for part in layer.sublayers},
    }


def _rank_as_json(rank: LayerPlan) -> dict[str, Any]:
    part = {} if rank.part is None else {"begin": rank.part.begin, "end": rank.part.end}
    return {"layer_name": rank.layer_name, "intermediate_size": rank.intermediate_size, **part}


def _sublayer_as_json(part: SublayerPlan) -> dict[str, Any]:
    return {
        "format": part.format,
        "shape_n": part.shape_n,
        "shape_k": part.shape_k,
        "weight_schema": part.weight_schema,
        "input_schema": part.input_schema,
        "tensors": {
            tensor.name: {"dtype": tensor.dtype, "shape": list(tensor.shape), "parts": len(tensor.parts)}
            for tensor in (*part.tensors, *part.input_tensors)
        },
        "unused": len(part.unused),
    }


def _rows(layers: Sequence[LayerPlan]) -> list[list[str]]:
    """One row for each run of layers that differ only in their number."""
    rows: list[list[str]] = []
    runs: list[tuple[list[LayerPlan], list[str]]] = []
    for layer in layers:
        w13, w2 = layer.sublayers
        sizes = [str(layer.num_experts), str(layer.hidden_size), str(layer.intermediate_size)]
        row = [*sizes, _form(w13), _form(w2)]
        if runs and runs[-1][1] == row:
            runs[-1][0].append(layer)
        else:
            runs.append(([layer], row))
    for run, row in runs:
        first, last = run[0].layer_name, run[-1].layer_name
        name = first if len(run) == 1 else f"{first} to {last} ({len(run)})"
        rows.append([name, *row, _size(sum(layer.source_bytes for layer in run))])
    return rows


def _form(part: SublayerPlan) -> str:
    schema = part.weight_schema
    group = schema.get("group_size") or schema.get("weight_block_size") or schema.get("block_structure")
    bits = schema.get("bits") or (schema.get("num_bits") if schema.get("type") == "int" else None)
    words = [part.format]
    if bits:
        words.append(f"{bits} bit")
    if isinstance(group, list):
        words.append("x".join(str(extent) for extent in group))
    elif group:
        words.append(f"g{group}")
    if schema.get("zero_point") or schema.get("symmetric") is False:
        words.append("asym")
    return " ".join(words)


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    cells = [list(heads), *(list(row) for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(heads))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _size(size: int) -> str:
    value, unit = float(size), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if value < 1000:
            break
        value, unit = value / 1000, larger
    return f"{size} B" if unit == "B" else f"{value:.1f} {unit}"
