"""What the formats of compressed-tensors share: the config group of a module, and its scales."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from humming_convert.formats.base import (
    Rule,
    Sublayer,
    broken,
    check_group,
    one_dtype,
    require_shapes,
    rounding_check,
    tensor_scale_rule,
    unsupported,
)
from humming_convert.formats.names import other_names

METHOD = "compressed-tensors"

KNOWN_FORMATS = (
    "pack-quantized",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
)

_FORMS: dict[str, Callable[[Any], bool]] = {
    "num_bits": lambda value: type(value) is int and 1 <= value <= 16,
    "type": lambda value: value in ("int", "float"),
    "symmetric": lambda value: type(value) is bool,
    "dynamic": lambda value: type(value) is bool or value == "local",
    "group_size": lambda value: type(value) is int,
    "strategy": lambda value: isinstance(value, str),
    "actorder": lambda value: isinstance(value, str),
}
_EXPECTED: dict[str, str] = {
    "num_bits": "a whole number of bits",
    "type": "int or float",
    "symmetric": "true or false",
    "dynamic": "true, false or local",
    "group_size": "a whole number",
    "strategy": "a name",
    "actorder": "a name",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """One config group: `strategy` is tensor, channel, group, tensor_group or block."""

    format: str
    type: str
    num_bits: int
    strategy: str
    group_size: int
    block: tuple[int, ...] | None
    symmetric: bool
    actorder: str | None
    inputs: Mapping[str, Any] | None

    def input_schema(self) -> dict[str, Any] | None:
        """Humming's input schema for this group, None when activations are not quantized."""
        if self.inputs is None:
            return None
        return {
            "quant_method": "compressed-tensors",
            "format": self.format,
            "type": self.inputs.get("type", "int"),
            "num_bits": self.inputs.get("num_bits", 8),
            "dynamic": self.inputs.get("dynamic", False),
            "group_size": self.inputs.get("group_size") or 0,
            "symmetric": self.inputs.get("symmetric", True),
        }

    def told(self) -> str:
        """What the config promises, for messages."""
        return f"{self.format} {self.type}{self.num_bits} weights, as the quantization config says"

    def groups(self, shape_k: int) -> int:
        """Scales per row."""
        return shape_k // self.group_size if self.group_size else 1

    def has_static_input(self) -> bool:
        """Whether the checkpoint stores a scale for the activations."""
        return self.inputs is not None and self.inputs.get("dynamic", False) in (False, "local")


def scheme_of(sublayer: Sublayer) -> Scheme:
    """The scheme of the sublayer: that of the one group which all of its modules belong to."""
    groups = sublayer.quantization.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise broken(sublayer, "config_groups in the quantization config", f"{groups}")
    for name, group in groups.items():
        _check_targets(sublayer, name, group)
    found: dict[str | None, str] = {}
    has_names = any(_names_modules(target) for group in groups.values() for target in _targets(group))
    # Without a name or pattern every module is in the same group, and one look tells which.
    for module in sublayer.modules if has_names else sublayer.modules[:1]:
        found.setdefault(_group_of(groups, module), module)
    if None in found:
        targets = sorted({str(target) for group in groups.values() for target in _targets(group)})
        expected = f"a config group for {found[None]}"
        raise broken(sublayer, expected, f"only the targets {', '.join(targets)}")
    schemes = [_parse_group(sublayer, str(name), groups[str(name)]) for name in found]
    if any(scheme != schemes[0] for scheme in schemes):
        named = ", ".join(f"{module} in {group}" for group, module in found.items())
        raise unsupported(sublayer, "one config group for all experts of a layer", named)
    return schemes[0]


def weight_schema(scheme: Scheme) -> dict[str, Any]:
    """Humming's weight schema for a group, with nothing in it that Humming does not read."""
    schema: dict[str, Any] = {
        "quant_method": METHOD,
        "format": scheme.format,
        "type": scheme.type,
        "num_bits": scheme.num_bits,
        "strategy": scheme.strategy,
        "symmetric": scheme.symmetric,
    }
    if scheme.group_size:
        schema["group_size"] = scheme.group_size
    if scheme.block is not None and scheme.strategy == "block":
        schema["block_structure"] = list(scheme.block)
    return schema


def row_scale(sublayer: Sublayer, scheme: Scheme, rows: tuple[int, ...], shape_k: int) -> Rule:
    """The rule for `weight_scale` [N, K/g] or [N, 1]. Raises RefusalError for what does not fit."""
    if scheme.strategy == "group":
        check_group(sublayer, scheme.group_size, shape_k)
    elif scheme.strategy != "channel":
        raise unsupported(sublayer, "one scale per group or per channel", f"strategy {scheme.strategy!r}")
    groups = scheme.groups(shape_k)
    require_shapes(sublayer, "weight_scale", [(n, groups) for n in rows])
    return Rule(
        name="weight_scale",
        parameter="weight_scale",
        dtype=one_dtype(sublayer, "weight_scale"),
        shape=(sum(rows), groups),
        check=rounding_check(sublayer, "weight_scale", "nonnegative"),
    )


