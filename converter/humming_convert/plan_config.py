"""What a plan takes from config files alone: the method, the family and the dtype of parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from humming_convert import hf_config
from humming_convert.errors import Problem, UnsupportedError
from humming_convert.families import BY_MODEL_TYPE, FAMILIES, REFUSED_FAMILIES, Family, family_from_names
from humming_convert.formats import METHODS, METHODS_TO_COME
from humming_convert.source import Checkpoint


def method_of(checkpoint: Checkpoint) -> str:
    """The quantization method by its own name; "" when the checkpoint says nothing."""
    quantization = checkpoint.quantization
    if quantization is None:
        return ""
    stated = str(quantization.get("quant_method", "")).lower()
    method = METHODS.get(stated)
    if method is not None:
        _refuse_other_meanings(checkpoint.quantization_origin, quantization)
        return method
    where, known = checkpoint.quantization_origin, ", ".join(sorted(set(METHODS.values())))
    if stated in METHODS_TO_COME:
        hint = "this method is not supported yet"
        raise UnsupportedError([Problem(where, f"a quant_method among {known}", repr(stated), hint)])
    raise UnsupportedError([Problem(where, f"a quant_method among {known}", repr(stated))])


# Sections under which weights or activations are turned or thinned out, which no kernel layout can say.
_TRANSFORMS = ("transform_config", "rotation_config", "hadamard_config")


def _refuse_other_meanings(where: str, quantization: Mapping[str, Any]) -> None:
    """Raise UnsupportedError for what would make the stored numbers mean something else than they say."""
    problems = []
    layers = quantization.get("extra_config")
    sections = [("", quantization)]
    if isinstance(layers, dict):
        sections += [(f"extra_config: {name}: ", layer) for name, layer in layers.items() if isinstance(layer, dict)]
    for prefix, section in sections:
        for key in _TRANSFORMS:
            if _says_something(section.get(key)):
                hint = "Humming's kernels do not transform activations: quantize again without it"
                expected = f"no {prefix}{key}"
                problems.append(Problem(where, expected, f"{str(section[key])[:80]!a}", hint))
    sparsity = quantization.get("sparsity_config")
    if _says_something(sparsity):
        stored = sparsity.get("format", "dense") if isinstance(sparsity, dict) else sparsity
        if stored != "dense":
            hint = "sparse weights are not supported: save it without sparse compression"
            problems.append(Problem(where, "sparsity_config with format dense", f"{str(stored)[:80]!a}", hint))
    if problems:
        raise UnsupportedError(problems)


def _says_something(section: object) -> bool:
    """Whether a section is more than empty; writers leave `{}` or null behind."""
    return any(_says_something(part) for part in section.values()) if isinstance(section, dict) else bool(section)


def family_of(checkpoint: Checkpoint) -> Family:
    """The row of the model's family. Raises UnsupportedError for one that is not in the table."""
    if checkpoint.config is None:
        return family_from_names(
            [name for name in checkpoint.tensors if ".layers." in name or name.startswith("layers.")]
        )
    stated = [str(part.get("model_type")) for _, part in hf_config.text_configs(checkpoint.config)]
    for model_type in stated:
        if model_type in BY_MODEL_TYPE:
            return BY_MODEL_TYPE[model_type]
        if model_type in REFUSED_FAMILIES:
            expected, found = REFUSED_FAMILIES[model_type]
            raise UnsupportedError([Problem("config.json", expected, found)])
    known = ", ".join(model_type for row in FAMILIES for model_type in row.model_types)
    problem = Problem(
        "config.json", f"a model_type among {known}", repr(stated[-1]), "this family is not supported yet"
    )
    raise UnsupportedError([problem])


def param_dtype_of(checkpoint: Checkpoint, faults: list[Problem], notes: list[str]) -> str:
    """What the model runs in, which is float16 or bfloat16; float32 is no dtype of Humming's kernels."""
    config = checkpoint.config or {}
    for part in (hf_config.text_config(config), config):
        for key in ("dtype", "torch_dtype"):
            stated = part.get(key)
            if stated is None:
                continue
            name = stated.removeprefix("torch.") if isinstance(stated, str) else ""
            if name == "float32":
                notes.append("config.json says float32: bfloat16 is used instead; --dtype chooses")
                return "bfloat16"
            if name not in ("float16", "bfloat16"):
                found, hint = f"{str(stated)[:80]!a}", "choose one with --dtype"
                faults.append(Problem(f"config.json: {key}", "bfloat16, float16 or float32", found, hint))
            return name
    return "bfloat16"
