"""What the tensors of one sublayer must be, checked by name before Humming sees them."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from humming_convert.errors import Problem, UnsupportedError, is_out_of_memory
from humming_convert.host.foreign import Foreign
from humming_convert.scales import extremes
from humming_convert.target import Target

WEIGHT_NAMES = ("weight", "weight_packed", "qweight")
OPTIONAL = ("weight_shape", "g_idx", "weight_g_idx")  # stored beside weights, and read by nothing here
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
_SAME_BYTES = {torch.float8_e8m0fnu: torch.uint8, torch.uint8: torch.float8_e8m0fnu}


@dataclass(frozen=True, slots=True)
class Facts:
    """The facts that a refusal names."""

    schema: Foreign
    n: int
    k: int
    experts: int
    target: Target

    def __str__(self) -> str:
        return f"{describe(self.schema)}, N {self.n} x K {self.k}, {self.experts} experts, {self.target}"


def describe(schema: Foreign) -> str:
    """A schema in a few words: its method, width and group."""
    words = [schema.quant_method]
    for name, text in (("format", "{}"), ("bits", "{} bits"), ("num_bits", "{} bits"), ("b_dtype", "{}")):
        value = getattr(schema, name, None)
        if value is not None:
            words.append(text.format(value))
    sizes = (("weight_block_size", "block"), ("block_structure", "block"), ("group_size", "group size"))
    for name, text in (*sizes, ("weight_scale_group_size", "group size")):
        value = getattr(schema, name, None)
        if value:
            words.append(f"{text} {value}")
    return " ".join(words)


@contextlib.contextmanager
def explained(facts: Facts) -> Iterator[None]:
    """Turn a refusal of Humming's own checks into UnsupportedError that names schema, shape and target."""
    try:
        yield
    except UnsupportedError:
        raise
    except (AssertionError, ValueError, NotImplementedError) as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        reason = str(error) or f"not ({frame.line})"
        raise UnsupportedError([Problem(str(facts), "what Humming's conversion takes", reason)]) from error
    except (RuntimeError, IndexError, ZeroDivisionError) as error:
        if is_out_of_memory(error):
            raise
        reason = str(error).splitlines()[0]
        raise UnsupportedError([Problem(str(facts), "a shape that Humming's conversion takes", reason)]) from error


def attributes(facts: Facts, param_dtype: torch.dtype, has_bias: bool, stacks: int) -> dict[str, dict[str, Foreign]]:
    """Shape and dtype of every tensor that the schema wants.

    Raises UnsupportedError for a shape that it does not divide.
    """
    _check_divides(facts)
    with explained(facts):
        attrs: dict[str, dict[str, Foreign]] = facts.schema.get_tensors_attrs(
            facts.n,
            facts.k,
            param_dtype=param_dtype,
            num_experts=facts.experts,
            has_bias=has_bias,
            stack_size=stacks,
        )
    return attrs


def _check_divides(facts: Facts) -> None:
    schema = facts.schema
    block = getattr(schema, "weight_block_size", None) or getattr(schema, "block_structure", None)
    group = getattr(schema, "group_size", None) or getattr(schema, "weight_scale_group_size", None) or 0
    rows, columns = block or (getattr(schema, "weight_scale_group_size_n", 0) or 1, group)
    bits = getattr(schema, "bits", None) or getattr(schema, "num_bits", None) or 8
    is_asymmetric = getattr(schema, "zero_point", False) or not getattr(schema, "symmetric", True)
    problems = []
    if facts.n % rows:
        problems.append(Problem(f"{facts}", f"N a multiple of the {rows} rows that share a scale", f"N {facts.n}"))
    if columns > 0 and facts.k % columns:
        problems.append(Problem(f"{facts}", f"K a multiple of the group size {columns}", f"K {facts.k}"))
    if is_asymmetric and facts.n * bits % 32:
        expected = f"N times {bits} bits a multiple of 32, so that zero points fill whole words"
        problems.append(Problem(f"{facts}", expected, f"N {facts.n}"))
    if facts.k * bits % 32:
        problems.append(Problem(f"{facts}", f"K times {bits} bits a multiple of 32", f"K {facts.k}"))
    if problems:
        raise UnsupportedError(problems)


