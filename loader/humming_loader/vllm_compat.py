"""Every name of vLLM that is not public, in one place, and what stands behind it in the tested versions.

Names are looked up when first used, so that registering the plugin stays light and a version that lacks one is refused
with the name. Tested: vLLM 0.33.0.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from humming_loader.errors import ServingError

TESTED = ("0.33",)

_LAYERS = "vllm.model_executor.layers"
_NAMES: Mapping[str, str] = {
    "FusedMoEMethodBase": f"{_LAYERS}.fused_moe:FusedMoEMethodBase",
    "RoutedExperts": f"{_LAYERS}.fused_moe:RoutedExperts",
    "MoEActivation": f"{_LAYERS}.fused_moe.activation:MoEActivation",
    "HummingExperts": f"{_LAYERS}.fused_moe.experts.fused_humming_moe:HummingExpertsBase",
    "get_humming_moe_quant_config": f"{_LAYERS}.quantization.utils.humming:get_humming_moe_quant_config",
    "make_humming_moe_kernel": f"{_LAYERS}.quantization.utils.humming:make_humming_moe_kernel",
    "select_humming_moe_experts": f"{_LAYERS}.quantization.utils.humming:select_humming_moe_experts",
    "weight_schema_to_quant_key": f"{_LAYERS}.quantization.utils.humming:weight_schema_to_quant_key",
    "input_schema_to_quant_key": f"{_LAYERS}.quantization.utils.humming:input_schema_to_quant_key",
    "FP8_DTYPE": f"{_LAYERS}.quantization.utils.quant_utils:FP8_DTYPE",
    "LinearBase": f"{_LAYERS}.linear:LinearBase",
    "UnquantizedLinearMethod": f"{_LAYERS}.linear:UnquantizedLinearMethod",
    "QuantizationConfig": f"{_LAYERS}.quantization.base_config:QuantizationConfig",
    "QUANTIZATION_METHODS": f"{_LAYERS}.quantization:QUANTIZATION_METHODS",
    "get_quantization_config": f"{_LAYERS}.quantization:get_quantization_config",
    "register_quantization_config": f"{_LAYERS}.quantization:register_quantization_config",
    "get_current_vllm_config_or_none": "vllm.config:get_current_vllm_config_or_none",
    "ModelArchConfigConvertorBase": (
        "vllm.transformers_utils.model_arch_config_convertor:ModelArchConfigConvertorBase"
    ),
    "current_platform": "vllm.platforms:current_platform",
    "init_logger": "vllm.logger:init_logger",
    "__version__": "vllm:__version__",
}

# The order in which ModelConfig asks the built-in methods whether a checkpoint is theirs; it has no name to import.
_OVERRIDES = (
    "auto_gptq",
    "gptq",
    "gptq_marlin",
    "auto_awq",
    "awq",
    "awq_marlin",
    "inc",
    "moe_wna16",
    "modelopt",
    "modelopt_fp4",
    "modelopt_mxfp8",
    "mxfp8",
    "modelopt_mixed",
    "mxfp4",
    "gpt_oss_mxfp4",
    "deepseek_v4_fp8",
    "humming",
)


def __getattr__(name: str) -> Any:  # noqa: ANN401 - another package's objects
    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = _find(name)
    globals()[name] = found
    return found


def _find(name: str) -> Any:  # noqa: ANN401 - another package's objects
    module, attribute = _NAMES[name].split(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ServingError("vLLM", f"{module}.{attribute}, as vLLM {TESTED[0]} has it", str(error)) from error


def missing_names() -> list[str]:
    """The names that this vLLM lacks, dotted; empty on a version that the plugin can run on."""
    missing = []
    for name, path in _NAMES.items():
        try:
            _find(name)
        except ServingError:
            missing.append(path.replace(":", "."))
    return missing


def check_version() -> str | None:
    """A warning for a vLLM that was not tested, None for one that was. Raises ServingError where names are missing."""
    version = str(_find("__version__"))
    missing = missing_names()
    if missing:
        raise ServingError(
            "vLLM", f"a version like {' or '.join(TESTED)}.x", f"{version}, without {', '.join(missing)}"
        )
    if version.startswith(tuple(f"{tested}." for tested in TESTED)):
        return None
    return f"humming_prepacked was tested with vLLM {', '.join(TESTED)}.x, this is {version}: trying"


def resolve_source(section: Mapping[str, Any], hf_config: object | None) -> tuple[str | None, dict[str, Any]]:
    """The internal method name and the configuration that vLLM would use for the original checkpoint.

    `section` is config.json's quantization section as the converter wrote it. None: the source has no quantization.
    """
    methods, get_config = _find("QUANTIZATION_METHODS"), _find("get_quantization_config")
    source = dict(section.get("source") or {})
    if not source:
        return None, source
    holder = SimpleNamespace(quantization_config=source)
    source = _find("ModelArchConfigConvertorBase")._normalize_quantization_config(None, holder)
    builtin = [name for name in methods if name not in _OVERRIDES and name != section.get("quant_method")]
    for name in (*builtin, *_OVERRIDES):
        if name in methods:
            found = get_config(name).override_quantization_method(source, None, hf_config=hf_config)
            if found is not None:
                return str(found), source
    return str(source["quant_method"]), source


def weight_key(source_schema: Mapping[str, Any], param_dtype: object) -> Any:  # noqa: ANN401 - vLLM's QuantKey
    """vLLM's key of the checkpoint's own weight format. Raises ServingError for a format that vLLM has no key for."""
    import torch

    from humming_loader import humming_host

    try:
        key = _find("weight_schema_to_quant_key")(humming_host.weight_schema(source_schema), param_dtype)
    except KeyError as error:
        raise ServingError("weights", "a dtype that vLLM has a quantization key for", str(error)) from error
    # vLLM's own methods key FP8 and INT8 weights with one scale a channel, tensor or square block by float32 scales,
    # whatever the checkpoint's scale dtype.
    is_plain = key.scale.group_shape.row != 1 or key.scale.group_shape.col == -1
    if key.dtype in (_find("FP8_DTYPE"), torch.int8) and is_plain and key.scale2 is None:
        key = dataclasses.replace(key, scale=dataclasses.replace(key.scale, dtype=torch.float32))
    return key


def activation_key(input_schema: Mapping[str, Any] | None, param_dtype: object) -> Any:  # noqa: ANN401 - QuantKey
    """vLLM's key of the activations that the kernels run with; None: 16 bits."""
    from humming_loader import humming_host

    if input_schema is None:
        return None
    return _find("input_schema_to_quant_key")(humming_host.input_schema(input_schema), param_dtype)


def load_format() -> str:
    """The load format of the model that is being built; empty outside of that."""
    config = _find("get_current_vllm_config_or_none")()
    return "" if config is None else str(config.load_config.load_format)


def download_dir() -> str | None:
    """Where vLLM was told to keep what it downloads; None: nowhere in particular, or no model is being built."""
    config = _find("get_current_vllm_config_or_none")()
    found = None if config is None else config.load_config.download_dir
    return str(found) if found else None
