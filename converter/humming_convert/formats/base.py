"""What a format is shown of a sublayer, and what it answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from humming_convert.errors import Problem
from humming_convert.plan import Step

FLOATS = ("BF16", "F16", "F32")
# Below this, Humming's 16 bit kernels have no group size; other activations ask for more, which is checked
# with them.
MIN_GROUP = 16
_CODES = {"bfloat16": "BF16", "float16": "F16"}


class Facts(NamedTuple):
    """dtype and shape of one parameter of one projection (of most experts, if they differ)."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Sublayer:
    """Everything that is known of w13 or w2 of one layer from headers and config.

    `stacks` holds one map of parameters per projection (gate and up, or down); a fused layer has one for
    both. `modules` are the module names of every projection of every expert, for config entries that name
    modules.
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
        """Whether each parameter exists, in every projection that has it with one of the given dtypes."""
        for name, codes in parameters.items():
            found = self.dtypes(name)
            if not found or any(code not in ((codes,) if isinstance(codes, str) else codes) for code in found):
                return False
        return True

    def describe(self) -> str:
        """Its parameters with dtype and shape, for messages."""
        facts = dict(self.stacks[0])
        for stack in self.stacks[1:]:
            facts = {**stack, **facts}
        return ", ".join(f"{name or '(fused weight)'} {fact.dtype} {list(fact.shape)}" for name, fact in facts.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One tensor of the sublayer under the schema's name, made of `parameter` of every expert and projection.

    `shape` is one expert's, all projections stacked along `axis`; each part passes `steps` before that.
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

    `unused` are parameters with no place in the kernel layout; `inputs` matter
    only when activations are quantized as the checkpoint says. `expected` gives the whole numbers that an
    unused parameter must hold, per projection; `checks` gives the rule that another one's values must obey.
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
    checks: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Rejected:
    """The sublayer is not this format, and why."""

    reason: str


@dataclass(frozen=True, slots=True)
class Refused:
    """The sublayer is in some format, but broken (`is_broken`) or outside what Humming takes."""

    problem: Problem
    is_broken: bool = False


class RefusalError(Exception):
    """Carries a `Refused` out of a format's `match`, however deep in it the fault is found."""

    def __init__(self, refused: Refused) -> None:
        self.refused = refused
        super().__init__(str(refused.problem))


class CheckpointFormat(Protocol):
    """One on-disk format. `summary` is one line for the table of supported formats."""

    @property
    def name(self) -> str:
        """Short name, as written into the plan and the manifest."""

    @property
    def summary(self) -> str:
        """What it is, and who writes it."""

    def match(self, sublayer: Sublayer) -> Accepted | Rejected:
        """Whether `sublayer` is this format, from its tensors' names, dtypes and shapes first.

        Raises RefusalError when it is this format, but broken or outside what Humming takes.
        """


def broken(sublayer: Sublayer, expected: str, found: str, hint: str = "") -> RefusalError:
    """To be raised when the checkpoint contradicts itself."""
    return RefusalError(Refused(Problem(sublayer.where, expected, found, hint), is_broken=True))


def unsupported(sublayer: Sublayer, expected: str, found: str, hint: str = "") -> RefusalError:
    """To be raised when the checkpoint is sound but cannot be converted."""
    return RefusalError(Refused(Problem(sublayer.where, expected, found, hint)))


def require_shapes(sublayer: Sublayer, parameter: str, shapes: Sequence[tuple[int, ...]]) -> None:
    """Raise unless `parameter` of projection i has `shapes[i]`, where it is there at all."""
    for stack, shape in zip(sublayer.stacks, shapes, strict=True):
        facts = stack.get(parameter)
        if facts is not None and facts.shape != shape:
            raise broken(sublayer, f"{parameter} of shape {list(shape)}", f"{list(facts.shape)}")


def one_dtype(sublayer: Sublayer, parameter: str) -> str:
    """The dtype code that all projections store `parameter` in. Raises RefusalError when they differ."""
    codes = sublayer.dtypes(parameter)
    if len(codes) != 1:
        raise broken(sublayer, f"{parameter} of one dtype", ", ".join(codes) or "none")
    return codes[0]


def weight_shapes(sublayer: Sublayer, parameter: str = "weight") -> tuple[tuple[int, ...], int]:
    """Rows per projection and the common width of a plain [N, width] weight; raises without them."""
    shapes = [stack[parameter].shape for stack in sublayer.stacks if parameter in stack]
    if len(shapes) != len(sublayer.stacks):
        raise broken(sublayer, f"{parameter} in every projection", sublayer.describe())
    if any(len(shape) != 2 for shape in shapes) or len({shape[1] for shape in shapes}) != 1:
        raise broken(sublayer, f"{parameter} [N, K] with one K", f"{[list(shape) for shape in shapes]}")
    if any(0 in shape for shape in shapes):
        raise broken(sublayer, f"{parameter} that holds something", f"{[list(shape) for shape in shapes]}")
    return tuple(shape[0] for shape in shapes), shapes[0][1]


