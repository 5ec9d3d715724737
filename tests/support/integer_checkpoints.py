"""Tiny checkpoints of integers by format, with the values that every weight stands for.

Written from the formats' definitions with numpy alone. Scales have 8 significant bits, so that they are the same
numbers in F16, BF16 and F32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tests.support.checkpoints import Array, Edit, RawTensor, Tensors, floats, make_checkpoint, pack_awq, pack_words

Values = dict[str, NDArray[np.float32]]
Config = dict[str, Any]
Projection = dict[str, RawTensor]
_MARK = ".experts."


@dataclass(slots=True)
class Drawn:
    """Codes `(N, K)`, zero points and scales `(N, groups)` of one projection, and the group of every column."""

    codes: NDArray[np.uint8]
    zeros: NDArray[np.uint8]
    scales: NDArray[np.float32]
    columns: NDArray[np.int64]

    def values(self) -> NDArray[np.float32]:
        """(code - zero point) * scale."""
        zeros, scales = self.zeros[:, self.columns], self.scales[:, self.columns]
        values: NDArray[np.float32] = (self.codes.astype(np.float32) - zeros) * scales
        return values


@dataclass(slots=True)
class Integers:
    """How weights are drawn: `bits`, `group` (-1: one scale a row), and zero points unless `sym`.

    `lowest`: whether the lowest code may occur, `least_zero` and `most_zero` bound the zero points.
    """

    bits: int = 4
    group: int = 128
    sym: bool = True
    lowest: bool = True
    least_zero: int = 1
    most_zero: int | None = None
    negative_scales: bool = False
    values: Values = field(default_factory=dict)

    def draw(self, rng: np.random.Generator, n: int, k: int) -> Drawn:
        """One projection `[n, k]`."""
        top = 1 << self.bits
        group = k if self.group == -1 else self.group
        groups = -(-k // group)
        zeros = np.full((n, groups), top >> 1, np.uint8)
        if not self.sym:
            most = top - 1 if self.most_zero is None else self.most_zero
            zeros = rng.integers(self.least_zero, most + 1, (n, groups)).astype(np.uint8)
        scales = (rng.integers(1, 256, (n, groups)) * 2.0**-14).astype(np.float32)
        if self.negative_scales:
            scales *= rng.choice(np.array([-1, 1], np.float32), scales.shape)
        codes = rng.integers(0 if self.lowest else 1, top, (n, k)).astype(np.uint8)
        return Drawn(codes, zeros, scales, np.arange(k) // group)


Writer = Callable[[Integers, Drawn], Projection]


def make_integers(
    path: Path,
    integers: Integers,
    writer: Writer,
    quantization: Config,
    *,
    edit: Edit | None = None,
    bias: bool = False,
    **options: Any,  # noqa: ANN401 - of make_checkpoint
) -> Path:
    """Write a checkpoint whose experts `writer` stores; `integers.values` then has what their weights stand for.

    `edit` comes last. Options are those of `make_checkpoint`.
    """
    rng = np.random.default_rng(options.get("seed", 0))

    def replace(tensors: Tensors, config: Config) -> None:
        experts = [name for name in tensors if _MARK in name]
        for name in experts:
            n, k = tensors.pop(name).array.shape
            module = name.removesuffix(".weight")
            drawn = integers.draw(rng, n, k)
            integers.values[module] = drawn.values()
            written = writer(integers, drawn)
            if bias:
                written["bias"] = floats(np.asarray(rng.integers(-8, 8, n), np.float32), "F16")
            tensors |= {f"{module}.{parameter}": tensor for parameter, tensor in written.items()}
        config["quantization_config"] = dict(quantization)
        if edit is not None:
            edit(tensors, config)

    return make_checkpoint(path, format="bf16", edit=replace, **options)


def gptq_config(integers: Integers, **fields: Any) -> Config:  # noqa: ANN401 - values of any form
    """The section that AutoGPTQ and GPTQModel write."""
    return {
        "quant_method": "gptq",
        "bits": integers.bits,
        "group_size": integers.group,
        "sym": integers.sym,
        "desc_act": False,
        "lm_head": False,
        "checkpoint_format": "gptq",
        **fields,
    }


def auto_round_config(integers: Integers, packing: str, **fields: Any) -> Config:  # noqa: ANN401
    """The section that auto-round writes in its own format."""
    return {
        "quant_method": "auto-round",
        "bits": integers.bits,
        "group_size": integers.group,
        "sym": integers.sym,
        "data_type": "int",
        "packing_format": packing,
        "block_name_to_quantize": "model.layers",
        **fields,
    }


def write_gptq(offset: int, *, g_idx: bool = True, zeros: bool = True) -> Writer:
    """Zero points `offset` less (1: the first format, 0: the second), each field for itself."""

    def writer(integers: Integers, drawn: Drawn) -> Projection:
        bits = integers.bits
        stored = (drawn.zeros - np.uint8(offset)) & np.uint8((1 << bits) - 1)
        found = {
            "qweight": RawTensor("I32", np.ascontiguousarray(pack_words(drawn.codes, bits).T)),
            "scales": floats(np.ascontiguousarray(drawn.scales.T), "F16"),
        }
        if zeros:
            found["qzeros"] = RawTensor("I32", pack_words(np.ascontiguousarray(stored.T), bits))
        if g_idx:
            found["g_idx"] = RawTensor("I32", drawn.columns.astype(np.int32))
        return found

    return writer


def write_gptq_with_borrows(integers: Integers, drawn: Drawn) -> Projection:
    """The first format as GPTQModel makes it of the second: one less in every field, whole words at once."""
    found = write_gptq(0)(integers, drawn)
    ones = np.uint32(sum(1 << shift for shift in range(0, 32, integers.bits)))
    words = found["qzeros"].array.view(np.uint32) - ones
    return found | {"qzeros": RawTensor("I32", words.view(np.int32))}


def write_awq(integers: Integers, drawn: Drawn) -> Projection:
    """AutoAWQ's GEMM packing."""
    return {
        "qweight": RawTensor("I32", pack_awq(np.ascontiguousarray(drawn.codes.T))),
        "qzeros": RawTensor("I32", pack_awq(np.ascontiguousarray(drawn.zeros.T))),
        "scales": floats(np.ascontiguousarray(drawn.scales.T), "F16"),
    }


