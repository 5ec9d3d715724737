"""Pure functions over the dictionaries of a model folder's config files; nothing here opens a file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from humming_convert.errors import CheckpointError, Problem

Config = dict[str, Any]

QUANT_METHOD = "humming_prepacked"
FORMAT_VERSION = 1

# Files that hold a quantization section on their own, in the order in which they are believed, and the method
# that their writers meant where the file itself does not say (old AutoGPTQ and AutoAWQ files do not).
QUANT_FILES: tuple[tuple[str, str], ...] = (
    ("hf_quant_config.json", "modelopt"),
    ("quantize_config.json", "gptq"),
    ("quant_config.json", "awq"),
    ("quantization_config.json", ""),
)
_SECTION_KEYS = ("quantization_config", "compression_config")
_MAX_DEPTH = 4


# Under which names wrappers keep the config of their language model.
_TEXT_KEYS = ("text_config", "llm_config", "language_config", "thinker_config")


def text_configs(config: Config) -> list[tuple[str, Config]]:
    """A model config and those of the language models inside, outermost first, each with the path to it ("a.b.")."""
    found = [("", config)]
    while len(found) < _MAX_DEPTH:
        path, outer = found[-1]
        key = next((key for key in _TEXT_KEYS if isinstance(outer.get(key), dict)), None)
        if key is None:
            break
        found.append((f"{path}{key}.", outer[key]))
    return found


def text_config(config: Config) -> Config:
    """The part of a model config that describes the language model (itself, unless it wraps one)."""
    return text_configs(config)[-1][1]


def section_of(config: Config, where: str = "config.json") -> tuple[Config | None, str]:
    """The quantization section of a config.json and the path to it inside, or (None, "").

    Raises CheckpointError (with `where`) for a section that is no object: it says something, but not what.
    """
    for prefix, holder in text_configs(config):
        for key in _SECTION_KEYS:
            found = holder.get(key)
            if found is not None and not isinstance(found, dict):
                raise CheckpointError([Problem(f"{where}: {prefix}{key}", "a JSON object", f"{str(found)[:80]!a}")])
            if found:
                return found, prefix + key
    return None, ""


def find_quantization(config: Config | None, files: Mapping[str, Config]) -> tuple[Config | None, str]:
    """What the checkpoint says of its quantization, and where it says so: config.json first, then `files`.

    `files` maps the names of `QUANT_FILES` that exist to their contents.
    """
    if config is not None:
        found, path = section_of(config)
        if found is not None:
            return found, f"config.json: {path}"
    for name, method in QUANT_FILES:
        if name in files:
            return from_quant_file(files[name], method, where=name), name
    return None, ""


def from_quant_file(content: Config, method: str = "", *, where: str = "the file") -> Config:
    """The section in a file of its own: a whole config.json, ModelOpt's nesting, or bare."""
    inner, _ = section_of(content, where)
    if inner is not None:
        return inner
    nested = content.get("quantization")
    section = dict(nested) if isinstance(nested, dict) else dict(content)
    if isinstance(nested, dict):
        method = method or "modelopt"
    if not section.get("quant_method") and method:
        section["quant_method"] = method
    return section


def converted_config(config: Config, quantization: Config | None) -> Config:
    """The output's config.json: the source's, with the quantization section replaced and kept inside.

    `scale_fmt` stays visible at the top of the section, because vLLM reads it there.
    """
    section: Config = {
        "quant_method": QUANT_METHOD,
        "format_version": FORMAT_VERSION,
        "source": quantization or {},
    }
    if quantization and "scale_fmt" in quantization:
        section["scale_fmt"] = quantization["scale_fmt"]
    return _without_sections(config, _MAX_DEPTH) | {"quantization_config": section}


def _without_sections(config: Config, depth: int) -> Config:
    result = {key: value for key, value in config.items() if key not in _SECTION_KEYS}
    for key in _TEXT_KEYS if depth > 1 else ():
        if isinstance(result.get(key), dict):
            result[key] = _without_sections(result[key], depth - 1)
    return result