def check_group(sublayer: Sublayer, group: int, shape_k: int) -> None:
    """Raise for a group size that does not divide K, or that Humming's kernels do not have."""
    if group <= 0 or shape_k % group != 0:
        raise broken(sublayer, f"a group size that divides K = {shape_k}", f"{group}")
    if group & -group < MIN_GROUP:
        expected = f"a group size that is a multiple of {MIN_GROUP}"
        raise unsupported(sublayer, expected, f"{group}", "Humming's kernels have no smaller groups")


def check_multiple(sublayer: Sublayer, name: str, extents: Sequence[int], multiple: int) -> None:
    """Raise unless every extent (of N or K) is a positive multiple."""
    if any(extent <= 0 or extent % multiple for extent in extents):
        found = ", ".join(str(extent) for extent in extents)
        raise unsupported(sublayer, f"{name} that is a multiple of {multiple}", found)


def bias_rule(sublayer: Sublayer, rows: Sequence[int]) -> tuple[Rule, ...]:
    """The rule for a bias [N], if there is one; it becomes `param_dtype`, which is what vLLM holds it in."""
    if "bias" not in sublayer.parameters:
        return ()
    if not sublayer.has(bias=FLOATS):
        raise broken(sublayer, "bias in F32, BF16 or F16", ", ".join(sublayer.dtypes("bias")))
    leading = (sublayer.num_experts,) if sublayer.is_fused else ()
    require_shapes(sublayer, "bias", [(*leading, n) for n in rows])
    code = _CODES[sublayer.param_dtype]
    is_stored_so = sublayer.dtypes("bias") == (code,)
    steps = () if is_stored_so else (Step("to_dtype", (("dtype", sublayer.param_dtype),)),)
    # A bias that rounds to zero is an error of nothing; one that rounds to infinity is not.
    check = "finite" if is_stored_so else f"finite,finite_{sublayer.param_dtype}"
    return (Rule(name="bias", parameter="bias", dtype=code, shape=(sum(rows),), steps=steps, check=check),)


def tensor_scale_rule(sublayer: Sublayer, name: str, parameter: str, check: str) -> Rule:
    """One number per projection, as F32: `[2]` for gate and up, `[]` for down; one element in any form on disk."""
    for stack in sublayer.stacks:
        if parameter in stack and not is_scalar(stack[parameter].shape):
            found = f"{list(stack[parameter].shape)}"
            raise broken(sublayer, f"{parameter} of shape [] or [1]", found)
    if not sublayer.has(**{parameter: FLOATS}):
        raise broken(sublayer, f"{parameter} in F32, BF16 or F16", ", ".join(sublayer.dtypes(parameter)))
    steps = () if sublayer.dtypes(parameter) == ("F32",) else (Step("to_dtype", (("dtype", "float32"),)),)
    return Rule(
        name=name,
        parameter=parameter,
        dtype="F32",
        # Humming drops the axis of projections where there is only one.
        shape=(len(sublayer.stacks),) if len(sublayer.stacks) > 1 else (),
        steps=steps,
        check=check,
    )


def is_scalar(shape: tuple[int, ...]) -> bool:
    """Whether a tensor of this shape is one number; `()`, `(1,)` and `(1, 1)` mean the same."""
    return len(shape) <= 2 and all(extent == 1 for extent in shape)


def unequal_check(sublayer: Sublayer, check: str, *, is_reciprocal: bool = False) -> str:
    """`check`, and what must hold of one number per projection once gate and up differ.

    Humming then repeats them for every row, in the parameter dtype, where they stay F32 otherwise.
    """
    if len(sublayer.stacks) < 2:
        return check
    rule = "float16" if sublayer.param_dtype == "float16" else "finite_bfloat16"
    return f"{check},unequal_reciprocal_{rule}" if is_reciprocal else f"{check},unequal_{rule}"


def rounding_check(sublayer: Sublayer, parameter: str, check: str) -> str:
    """`check`, and where the scale will be rounded to the parameter dtype also that no value is lost by it."""
    codes = sublayer.dtypes(parameter)
    if sublayer.param_dtype == "float16":
        return f"{check},float16" if any(code != "F16" for code in codes) else check
    # Only F32 holds more than bfloat16 does.
    return f"{check},finite_bfloat16" if "F32" in codes else check


def exponent_check(sublayer: Sublayer) -> str:
    """The rule for exponent bytes that stay bytes: float16 kernels hold fewer exponents."""
    return "e8m0,e5m0" if sublayer.param_dtype == "float16" else "e8m0"