def ct_bytes_config(integers: Integers, inputs: Config | None = None) -> Config:
    """The section of compressed-tensors' int-quantized."""
    weights = {
        "num_bits": integers.bits,
        "type": "int",
        "strategy": "channel" if integers.group == -1 else "group",
        "group_size": None if integers.group == -1 else integers.group,
        "symmetric": integers.sym,
        "dynamic": False,
        "actorder": None,
    }
    group = {"format": "int-quantized", "targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


def write_ct_bytes(integers: Integers, drawn: Drawn) -> Projection:
    """Signed integers, one a byte, also where they have fewer bits."""
    middle = 1 << (integers.bits - 1)
    found = {
        "weight": RawTensor("I8", (drawn.codes.astype(np.int16) - middle).astype(np.int8)),
        "weight_scale": floats(drawn.scales, "BF16"),
    }
    if not integers.sym:
        found["weight_zero_point"] = RawTensor("I8", (drawn.zeros.astype(np.int16) - middle).astype(np.int8))
    return found


def quark_config(integers: Integers, dtype: str, order: str, symmetric: bool | None) -> Config:
    """The section that Quark writes, in the fields that say something."""
    weight = {
        "dtype": dtype,
        "qscheme": "per_group",
        "ch_axis": -1,
        "group_size": integers.group,
        "symmetric": symmetric,
        "is_dynamic": False,
        "zero_point_type": "int32",
    }
    scheme = {"weight": weight, "input_tensors": None, "output_tensors": None, "bias": None}
    export = {"pack_method": order, "weight_format": "real_quantized"}
    return {"quant_method": "quark", "global_quant_config": scheme, "exclude": ["lm_head"], "export": export}


def write_quark(dtype: str, order: str) -> Writer:
    """Two's complement for int4, zero points also where all are zero."""

    def pack(codes: Array) -> Array:
        turned = np.ascontiguousarray(codes.T)
        return pack_awq(turned) if order == "reorder" else pack_words(turned, 4)

    def writer(integers: Integers, drawn: Drawn) -> Projection:
        flip = np.uint8(8 if dtype == "int4" else 0)
        return {
            "weight": RawTensor("I32", pack(drawn.codes ^ flip)),
            "weight_scale": floats(np.ascontiguousarray(drawn.scales.T), "BF16"),
            "weight_zero_point": RawTensor("I32", pack(drawn.zeros ^ flip)),
        }

    return writer


def humming_config(integers: Integers, **fields: Any) -> Config:  # noqa: ANN401
    """The section of Humming's own standard form."""
    group = 0 if integers.group == -1 else integers.group
    return {
        "quant_method": "humming",
        "b_dtype": f"uint{integers.bits}",
        "weight_scale_group_size": group,
        "has_zero_point": not integers.sym,
        **fields,
    }


def write_humming(integers: Integers, drawn: Drawn) -> Projection:
    """Codes along K, zero points along N."""
    found = {
        "weight": RawTensor("I32", pack_words(drawn.codes, integers.bits)),
        "weight_scale": floats(drawn.scales, "BF16"),
    }
    if not integers.sym:
        words = pack_words(np.ascontiguousarray(drawn.zeros.T), integers.bits).T
        found["zero_point"] = RawTensor("I32", np.ascontiguousarray(words))
    return found
