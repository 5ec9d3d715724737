"""The activations that weights can be laid out for: one table, names as the command line takes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from humming_convert.errors import Problem, UnsupportedError

CHECKPOINT = "checkpoint"

# What Humming's input schema must say; None stands for activations of 16 bits.
ACTIVATIONS: dict[str, dict[str, Any] | None] = {
    "a16": None,
    "fp8": {"quant_method": "humming", "dtype": "float8e4m3"},
    "fp8-block": {"quant_method": "humming", "dtype": "float8e4m3", "group_size": 128},
    "mxfp8": {
        "quant_method": "humming",
        "dtype": "float8e4m3",
        "group_size": 32,
        "scale_dtype": "float8e8m0",
    },
    "int8": {"quant_method": "humming", "dtype": "int8"},
    "nvfp4": {
        "quant_method": "humming",
        "dtype": "float4e2m1",
        "group_size": 16,
        "scale_dtype": "float8e4m3",
    },
    "mxfp4": {
        "quant_method": "humming",
        "dtype": "float4e2m1",
        "group_size": 32,
        "scale_dtype": "float8e8m0",
    },
}
NAMES: tuple[str, ...] = (*ACTIVATIONS, CHECKPOINT)

DESCRIPTIONS: dict[str, str] = {
    "a16": "16 bits, not quantized (the default)",
    "fp8": "FP8 E4M3, one scale per token",
    "fp8-block": "FP8 E4M3, one scale per 128 channels of a token",
    "mxfp8": "FP8 E4M3, one E8M0 scale per 32 channels",
    "int8": "INT8, one scale per token",
    "nvfp4": "FP4 E2M1, one FP8 scale per 16 channels",
    "mxfp4": "FP4 E2M1, one E8M0 scale per 32 channels",
    CHECKPOINT: "what the checkpoint was calibrated for, or the nearest that the GPU runs well",
}


def input_schema_for(activation: str, source: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The input schema of an activation name; `source` is what the checkpoint says of its own activations.

    For `checkpoint` the result carries `allow_fallback`, as vLLM's configuration does: another activation may
    take its place when the GPU cannot run it. None: 16 bits. Raises UnsupportedError for an unknown name.
    """
    if activation == CHECKPOINT:
        return None if source is None else {**source, "allow_fallback": True}
    if activation not in ACTIVATIONS:
        raise UnsupportedError([Problem("--activation", f"one of {', '.join(NAMES)}", repr(activation))])
    schema = ACTIVATIONS[activation]
    return None if schema is None else dict(schema)
