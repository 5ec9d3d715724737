"""Plan one sublayer: ask the formats, check that every expert has every tensor, lay the tensors out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from humming_convert.errors import Problem
from humming_convert.formats import detect
from humming_convert.formats.base import Accepted, Facts, Refused, Rule, Sublayer, is_scalar
from humming_convert.fused_view import fused_view
from humming_convert.layer_index import LayerTensors
from humming_convert.plan import Part, StackedTensor, SublayerPlan
from humming_convert.source import Checkpoint, TensorHeader

# Steps after which a tensor has another dtype than it is stored in.
_UNKNOWN = "a supported checkpoint format"  # what `detect` expects where no format says more
_CHANGING = ("view", "to_dtype", "e8m0_to_float32", "pack_int8_zero_point", "pack_signed_zero_point", "signed_rows")


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """One layer with all that its sublayers' plans depend on; problems and notes are added to the lists.

    `is_interleaved` says that gate and up rows alternate in the kernels, as they then do in a fused tensor; `hidden`
    is the experts' hidden size as config.json says.
    """

    checkpoint: Checkpoint
    layer: LayerTensors
    num_experts: int
    method: str
    is_gated: bool
    is_interleaved: bool
    hidden: int | None
    activation: str
    param_dtype: str
    broken: list[Problem]
    unsupported: list[Problem]
    notes: list[str]

    @property
    def experts(self) -> Iterable[int | None]:
        """The keys under which the layer's tensors are found, in order."""
        return (None,) if self.layer.is_fused else range(self.num_experts)


def plan_sublayer(context: Context, part: str) -> SublayerPlan | None:
    """The plan of `part` (w13 or w2); None after adding what is wrong to the context's problems."""
    layer = context.layer
    projections = layer.projections(part, is_gated=context.is_gated)
    where = f"{layer.name.layer_name} {part}"
    stacks = tuple(layer.facts(projection) for projection in projections)
    absent = [name for name, stack in zip(projections, stacks, strict=True) if not stack]
    if absent:
        context.broken.append(
            Problem(where, f"{' and '.join(projections)} of every expert", f"no {absent[0]}")
        )
        return None
    sublayer = Sublayer(
        name=part,
        where=where,
        num_experts=context.num_experts,
        is_fused=layer.is_fused,
        is_interleaved=context.is_interleaved and layer.is_fused,
        stacks=stacks,
        modules=tuple(_modules(layer, projections)),
        quantization=context.checkpoint.quantization or {},
        method=context.method,
        param_dtype=context.param_dtype,
    )
    answer = detect(sublayer)
    if isinstance(answer, Refused) and layer.is_fused:
        context, answer = _detect_fused(context, sublayer, projections, answer)
        stacks = tuple(context.layer.facts(projection) for projection in projections)
    if isinstance(answer, Refused):
        (context.broken if answer.is_broken else context.unsupported).append(answer.problem)
        return None
    problems = list(_check_tensors(context, projections, stacks, answer))
    if problems:
        context.broken.extend(problems)
        return None
    _add_notes(context, answer)
    return _lay_out(context, part, projections, answer)


def _detect_fused(
    context: Context, sublayer: Sublayer, projections: tuple[str, ...], refused: Refused
) -> tuple[Context, Accepted | Refused]:
    """Ask the formats of single experts about tensors that hold them all; `refused` if that does not help."""
    view = fused_view(context.layer, context.hidden)
    if view is None:
        return context, refused
    stacks = tuple(view.facts(projection) for projection in projections)
    answer = detect(replace(sublayer, is_fused=False, stacks=stacks))
    if isinstance(answer, Refused):
        return context, answer if refused.problem.expected == _UNKNOWN else refused
    return replace(context, layer=view.layer), view.adapted(answer, projections)


def _modules(layer: LayerTensors, projections: tuple[str, ...]) -> Iterable[str]:
    for (_, projection), parameters in layer.headers.items():
        if projection in projections:
            parameter, header = next(iter(parameters.items()))
            yield header.name[: -len(parameter) - 1] if parameter else header.name


def _check_tensors(
    context: Context, projections: tuple[str, ...], stacks: tuple[dict[str, Facts], ...], answer: Accepted
) -> Iterable[Problem]:
    """Every expert has every tensor that is needed, like the others', and none without a meaning."""
    needed = [rule.parameter for rule in answer.rules]
    inputs = [rule.parameter for rule in answer.inputs]
    if context.activation == "checkpoint":
        needed += inputs
    known = {*needed, *inputs, *answer.unused, "input_scale", "input_global_scale"}
    for rule in (*answer.rules, *answer.inputs):
        changes = any(step.name in _CHANGING for step in rule.steps)
        codes = {stack[rule.parameter].dtype for stack in stacks if rule.parameter in stack}
        if not changes and codes - {rule.dtype}:
            where = f"{context.layer.name.layer_name} {rule.parameter}"
            yield Problem(where, f"dtype {rule.dtype} in every projection", ", ".join(sorted(codes)))
    for projection, facts in zip(projections, stacks, strict=True):
        for expert in context.experts:
            parameters = context.layer.headers.get((expert, projection), {})
            yield from _check_expert(context, parameters, facts, needed, known, (expert, projection))


