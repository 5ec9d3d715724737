"""Rules by which GPTQModel (`dynamic`) and auto-round (`extra_config`) give some modules another scheme."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from humming_convert.formats.base import Sublayer, broken, unsupported
from humming_convert.formats.names import other_names

# What a scheme of integers depends on.
FIELDS = ("bits", "group_size", "sym", "data_type", "desc_act")
UNQUANTIZED = 16


@dataclass(frozen=True, slots=True)
class _Rule:
    fits: Callable[[str], object]
    overrides: Mapping[str, Any]


def scheme_fields(sublayer: Sublayer) -> dict[str, Any]:
    """`FIELDS` as the quantization config has them for this sublayer's modules; those it does not state are absent.

    A rule by which a module is not quantized is no rule for one that is: tensors decide. Raises RefusalError for
    modules with different schemes, and for rules of another form.
    """
    overall = _stated(sublayer.quantization)
    rules = _rules(sublayer)
    if not any(rule.overrides for rule in rules):
        return overall
    found: dict[tuple[tuple[str, Any], ...], str] = {}
    for module in sublayer.modules:
        fields = {**overall, **_overrides(rules, module)}
        found.setdefault(tuple(fields.items()), module)
    if len(found) > 1:
        named = "; ".join(f"{module} {_told(overall | dict(fields), overall)}" for fields, module in found.items())
        raise unsupported(sublayer, "one scheme for all experts of a layer", named)
    return dict(next(iter(found)))


def _told(fields: Mapping[str, Any], overall: Mapping[str, Any]) -> str:
    changed = [f"{key} {value}" for key, value in fields.items() if overall.get(key) != value]
    return ", ".join(changed) or "as all others"


def _stated(section: Mapping[str, Any]) -> dict[str, Any]:
    return {key: section[key] for key in FIELDS if section.get(key) is not None}


def _overrides(rules: list[_Rule], module: str) -> Mapping[str, Any]:
    for name in (module, *other_names(module)):
        for rule in rules:
            if rule.fits(name):
                return rule.overrides
    return {}


def _rules(sublayer: Sublayer) -> list[_Rule]:
    """In the order in which their writers look: the first that fits a module holds for it."""
    config = sublayer.quantization
    rules = []
    for pattern, section in _section(sublayer, "dynamic").items():
        is_negative, text = pattern.startswith("-:"), pattern[2:] if pattern[:2] in ("-:", "+:") else pattern
        rules.append(_Rule(_matcher(text, search=False), {} if is_negative else _of_rule(section)))
    named, patterns = [], []
    for pattern, section in _section(sublayer, "extra_config").items():
        # auto-round takes a module's own name before any pattern, and every name is a pattern as well.
        named.append(_Rule(pattern.__eq__, _of_rule(section)))
        patterns.append(_Rule(_matcher(pattern, search=True), _of_rule(section)))
    return [*rules, *named, *patterns] if config else []


def _section(sublayer: Sublayer, key: str) -> Mapping[str, Mapping[str, Any]]:
    section = sublayer.quantization.get(key) or {}
    if not isinstance(section, dict) or not all(isinstance(rule, dict) for rule in section.values()):
        raise broken(sublayer, f"{key} that maps names to settings", f"{str(section)[:80]!a}")
    return section


def _of_rule(section: Mapping[str, Any]) -> dict[str, Any]:
    bits = section.get("bits")
    return {} if type(bits) is int and bits >= UNQUANTIZED else _stated(section)


def _matcher(pattern: str, *, search: bool) -> Callable[[str], object]:
    try:
        compiled = re.compile(pattern)
    except re.error:
        return pattern.__eq__
    return compiled.search if search else compiled.match