def input_rules(sublayer: Sublayer, scheme: Scheme, name: str) -> tuple[Rule, ...]:
    """The rule for the activations' static scale, where config and tensors have one."""
    if not scheme.has_static_input() or name not in sublayer.parameters:
        return ()
    # NVFP4 stores the reciprocal.
    check = "positive,reciprocal" if name == "input_global_scale" else "positive"
    return (tensor_scale_rule(sublayer, name, name, check),)


def _check_targets(sublayer: Sublayer, name: str, group: object) -> None:
    """A group whose targets are nothing that fits a module would only look as if it were for others."""
    targets = group.get("targets") if isinstance(group, dict) else None
    if not isinstance(targets, list) or not targets or not all(isinstance(target, str) for target in targets):
        expected = f"config group {name} with targets, a list of names or patterns"
        raise broken(sublayer, expected, f"{str(targets if isinstance(group, dict) else group)[:80]!a}")


def _targets(group: object) -> Iterable[str]:
    targets = group.get("targets") if isinstance(group, dict) else None
    return [target for target in targets if isinstance(target, str)] if isinstance(targets, list) else []


def _names_modules(target: str) -> bool:
    return target.startswith("re:") or "." in target


def _group_of(groups: Mapping[str, Any], module: str) -> str | None:
    """A name or pattern that fits goes before the class name `Linear`, as in compressed-tensors."""
    for candidate in (module, *other_names(module)):
        for name, group in groups.items():
            if any(_fits(target, candidate) for target in _targets(group)):
                return name
    return next((name for name, group in groups.items() if "Linear" in _targets(group)), None)


def _fits(target: str, module: str) -> bool:
    if not target.startswith("re:"):
        return target == module
    pattern = _compiled(target[3:])
    return pattern is not None and pattern.match(module) is not None


@lru_cache(maxsize=256)
def _compiled(pattern: str) -> re.Pattern[str] | None:
    try:
        return re.compile(pattern)
    except re.error:
        return None


def _parse_group(sublayer: Sublayer, name: str, group: Mapping[str, Any]) -> Scheme:
    weights = group.get("weights")
    if not isinstance(weights, dict):
        raise broken(sublayer, f"weights in config group {name}", f"{weights}")
    text = str(group.get("format") or sublayer.quantization.get("format") or "")
    if text not in KNOWN_FORMATS:
        known = ", ".join(KNOWN_FORMATS)
        raise unsupported(sublayer, f"a compressed-tensors format among {known}", repr(text))
    _check_forms(sublayer, f"weights of config group {name}", weights)
    bits, group_size = weights.get("num_bits"), weights.get("group_size")
    if type(bits) is not int:
        raise broken(sublayer, f"num_bits in config group {name}", f"{bits}")
    strategy = weights.get("strategy") or _strategy_of(group_size)
    if strategy == "group" and group_size == -1:
        strategy = "channel"
    actorder = weights.get("actorder")
    if actorder not in (None, "weight", "static"):
        hint = "Humming's kernels have no g_idx: quantize again with actorder None, weight or static"
        raise unsupported(sublayer, "weights in the order of their columns", f"actorder {actorder!r}", hint)
    if weights.get("dynamic"):
        raise unsupported(sublayer, "weights quantized in the file", "dynamic weights")
    zero_type = weights.get("zp_dtype")
    if weights.get("symmetric") is False and zero_type not in (None, "torch.int8", "int8"):
        raise unsupported(sublayer, f"zp_dtype torch.int8 in config group {name}", repr(zero_type))
    if group.get("output_activations") is not None:
        raise unsupported(sublayer, "outputs that are not quantized", f"output_activations in config group {name}")
    inputs = group.get("input_activations")
    if inputs is not None:
        if not isinstance(inputs, dict):
            raise broken(sublayer, f"input_activations in config group {name}", f"{str(inputs)[:80]!a}")
        _check_forms(sublayer, f"input_activations of config group {name}", inputs)
    block = weights.get("block_structure")
    return Scheme(
        format=text,
        type=str(weights.get("type", "int")),
        num_bits=bits,
        strategy=str(strategy),
        group_size=group_size if strategy in ("group", "tensor_group") and group_size else 0,
        block=tuple(block) if isinstance(block, list) else None,
        symmetric=weights.get("symmetric", True) is not False,
        actorder=actorder,
        inputs=inputs if isinstance(inputs, dict) else None,
    )


def _check_forms(sublayer: Sublayer, where: str, args: Mapping[str, Any]) -> None:
    """Raise for a field that is there in a form which this or Humming would take for something else."""
    for key, is_sound in _FORMS.items():
        value = args.get(key)
        if value is not None and not is_sound(value):
            raise broken(sublayer, f"{_EXPECTED[key]} as {key} in {where}", f"{str(value)[:80]!a}")


def _strategy_of(group_size: int | None) -> str:
    if group_size is None:
        return "tensor"
    return "group" if group_size > 0 else "channel"
