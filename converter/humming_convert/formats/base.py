"""What a format is shown of a sublayer, and what it answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from humming_convert.errors import Problem
from humming_convert.plan import Step

FLOATS = ("BF16", "F16", "F32")
# Below this, Humming's 16 bit kernels have no group size; other activations ask for more, which is checked with them.
MIN_GROUP = 16


class Facts(NamedTuple):
    """dtype and shape of one parameter of one projection (of most experts, if they differ)."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Sublayer:
    """Everything that is known of w13 or w2 of one layer from headers and config.

    `stacks` holds one map of parameters per projection (gate and up, or down); a fused layer has one for both. `modules`
    are the module names of every projection of every expert, for config entries that name modules.
    """

    name: str
    where: str
    num_experts: int
    is_fused: bool
    is_interleaved: bool
    stacks: tuple[Mapping[str, Facts], ...]
    modules: tuple[str, ...]
    quantization: Mapping[str, Any]
    method: str
    param_dtype: str

    @property
    def parameters(self) -> frozenset[str]:
        """Names of all parameters that any projection has."""
        return frozenset(name for stack in self.stacks for name in stack)

    def dtypes(self, parameter: str) -> tuple[str, ...]:
        """The dtype codes that the projections store `parameter` in, without repetition."""
        return tuple(dict.fromkeys(stack[parameter].dtype for stack in self.stacks if parameter in stack))

    def has(self, **parameters: str | Sequence[str]) -> bool:
        """Whether each parameter exists, with (one of) the given dtype codes in every projection that has it."""
        for name, codes in parameters.items():
            found = self.dtypes(name)
            if not found or any(
                code not in ((codes,) if isinstance(codes, str) else codes) for code in found
            ):
                return False
        return True

    def describe(self) -> str:
        """Its parameters with dtype and shape, for messages."""
        facts = dict(self.stacks[0])
        for stack in self.stacks[1:]:
            facts = {**stack, **facts}
        return ", ".join(
            f"{name or '(fused weight)'} {fact.dtype} {list(fact.shape)}" for name, fact in facts.items()
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One tensor of the sublayer under the schema's name, made of `parameter` of every expert and projection.

    `shape` is one expert's, all projections stacked along `axis`; `steps` has one tuple for all projections, or one
    for each.
    """

    name: str
    parameter: str
    dtype: str
    shape: tuple[int, ...]
    axis: int = 0
    steps: tuple[Step, ...] = ()
    is_weight: bool = False
    check: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """The sublayer is this format: its logical shape, Humming's schemas, and what becomes of each parameter.

    `unused` are parameters with no place in the kernel layout; `optional` are those of `inputs`, which matter only
    when activations are quantized as the checkpoint says. `expected` gives the whole numbers that an unused
    parameter must hold, per projection.
    """

    format: str
    stacks_n: tuple[int, ...]
    shape_k: int
    weight_schema: dict[str, Any]
    rules: tuple[Rule, ...]
    source_schema: dict[str, Any] | None = None
    input_schema: dict[str, Any] | None = None
    inputs: tuple[Rule, ...] = ()
    unused: tuple[str, ...] = ()
    expected: Mapping[str, tuple[tuple[int, ...], ...]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Rejected:
    """The sublayer is not this format, and why."""

    reason: str


@dataclass(frozen=True, slots=True)
class Refused:
    """The sublayer is this format, but broken (`is_broken`) or outside what Humming takes."""

    problem: Problem
    is_broken: bool = False


Answer = Accepted | Rejected | Refused


class CheckpointFormat(Protocol):
    """One on-disk format. `summary` is one line for the table of supported formats."""

    @property
    def name(self) -> str:
        """Short name, as written into the plan and the manifest."""

    @property
    def summary(self) -> str:
        """What it is, and who writes it."""

    def match(self, sublayer: Sublayer) -> Answer:
        """Whether `sublayer` is this format, from its tensors' names, dtypes and shapes first."""


def broken(sublayer: Sublayer, expected: str, found: str, hint: str = "") -> Refused:
    """The checkpoint contradicts itself."""
    return Refused(Problem(sublayer.where, expected, found, hint), is_broken=True)


def unsupported(sublayer: Sublayer, expected: str, found: str, hint: str = "") -> Refused:
    """The checkpoint is sound, but this cannot be converted."""
    return Refused(Problem(sublayer.where, expected, found, hint))


def require_shapes(
    sublayer: Sublayer,
    parameter: str,
    shapes: Sequence[tuple[int, ...]],
    also: Sequence[tuple[int, ...]] = (),
) -> Refused | None:
    """Refuse unless `parameter` of projection i has `shapes[i]` (or `also[i]`); a missing one is reported elsewhere."""
    for index, (stack, shape) in enumerate(zip(sublayer.stacks, shapes, strict=True)):
        facts = stack.get(parameter)
        allowed = {shape} | ({also[index]} if also else set())
        if facts is not None and facts.shape not in allowed:
            return broken(sublayer, f"{parameter} of shape {list(shape)}", f"{list(facts.shape)}")
    return None


def check_group(sublayer: Sublayer, group: int, shape_k: int) -> Refused | None:
    """Refuse a group size that does not divide K, or that Humming's kernels do not have."""
    if group <= 0 or shape_k % group != 0:
        return broken(sublayer, f"a group size that divides K = {shape_k}", f"{group}")
    if group & -group < MIN_GROUP:
        expected = f"a group size that is a multiple of {MIN_GROUP}"
        return unsupported(sublayer, expected, f"{group}", "Humming's kernels have no smaller groups")
    return None


def bias_rule(sublayer: Sublayer, rows: int, parameter: str = "bias") -> tuple[Rule, ...]:
    """The rule for a bias, if there is one; it becomes `param_dtype`, which is what vLLM holds it in."""
    if parameter not in sublayer.parameters:
        return ()
    code = {"bfloat16": "BF16", "float16": "F16"}[sublayer.param_dtype]
    stored = sublayer.dtypes(parameter)
    steps = () if stored == (code,) else (Step("to_dtype", (("dtype", sublayer.param_dtype),)),)
    return (Rule(name="bias", parameter=parameter, dtype=code, shape=(rows,), steps=steps, check="finite"),)


def tensor_scale_rule(sublayer: Sublayer, name: str, parameter: str, check: str) -> Rule:
    """One number per projection, as F32 `[stacks]`: shapes () and (1,) both occur on disk."""
    steps = () if sublayer.dtypes(parameter) == ("F32",) else (Step("to_dtype", (("dtype", "float32"),)),)
    return Rule(
        name=name, parameter=parameter, dtype="F32", shape=(len(sublayer.stacks),), steps=steps, check=check
    )


def rounding_check(sublayer: Sublayer, parameter: str, check: str) -> str:
    """`check`, and where the scale will be rounded to float16 also that no value is lost by it."""
    wide = any(code != "F16" for code in sublayer.dtypes(parameter))
    return f"{check},float16" if sublayer.param_dtype == "float16" and wide else check
