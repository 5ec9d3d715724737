"""The quantization method `humming_prepacked`: the original checkpoint's own configuration, but for packed layers.

A configuration object has the state of the original's and a subclass of its class, so that everything that vLLM asks of
it, isinstance included, is answered as if the checkpoint had not been converted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from humming_loader import kernels, vllm_compat
from humming_loader.checkpoint import cached_manifest, find_output, manifest_stamp
from humming_loader.entries import Manifest
from humming_loader.errors import ServingError
from humming_loader.hub import repository_of
from humming_loader.parts import layer_names
from humming_loader.vllm_compat import QuantizationConfig

METHOD = "humming_prepacked"
FORMAT_VERSION = 1
# What wraps a language model inside another; the rest of a layer's name identifies it.
_WRAPPERS = frozenset({"model", "language_model", "text_model"})


@dataclass(frozen=True, slots=True)
class Prepacked:
    """What the configuration keeps: config.json's section, which model it is once known, and the name mapping."""

    section: Mapping[str, Any]
    model: str | None = None
    revision: str | None = None
    mapper: Any = None

    def folder(self) -> Path:
        """The checkpoint's folder in this process. Raises ServingError before the model is known."""
        if self.model is None:
            raise ServingError(METHOD, "the checkpoint's folder", "a configuration that no model was given to")
        return find_output(self.model, self.revision)

    def manifest(self) -> Manifest:
        """The checkpoint's manifest. Raises ServingError, OutputMissingError or ManifestError."""
        folder = self.folder()
        return cached_manifest(folder, manifest_stamp(folder))

    def stored_name(self, layer_name: str) -> str | None:
        """The manifest's name of vLLM's layer, None for a layer that was not converted."""
        layers = layer_names(self.manifest().layers)
        if layer_name in layers:
            return layer_name
        for name in layers:
            if self.mapper is not None and self.mapper.map_name(name) == layer_name:
                return name
        same = [name for name in layers if _core(name) == _core(layer_name)]
        return same[0] if len(same) == 1 else None


def _core(layer_name: str) -> tuple[str, ...]:
    return tuple(part for part in layer_name.split(".") if part not in _WRAPPERS)


class PrepackedMixin:
    """What differs from the original configuration. Always stands before its class in a `prepacked_class`."""

    humming_prepacked: Prepacked

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:  # noqa: ANN401 - a vLLM method
        """Packed experts for the layers of the manifest, the original's method for every other layer."""
        if isinstance(layer, vllm_compat.RoutedExperts):
            stored = self.humming_prepacked.stored_name(layer.layer_name)
            if stored is not None:
                from humming_loader.experts import PrepackedHummingMoEMethod

                state = self.humming_prepacked
                if state.model is not None:
                    kernels.offer(state.model, state.revision, log=vllm_compat.init_logger(f"vllm.{__name__}").info)
                return PrepackedHummingMoEMethod(layer, state.folder(), state.manifest(), stored)
        return super().get_quant_method(layer, prefix)  # type: ignore[misc]

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:  # noqa: ANN401 - vLLM's WeightsMapper
        """Keep the mapping of checkpoint names to vLLM's for the manifest's names too."""
        self.humming_prepacked = replace(self.humming_prepacked, mapper=hf_to_vllm_mapper)
        super().apply_vllm_mapper(hf_to_vllm_mapper)  # type: ignore[misc]

    def maybe_update_config(
        self,
        model_name: str,
        hf_config: Any = None,  # noqa: ANN401 - a transformers config
        revision: str | None = None,
    ) -> None:
        """Learn where the checkpoint is and which model it is; become the class that the original then has."""
        warning = vllm_compat.check_version()
        if warning:
            vllm_compat.init_logger(f"vllm.{__name__}").warning(warning)
        found = find_output(model_name, revision)
        fresh = build(self.humming_prepacked.section, hf_config)
        kept = getattr(self, "online_quantization_config", None)
        self.__dict__.clear()
        self.__dict__.update(fresh.__dict__)
        self.__class__ = type(fresh)
        if kept is not None:
            self.online_quantization_config = kept
        # A repository keeps its name: another node has it elsewhere. The commit is kept: every process has the same.
        is_local = Path(model_name).is_dir()
        repository = None if is_local else repository_of(found)
        self.humming_prepacked = replace(
            self.humming_prepacked,
            model=str(found.absolute()) if is_local else model_name,
            revision=repository.commit if repository is not None else revision,
        )
        super().maybe_update_config(model_name, hf_config=hf_config, revision=revision)  # type: ignore[misc]

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:  # noqa: ANN401 - pickle's signature
        """The generated class has no importable name: pickle the original class and the state."""
        return _rebuild, (type(self).__mro__[2], self.__dict__.copy())


