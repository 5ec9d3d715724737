"""Tiny checkpoints of any family, in any naming, sharding and order, with the same experts' values behind them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from tests.support.checkpoints import ExpertsWriter, RawTensor, Tensors, bf16, write_shards
from tests.support.family_case import GATE_UP_DOWN, Case, H

# Values[layer][expert][projection 0..2][parameter]
Values = dict[int, list[dict[int, dict[str, RawTensor]]]]

LINEARS: dict[str, tuple[str, str, str]] = {
    "gate_proj": GATE_UP_DOWN,
    "w1": ("w1", "w3", "w2"),
    "wgate": ("wgate", "up_proj", "down_proj"),
    "linear": ("linear", "linear_v", "linear_1"),
}


def make_values(case: Case, format: str, seed: int = 0, **options: Any) -> tuple[Values, ExpertsWriter]:  # noqa: ANN401
    """Random experts of a case in a format of `make_checkpoint`'s, and the writer that knows the config of it."""
    writer = ExpertsWriter(format, np.random.default_rng(seed), options)
    values: Values = {}
    for layer in case.layers:
        values[layer] = []
        for _ in range(case.experts):
            held = {}
            for index in range(3):
                if case.names[index] is not None:
                    n, k = (case.hidden, case.intermediate) if index == 2 else (case.intermediate, case.hidden)
                    held[index] = writer.projection(n, k)
            values[layer].append(held)
    return values, writer


def expert_tensors(case: Case, values: Values, naming: str = "own", place: str | None = None) -> Tensors:
    """All experts' tensors. `naming`: own, one of LINEARS, fused (`[E, 2I, H]`) or transposed (`[E, H, 2I]`)."""
    tensors: Tensors = {}
    for layer, experts in values.items():
        head = (place or case.place).format(layer)
        if naming in ("fused", "transposed"):
            tensors |= _fused(head, experts, is_transposed=naming == "transposed")
        elif naming == "own" and case.stacked:
            tensors |= _stacked(head, case, experts)
        else:
            names = case.names if naming == "own" else LINEARS[naming]
            for number, held in enumerate(experts):
                for index, parameters in held.items():
                    for parameter, tensor in parameters.items():
                        parent = head if ".experts" in head else f"{head}.experts"
                        tensors[f"{parent}.{number}.{names[index]}.{parameter}"] = tensor
    return tensors


def _stacked(head: str, case: Case, experts: list[dict[int, dict[str, RawTensor]]]) -> Tensors:
    return {
        f"{head}.{case.names[index]}.{parameter}": _stack([held[index][parameter] for held in experts])
        for index in experts[0]
        for parameter in experts[0][index]
    }


def _stack(parts: list[RawTensor]) -> RawTensor:
    return RawTensor(parts[0].dtype, np.stack([part.array for part in parts]))


def _fused(head: str, experts: list[dict[int, dict[str, RawTensor]]], *, is_transposed: bool) -> Tensors:
    tensors: Tensors = {}
    for parameter in experts[0][2]:
        both = [
            RawTensor(held[0][parameter].dtype, np.concatenate([held[0][parameter].array, held[1][parameter].array]))
            for held in experts
        ]
        suffix = "" if parameter == "weight" else f"_{parameter.removeprefix('weight_')}"
        for name, tensor in (
            ("gate_up_proj", _stack(both)),
            ("down_proj", _stack([held[2][parameter] for held in experts])),
        ):
            array = tensor.array.swapaxes(1, 2) if is_transposed and tensor.array.ndim == 3 else tensor.array
            tensors[f"{head}.{name}{suffix}"] = RawTensor(tensor.dtype, np.ascontiguousarray(array))
    return tensors


def other_tensors(case: Case, seed: int = 0, place: str | None = None) -> Tensors:
    """Embeddings, norms, routers and whatever else the case has beside its experts."""
    rng = np.random.default_rng(seed)

    def plain(*shape: int) -> RawTensor:
        return bf16(rng.standard_normal(shape, dtype=np.float32))

    prefix = (place or case.place).split("layers.")[0]
    tensors: Tensors = {f"{prefix}embed_tokens.weight": plain(16, H), "lm_head.weight": plain(16, H)}
    for layer in range(3):
        tensors[f"{prefix}layers.{layer}.input_layernorm.weight"] = plain(H)
        if layer not in case.layers:
            continue
        tensors[f"{prefix}layers.{layer}.{case.router}"] = plain(case.experts, H)
        for name in case.beside:
            shape = (case.experts,) if name.endswith("bias") else (8, 8)
            tensors[f"{prefix}layers.{layer}.{name}"] = plain(*shape)
    for name in case.elsewhere:
        tensors[name] = plain(8, 8)
    return tensors


def write_model(
    path: Path, case: Case, tensors: Mapping[str, RawTensor], writer: ExpertsWriter, *, shards: int = 1
) -> Path:
    """Write a model folder with these tensors, in their order."""
    path.mkdir(parents=True, exist_ok=True)
    write_shards(path, dict(tensors), shards)
    config = case.whole_config() | {"quantization_config": writer.config()}
    (path / "config.json").write_text(json.dumps(config))
    return path


def make_family(path: Path, case: Case, format: str = "ct_fp8_channel") -> Path:
    """A model folder of the case, one file, under its own names."""
    values, writer = make_values(case, format)
    return write_model(path, case, other_tensors(case) | expert_tensors(case, values), writer)