def _check_expert(
    context: Context,
    parameters: dict[str, TensorHeader],
    facts: dict[str, Facts],
    needed: list[str],
    known: set[str],
    key: tuple[int | None, str],
) -> Iterable[Problem]:
    for parameter in needed:
        if parameter not in parameters:
            name = _missing_name(context, parameters, key, parameter)
            hint = "fetch the missing shards, or quantize again"
            yield Problem(f"tensor {name}", "it, as other experts or projections have it", "none", hint)
    for parameter, header in parameters.items():
        if parameter not in known:
            yield Problem(
                f"tensor {header.name}",
                "only tensors that the format knows",
                f"{header.dtype} {list(header.shape)}",
            )
            continue
        common = facts[parameter]
        is_same_form = header.shape == common.shape or (is_scalar(header.shape) and is_scalar(common.shape))
        if header.dtype != common.dtype or not is_same_form:
            expected = f"{common.dtype} {list(common.shape)}, as most experts have it"
            yield Problem(f"tensor {header.name}", expected, f"{header.dtype} {list(header.shape)}")


def _missing_name(
    context: Context, parameters: dict[str, TensorHeader], key: tuple[int | None, str], parameter: str
) -> str:
    """The full name of a tensor that is not there, in the checkpoint's own words as far as possible."""
    if parameters:
        present, header = next(iter(parameters.items()))
        if present and not header.name.endswith(f".{present}"):
            return f"{header.name} beside its {parameter}"
        return header.name[: len(header.name) - len(present)] + parameter
    expert, projection = key
    for (other, name), others in context.layer.headers.items():
        if name == projection and other is not None:
            present, header = next(iter(others.items()))
            head, middle, tail = header.name[: len(header.name) - len(present)].rpartition(
                f".experts.{other + context.layer.first}."
            )
            return f"{head}{middle.rsplit('.', 2)[0]}.{(expert or 0) + context.layer.first}.{tail}{parameter}"
    return f"{context.layer.name.layer_name}.{expert}.{projection}.{parameter}"


def _add_notes(context: Context, answer: Accepted) -> None:
    notes = list(answer.notes)
    for rule in answer.rules:
        if rule.dtype == "F16" and context.param_dtype == "bfloat16" and not rule.is_weight:
            notes.append(
                f"{rule.parameter} stored as F16 is rounded to bfloat16; --dtype float16 keeps it exact"
            )
    context.notes.extend(note for note in notes if note not in context.notes)


def _lay_out(context: Context, part: str, projections: tuple[str, ...], answer: Accepted) -> SublayerPlan:
    uses_inputs = context.activation == "checkpoint" and bool(answer.inputs)
    claimed = {rule.parameter for rule in answer.rules} | {
        rule.parameter for rule in answer.inputs if uses_inputs
    }
    is_interleaved = _take_turns(context, projections, answer)
    unused, expected, checks = [], [], []
    for stack, projection in enumerate(projections):
        for expert in context.experts:
            for parameter, header in context.layer.headers.get((expert, projection), {}).items():
                if parameter not in claimed:
                    unused.append(header.name)
                if parameter in answer.expected:
                    expected.append((header.name, answer.expected[parameter][stack]))
                if parameter in answer.checks:
                    checks.append((header.name, answer.checks[parameter]))
    return SublayerPlan(
        name=part,
        shape_n=sum(answer.stacks_n),
        shape_k=answer.shape_k,
        shape_n_stacks=answer.stacks_n,
        has_bias=any(rule.name == "bias" for rule in answer.rules),
        format=answer.format,
        weight_schema=answer.weight_schema,
        input_schema=answer.input_schema,
        source_schema=answer.source_schema or answer.weight_schema,
        tensors=tuple(_stack(context, projections, rule, is_interleaved=is_interleaved) for rule in answer.rules),
        input_tensors=tuple(_stack(context, projections, rule) for rule in answer.inputs)
        if uses_inputs
        else (),
        unused=tuple(unused),
        expected=tuple(expected),
        checks=tuple(checks),
    )


def _take_turns(context: Context, projections: tuple[str, ...], answer: Accepted) -> bool:
    """Whether rows of gate and up are to alternate that are stored one after the other, which packed rows cannot."""
    if not context.is_interleaved or len(projections) != 2:
        return False
    rows = sum(answer.stacks_n)
    if all(_is_per_projection(rule) or rule.shape[rule.axis] == rows for rule in answer.rules):
        return True
    note = "gate and up rows stay apart, as they are packed: vLLM 0.33.0 serves this family with alternating rows only"
    if note not in context.notes:
        context.notes.append(note)
    return False


def _is_per_projection(rule: Rule) -> bool:
    return rule.shape == (2,) and not rule.is_weight


def _stack(
    context: Context, projections: tuple[str, ...], rule: Rule, *, is_interleaved: bool = False
) -> StackedTensor:
    headers = context.layer.headers
    parts = tuple(
        Part(headers[expert, projection][rule.parameter].name, expert, stack)
        for expert in context.experts
        for stack, projection in enumerate(projections)
    )
    has_turns = is_interleaved and not _is_per_projection(rule)
    # Humming would give a scale to each half of the rows.
    more = ",unequal_interleaved" if is_interleaved and not has_turns else ""
    return StackedTensor(
        name=rule.name,
        dtype=rule.dtype,
        shape=(context.num_experts, *rule.shape),
        axis=rule.axis,
        parts=parts,
        steps=rule.steps,
        is_weight=rule.is_weight,
        check=rule.check + more,
        is_interleaved=has_turns,
    )
