"""What Quark's config says of a sublayer: the global scheme, or the one of its layer type or name."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from humming_convert.formats.base import Sublayer, broken, unsupported
from humming_convert.formats.names import other_names

METHOD = "quark"
_LINEAR = ("Linear", "<class 'torch.nn.modules.linear.Linear'>")


class QuarkScheme(NamedTuple):
    """How weights and activations are quantized; `inputs` None: 16 bits."""

    weight: Mapping[str, Any]
    inputs: Mapping[str, Any] | None

    def is_mx(self, dtype: str) -> bool:
        """Whether the weights are `dtype` in groups of 32 with E8M0 scales."""
        wanted = {"dtype": dtype, "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0"}
        return all(self.weight.get(key) == value for key, value in wanted.items())

    def told(self) -> str:
        """What the config promises, for messages."""
        return f"{self.weight.get('dtype')} {self.weight.get('qscheme')} weights, as the quantization config says"

    def input_schema(self) -> dict[str, Any] | None:
        """Humming's input schema, None for 16 bits. An activation that Humming has no schema for comes out as Quark's.

        Quark's own schema refuses static scales that differ between experts, where the kernels take the largest.
        """
        if self.inputs is None:
            return None
        if self.inputs.get("dtype") == "fp8_e4m3" and not self.inputs.get("is_dynamic"):
            return {"quant_method": "fp8", "activation_scheme": "static"}
        keys = ("dtype", "qscheme", "ch_axis", "group_size", "symmetric", "is_dynamic", "scale_format")
        return {"quant_method": METHOD} | {key: self.inputs.get(key) for key in keys}

    def has_static_input(self) -> bool:
        """Whether the checkpoint stores a scale for the activations."""
        return self.inputs is not None and not self.inputs.get("is_dynamic")


def scheme_of(sublayer: Sublayer) -> QuarkScheme:
    """The one scheme of all modules. Raises RefusalError for none, several, or what no kernel can do."""
    found: dict[int, tuple[str, object]] = {}
    for module in sublayer.modules:
        config = _config_of(sublayer.quantization, module)
        found.setdefault(id(config), (module, config))
    distinct: list[tuple[str, object]] = []
    for module, config in found.values():
        if all(config != other for _, other in distinct):
            distinct.append((module, config))
    if len(distinct) > 1:
        named = ", ".join(module for module, _ in distinct)
        raise unsupported(sublayer, "one scheme for all experts of a layer", f"several ({named})")
    config = distinct[0][1] if distinct else None
    if not isinstance(config, dict):
        raise broken(sublayer, "a scheme in the quantization config", f"{config!r}"[:80])
    if config.get("output_tensors") or config.get("bias"):
        raise unsupported(sublayer, "outputs and biases that are not quantized", "a scheme for them")
    weight = _one_stage(sublayer, config.get("weight"))
    if weight is None:
        raise broken(sublayer, "a scheme for weights in the quantization config", "none")
    if weight.get("is_dynamic"):
        raise unsupported(sublayer, "weights quantized in the file", "dynamic weights")
    return QuarkScheme(weight, _one_stage(sublayer, config.get("input_tensors")))


def _one_stage(sublayer: Sublayer, spec: object) -> Mapping[str, Any] | None:
    if isinstance(spec, list) and len(spec) == 1:
        spec = spec[0]
    if spec is None or isinstance(spec, dict):
        return spec
    if isinstance(spec, list):
        raise unsupported(sublayer, "weights and activations quantized in one stage", f"{len(spec)} stages")
    raise broken(sublayer, "a scheme in the quantization config", f"{spec!r}"[:80])


def _config_of(quantization: Mapping[str, Any], module: str) -> object:
    """As Quark does: by name, else by type, else the global one."""
    by_name = quantization.get("layer_quant_config")
    if isinstance(by_name, dict):
        for name in (module, *other_names(module)):
            for pattern, config in by_name.items():
                if fnmatchcase(name, pattern):
                    return config
    by_type = quantization.get("layer_type_quant_config")
    if isinstance(by_type, dict):
        for key in _LINEAR:
            if key in by_type:
                return by_type[key]
    return quantization.get("global_quant_config")
