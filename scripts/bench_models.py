"""Synthetic models of real layer shapes for the benchmarks: one safetensors file, random codes, by format."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

Tensor = tuple[str, str, tuple[int, ...], Callable[[np.random.Generator], np.ndarray[Any, Any]]]


@dataclass(frozen=True, slots=True)
class Shape:
    """A model's layers: experts, hidden and intermediate size, and how many layers of 8 bits a model gets."""

    experts: int
    hidden: int
    intermediate: int
    layers: int

    def projections(self) -> list[tuple[str, int, int]]:
        """Name, N and K of one expert's projections."""
        return [
            ("gate_proj", self.intermediate, self.hidden),
            ("up_proj", self.intermediate, self.hidden),
            ("down_proj", self.hidden, self.intermediate),
        ]


SHAPES = {"qwen3-30b": Shape(128, 2048, 768, 12), "deepseek-v3": Shape(256, 7168, 2048, 1)}


def _words(*shape: int) -> Callable[[np.random.Generator], np.ndarray[Any, Any]]:
    return lambda rng: rng.integers(0, 256, size=int(np.prod(shape)) * 4, dtype=np.uint8)


def _codes(*shape: int) -> Callable[[np.random.Generator], np.ndarray[Any, Any]]:
    # The exponent's lowest bit is cleared so that no code is NaN.
    return lambda rng: rng.integers(0, 256, size=shape, dtype=np.uint8) & 0xF7


def _bytes(low: int, high: int, *shape: int) -> Callable[[np.random.Generator], np.ndarray[Any, Any]]:
    return lambda rng: rng.integers(low, high, size=shape, dtype=np.uint8)


def _constant(array: np.ndarray[Any, Any]) -> Callable[[np.random.Generator], np.ndarray[Any, Any]]:
    return lambda rng: array


def _scales(dtype: str, *shape: int) -> Callable[[np.random.Generator], np.ndarray[Any, Any]]:
    def draw(rng: np.random.Generator) -> np.ndarray[Any, Any]:
        values = rng.uniform(0.01, 0.1, size=shape).astype(np.float32)
        if dtype == "BF16":
            return (values.view(np.uint32) >> 16).astype(np.uint16)
        return values.astype({"F32": np.float32, "F16": np.float16}[dtype])

    return draw