def weight_name(attrs: Mapping[str, Foreign], facts: Facts) -> str:
    """The name of the schema's weight. Raises UnsupportedError when it has none of the known names."""
    found = [name for name in WEIGHT_NAMES if name in attrs]
    if len(found) != 1:
        raise UnsupportedError([Problem(str(facts), f"one of {', '.join(WEIGHT_NAMES)}", ", ".join(attrs))])
    return found[0]


def check_given(small: Mapping[str, torch.Tensor], known: Collection[str], stacks: Sequence[int], facts: Facts) -> None:
    """Refuse rows that do not add up to N, and tensors that neither schema has: ignoring one would ignore values.

    An activation's own tensors (`input_...`) may come along unused, as a checkpoint's do with 16-bit activations.
    Raises UnsupportedError.
    """
    problems = []
    if sum(stacks) != facts.n or any(rows <= 0 for rows in stacks):
        problems.append(Problem(f"{facts}: shape_n_stacks", f"rows that add up to {facts.n}", str(list(stacks))))
    for name in small:
        if name not in known and name not in OPTIONAL and not name.startswith("input_"):
            expected = f"only tensors of the schema ({', '.join(known)})"
            problems.append(Problem(f"{facts}: {name}", expected, "a tensor that it does not have"))
    if problems:
        raise UnsupportedError(problems)


def check_finite(tensors: Mapping[str, torch.Tensor], facts: Facts) -> None:
    """Refuse scales and biases that Humming's arithmetic, or the parameter dtype, made infinite or NaN.

    Raises UnsupportedError naming tensor and dtype.
    """
    problems = []
    for name, tensor in tensors.items():
        if tensor.dtype in _FLOATS and not tensor.is_meta and not _are_finite(tensor):
            count = int((~torch.isfinite(tensor)).sum())
            hint = "bfloat16 has the range of float32" if tensor.dtype == torch.float16 else ""
            found = f"{count} of {tensor.numel()} infinite or NaN"
            problems.append(Problem(f"{facts}: {name}", f"values that {tensor.dtype} can hold", found, hint))
    if problems:
        raise UnsupportedError(problems)


def _are_finite(tensor: torch.Tensor) -> bool:
    ends = extremes(tensor) if tensor.device.type == "cpu" else None
    return bool(torch.isfinite(tensor if ends is None else ends).all())


def checked_small(
    small: Mapping[str, torch.Tensor], attrs: Mapping[str, Mapping[str, Foreign]], name: str, facts: Facts
) -> dict[str, torch.Tensor]:
    """The schema's tensors but the weight `name`, with floating-point ones rounded to the schema's dtype as
    vLLM does on loading. Raises UnsupportedError naming every tensor that is missing or of another shape or
    dtype.
    """
    problems: list[Problem] = []
    tensors: dict[str, torch.Tensor] = {}
    for key, attr in attrs.items():
        if key == name:
            continue
        tensor, dtype = small.get(key), attr["dtype"]
        if tensor is None:
            if key not in OPTIONAL:
                problems.append(Problem(f"{facts}: {key}", f"{tuple(attr['shape'])} {dtype}", "no such tensor"))
            continue
        if _SAME_BYTES.get(tensor.dtype) == dtype:
            tensor = tensor.view(dtype)
        elif tensor.dtype in _FLOATS and dtype in _FLOATS:
            if attr.get("extra_attrs", {}).get("scale_type") == "tensor":
                # One number for a whole weight stays in float32, also where a schema's own table says otherwise:
                # Humming keeps it so, and rounding it would move every weight.
                dtype = torch.float32
            tensor = tensor.to(dtype)
        # One scale per expert may stand for all its projections.
        shapes = (tuple(attr["shape"]), (facts.experts,)) if len(attr["shape"]) == 2 else (tuple(attr["shape"]),)
        if (tuple(tensor.shape) not in shapes and key not in OPTIONAL) or tensor.dtype != dtype:
            found = f"{tuple(tensor.shape)} {tensor.dtype}"
            problems.append(Problem(f"{facts}: {key}", f"{tuple(attr['shape'])} {dtype}", found))
        tensors[key] = tensor.contiguous()
    if problems:
        raise UnsupportedError(problems)
    return tensors
