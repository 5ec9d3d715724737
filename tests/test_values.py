"""Packed values held against compressed-tensors' own decoder, which nobody here wrote."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme
from safetensors import safe_open

from humming_convert.options import ConvertOptions
from humming_convert.pipeline import convert_checkpoint
from humming_convert.target import Target
from humming_convert.verify_output import read_manifest
from humming_loader.entries import SublayerEntry
from tests.support.genuine import genuine
from tests.support.values import dequantized

# The producer's decoder multiplies in the scale's own dtype (bfloat16): rounding our exact product the same way must
# give the very same numbers. NVFP4 multiplies three numbers, in an order of its own, so there one rounding may differ.
EXACT = (
    "llmcompressor--mixtral-W4A16",
    "llmcompressor--deepseek_v3-W4A16",
    "llmcompressor--glm4_moe-W4A16",
    *(f"llmcompressor--qwen3_moe-{scheme}" for scheme in (
        "FP8_BLOCK", "FP8_DYNAMIC", "MXFP4", "W3A16", "W4A16", "W4A16_ASYM", "W8A16", "W8A8")),
)  # fmt: skip
ONE_ROUNDING = ("llmcompressor--qwen3_moe-NVFP4",)
PROJECTIONS = {"w13": ("gate_proj", "up_proj"), "w2": ("down_proj",)}


def schemes(folder: Path) -> tuple[QuantizationScheme, str]:
    """The only scheme of a checkpoint, and its format."""
    section = json.loads((folder / "config.json").read_text())["quantization_config"]
    config = QuantizationConfig.model_validate(section)
    (scheme,) = config.config_groups.values()
    return scheme, section["format"]


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a single-file checkpoint."""
    with safe_open(folder / "model.safetensors", "pt") as opened:
        return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - not a dict


def theirs(
    tensors: dict[str, torch.Tensor], prefix: str, scheme: QuantizationScheme, form: str
) -> torch.Tensor:
    """One projection decoded by compressed-tensors."""
    own = {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
    weight = BaseCompressor.get_value_from_registry(form).decompress(own, scheme)["weight"]
    assert isinstance(weight, torch.Tensor)
    return weight


def sublayers(out: Path) -> Iterator[tuple[str, str, SublayerEntry, Any]]:
    """Layer name, sublayer name, entry and dequantized `(E, N, K)` float32 of everything packed."""
    for layer_name, layer in read_manifest(out).layers.items():
        for name, entry in layer.sublayers.items():
            yield layer_name, name, entry, dequantized(out, entry)


@pytest.mark.parametrize("name", EXACT + ONE_ROUNDING)
def test_packed_values_are_the_producers(name: str, tmp_path: Path) -> None:
    source = genuine(name)
    convert_checkpoint(ConvertOptions(source=source, out=tmp_path / "out", target=Target(90), workers=2))
    scheme, form = schemes(source)
    tensors = tensors_of(source)
    compared = 0
    for layer_name, sublayer, _, ours in sublayers(tmp_path / "out"):
        for expert in range(len(ours)):
            parts = [
                theirs(tensors, f"{layer_name}.{expert}.{part}.", scheme, form)
                for part in PROJECTIONS[sublayer]
            ]
            expected = torch.cat(parts)
            found = torch.from_numpy(np.ascontiguousarray(ours[expert]))
            assert found.shape == expected.shape
            if name in ONE_ROUNDING:
                assert ((found - expected.float()).abs() <= expected.float().abs() * 2.0**-7).all()
            else:
                assert torch.equal(found.to(expected.dtype), expected)
            compared += found.numel()
    assert compared > 0