def fp8_block(prefix: str, n: int, k: int) -> list[Tensor]:
    scale = (n // 128, k // 128)
    return [
        (f"{prefix}.weight", "F8_E4M3", (n, k), _codes(n, k)),
        (f"{prefix}.weight_scale_inv", "F32", scale, _scales("F32", *scale)),
    ]


def mxfp4(prefix: str, n: int, k: int) -> list[Tensor]:
    return [
        (f"{prefix}.weight_packed", "U8", (n, k // 2), _bytes(0, 256, n, k // 2)),
        (f"{prefix}.weight_scale", "U8", (n, k // 32), _bytes(112, 128, n, k // 32)),
    ]


def awq(prefix: str, n: int, k: int) -> list[Tensor]:
    groups = k // 128
    return [
        (f"{prefix}.qweight", "I32", (k, n // 8), _words(k, n // 8)),
        (f"{prefix}.qzeros", "I32", (groups, n // 8), _words(groups, n // 8)),
        (f"{prefix}.scales", "F16", (groups, n), _scales("F16", groups, n)),
    ]


def ct_int4(prefix: str, n: int, k: int) -> list[Tensor]:
    return [
        (f"{prefix}.weight_packed", "I32", (n, k // 8), _words(n, k // 8)),
        (f"{prefix}.weight_scale", "BF16", (n, k // 128), _scales("BF16", n, k // 128)),
    ]


def nvfp4(prefix: str, n: int, k: int) -> list[Tensor]:
    return [
        (f"{prefix}.weight_packed", "U8", (n, k // 2), _bytes(0, 256, n, k // 2)),
        (f"{prefix}.weight_scale", "F8_E4M3", (n, k // 16), _bytes(48, 112, n, k // 16)),
        (f"{prefix}.weight_global_scale", "F32", (1,), _constant(np.full(1, 512, dtype=np.float32))),
    ]


def gptq(prefix: str, n: int, k: int) -> list[Tensor]:
    groups = k // 128
    return [
        (f"{prefix}.qweight", "I32", (k // 8, n), _words(k // 8, n)),
        (f"{prefix}.qzeros", "I32", (groups, n // 8), _constant(np.full((groups, n // 8), 0x77777777, dtype=np.int32))),
        (f"{prefix}.scales", "F16", (groups, n), _scales("F16", groups, n)),
        (f"{prefix}.g_idx", "I32", (k,), _constant(np.arange(k, dtype=np.int32) // 128)),
    ]


def _compressed_tensors(**weights: object) -> dict[str, Any]:
    group_format = weights.pop("format")
    group = {"format": group_format, "targets": ["Linear"], "weights": weights, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": group_format,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


FORMATS: dict[str, tuple[Callable[[str, int, int], list[Tensor]], dict[str, Any]]] = {
    "fp8_block": (
        fp8_block,
        {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"},
    ),
    "mxfp4": (
        mxfp4,
        _compressed_tensors(
            format="mxfp4-pack-quantized",
            type="float",
            num_bits=4,
            strategy="group",
            group_size=32,
            symmetric=True,
        ),
    ),
    "awq": (
        awq,
        {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"},
    ),
    "ct_int4": (
        ct_int4,
        _compressed_tensors(
            format="pack-quantized", type="int", num_bits=4, strategy="group", group_size=128, symmetric=True
        ),
    ),
    "nvfp4": (
        nvfp4,
        _compressed_tensors(
            format="nvfp4-pack-quantized",
            type="float",
            num_bits=4,
            strategy="tensor_group",
            group_size=16,
            symmetric=True,
        ),
    ),
    "gptq": (
        gptq,
        {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False},
    ),
}


def sizes_of(name: str, shape: Shape, layers: int | None) -> tuple[int, int]:
    """Layers and experts of a model that, twice, fits into 24 GiB of memory."""
    if name == "fp8_block":
        return layers or shape.layers, shape.experts if shape.layers > 1 else shape.experts // 2
    return layers or (2 * shape.layers if shape.layers > 1 else 1), shape.experts


def _tensors(name: str, shape: Shape, layers: int) -> Iterator[Tensor]:
    build = FORMATS[name][0]
    router = (shape.experts, shape.hidden)
    for layer in range(layers):
        yield f"model.layers.{layer}.mlp.gate.weight", "BF16", router, _scales("BF16", *router)
        for expert in range(shape.experts):
            for projection, n, k in shape.projections():
                yield from build(f"model.layers.{layer}.mlp.experts.{expert}.{projection}", n, k)


def write_model(folder: Path, name: str, shape: Shape, layers: int) -> Path:
    """Write a model folder of one safetensors file with random experts; the path of that file."""
    folder.mkdir(parents=True)
    header: dict[str, Any] = {}
    offset = 0
    for tensor, dtype, dims, _ in _tensors(name, shape, layers):
        size = int(np.prod(dims)) * {"F8_E4M3": 1, "U8": 1, "F32": 4, "I32": 4, "F16": 2, "BF16": 2}[dtype]
        header[tensor] = {"dtype": dtype, "shape": list(dims), "data_offsets": [offset, offset + size]}
        offset += size
    path = folder / "model.safetensors"
    rng = np.random.default_rng(0)
    with path.open("wb") as file:
        _write_header(file, header)
        for _, _, _, draw in _tensors(name, shape, layers):
            file.write(np.ascontiguousarray(draw(rng)).tobytes())
    config = {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "hidden_size": shape.hidden,
        "moe_intermediate_size": shape.intermediate,
        "num_experts": shape.experts,
        "num_hidden_layers": layers,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
        "quantization_config": FORMATS[name][1],
    }
    (folder / "config.json").write_text(json.dumps(config))
    return path


def _write_header(file: BinaryIO, header: dict[str, Any]) -> None:
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write(struct.pack("<Q", len(text)) + text)
