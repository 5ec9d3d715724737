"""What the installed Humming says of this host; beside `toolchain` the only file of the loader that
imports humming."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import lru_cache
from importlib.metadata import version
from typing import Any

import torch
from humming.config import LayerConfig

from humming_loader.fingerprint import FLAGS
from humming_loader.host_layout import Host
from humming_loader.layout import parse_layer_config
from humming_loader.slicing import SublayerSlice

# Humming decides these itself when they are None.
_DECIDED = ("use_packed_k_layout", "use_fused_e8m0_scale", "use_int_weight_scale")


@lru_cache(maxsize=64)
def probe_host(device: torch.device) -> Host:
    """The host as Humming will see it through the CUDA device `device`."""
    from humming.device import DeviceInfo

    info = DeviceInfo(device)
    cuda = tuple(int(part) for part in (torch.version.cuda or "0.0").split(".")[:2])
    return Host(int(info.sm_version), version("humming-kernels"), (cuda[0], cuda[1]), bool(info.is_ppu))


def resolve_flags(layer_config: str, sm: int) -> dict[str, bool]:
    """The layout flags that Humming would choose here for the stored LayerConfig, as if it were new."""
    fresh = parse_layer_config(layer_config) | dict.fromkeys(_DECIDED) | {"sm_version": sm}
    config = LayerConfig(**fresh)
    return {name: bool(getattr(config, name)) for name in FLAGS}


def stored_config(layer_config: str) -> LayerConfig:
    """Humming's LayerConfig as it was stored."""
    return LayerConfig(**parse_layer_config(layer_config))


def local_config(layer_config: str, part: SublayerSlice, num_experts: int) -> LayerConfig:
    """The LayerConfig of a rank's part: the stored one with the rank's shapes, padding and number of experts."""
    return dataclasses.replace(
        stored_config(layer_config),
        shape_n=part.shape_n + part.pad_n,
        shape_k=part.shape_k + part.pad_k,
        pad_shape_n=part.pad_n,
        pad_shape_k=part.pad_k,
        num_experts=num_experts,
    )


def weight_schema(config: Mapping[str, Any]) -> Any:  # noqa: ANN401 - Humming's own class
    """Humming's weight schema from its stored values."""
    from humming.schema import BaseWeightSchema

    return BaseWeightSchema.from_config(dict(config))


def input_schema(config: Mapping[str, Any] | None) -> Any:  # noqa: ANN401 - Humming's own class
    """Humming's input schema from its stored values; None: 16-bit activations."""
    from humming.schema import BaseInputSchema, HummingInputSchema

    return HummingInputSchema() if config is None else BaseInputSchema.from_config(dict(config))