@cache
def prepacked_class(original: type[Any]) -> type[Any]:
    """The subclass of a vLLM configuration class whose packed layers are ours; one per class."""
    return type(f"Prepacked{original.__name__}", (PrepackedMixin, original), {"__module__": __name__})


def _rebuild(original: type[Any], state: dict[str, Any]) -> Any:  # noqa: ANN401 - an instance of a generated class
    config = object.__new__(prepacked_class(original))  # type: ignore[arg-type]
    config.__dict__.update(state)
    return config


def build(section: Mapping[str, Any], hf_config: Any) -> Any:  # noqa: ANN401 - an instance of a generated class
    """The configuration for config.json's `section`. Raises ServingError for a section of another format version."""
    version = section.get("format_version")
    if version != FORMAT_VERSION:
        raise ServingError("quantization_config.format_version", str(FORMAT_VERSION), str(version))
    method, source = vllm_compat.resolve_source(section, hf_config)
    if method is None:
        config: Any = UnquantizedSource()
    else:
        if method == "compressed-tensors" and hf_config is not None and "config_groups" in source:
            source |= _head_counts(hf_config)
        config = vllm_compat.get_quantization_config(method).from_config(source)
    return _rebuild(type(config), vars(config) | {"humming_prepacked": Prepacked(dict(section))})


def _head_counts(hf_config: Any) -> dict[str, int]:  # noqa: ANN401 - a transformers config
    """What vLLM adds to a compressed-tensors section for scales of attention heads."""
    text = hf_config.get_text_config()
    heads = getattr(text, "num_attention_heads", None)
    if not isinstance(heads, int):
        return {}
    kv_heads = getattr(text, "num_key_value_heads", None)
    return {"total_num_heads": heads, "total_num_kv_heads": kv_heads if isinstance(kv_heads, int) else heads}


class UnquantizedSource(QuantizationConfig):  # type: ignore[misc]
    """The configuration of a source without any quantization section."""

    def get_name(self) -> str:
        """The method's name."""
        return METHOD

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """Both dtypes that Humming computes with."""
        return [torch.bfloat16, torch.float16]

    @classmethod
    def get_min_capability(cls) -> int:
        """Humming's."""
        return 75

    @staticmethod
    def get_config_filenames() -> list[str]:
        """None: config.json says it all."""
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> UnquantizedSource:
        """Nothing to read."""
        return cls()

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:  # noqa: ANN401 - a vLLM method
        """Linear layers as they are; None elsewhere means the same."""
        return vllm_compat.UnquantizedLinearMethod() if isinstance(layer, vllm_compat.LinearBase) else None


class HummingPrepackedConfig(UnquantizedSource):
    """What vLLM finds under `humming_prepacked`; it hands out instances of the original's class instead of its own."""

    @classmethod
    def override_quantization_method(
        cls,
        hf_quant_cfg: object,
        user_quant: str | None,
        hf_config: object = None,
    ) -> str | None:
        """Claim our checkpoints, and only them, whatever --quantization says."""
        is_ours = isinstance(hf_quant_cfg, dict) and hf_quant_cfg.get("quant_method") == METHOD
        return METHOD if is_ours else None

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:  # noqa: ANN401 - an instance of a generated class
        """The original's configuration with packed layers. Raises ServingError."""
        return build(config, None)
