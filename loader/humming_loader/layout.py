"""Where N and K lie in each tensor of a packed sublayer, as whole numbers of bytes.

Integers only: nothing here imports torch or humming. A tensor's expert is `rows` equal rows; each row is `tiles` equal
tiles along the axis that is cut, and each tile may be moved on its own. Specification: the layouts of humming 0.1.19
and 0.1.20 (`transform.py`, `process.cuh`).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from humming_loader.dtypes import dtype_info, tensor_nbytes
from humming_loader.entries import SublayerEntry, TensorEntry
from humming_loader.errors import ManifestError

PAD_N = 256  # vLLM and the converter pad N and K to these
PAD_K = 128

_BITS = re.compile(r"(?:u?int|b?float)(\d+)")
# Bytes that stand for "no weight" beside zero codes: E8M0 has no zero, so its scales are padded with 1.0; with 16-bit
# float parameters they are stored as E5M0 with 3 bits to spare, where 1.0 is 15 << 3.
_E8M0_ONE = 127
_E5M0_ONE = 120


@dataclass(frozen=True, slots=True)
class Facts:
    """What a sublayer's layout depends on, from its LayerConfig and the flags of its fingerprint."""

    config: Mapping[str, Any]
    flags: Mapping[str, bool]
    n: int  # padded
    k: int
    weight_bits: int
    activation_bits: int
    group: int  # along K, 0: none

    @property
    def can_pad(self) -> bool:
        """Whether tiles of zeros (and neutral scales) may stand beside the packed ones."""
        if self.flags["use_fused_e8m0_scale"] or self.flags["use_block_scaled_mma"]:
            return False
        # The zero code of an offset integer is its least value: only a scale of zero makes it nothing.
        is_integer = "int" in self.config["b_dtype"]
        return not (is_integer and self.config.get("bs_dtype") == "float8e8m0")

    @property
    def is_exact(self) -> bool:
        """Whether a slice is bit for bit what converting the slice would give."""
        return not (self.flags["use_int_weight_scale"] or self.flags["use_fused_e8m0_scale"])


@dataclass(frozen=True, slots=True)
class Axis:
    """One expert's bytes along a cut axis: `rows` x `tiles` x `tile_bytes`, a tile being `tile` values of N or K.

    `fill` is the byte of a tile that no stored tile goes to.
    """

    rows: int
    tiles: int
    tile_bytes: int
    tile: int
    fill: int = 0


def bits_of(dtype: str) -> int:
    """Bits of a Humming dtype by its name: uint4, float8e4m3, bfloat16. Raises ManifestError for anything else."""
    match = _BITS.match(dtype)
    if match is None:
        raise ManifestError("layer_config", "a dtype of Humming", repr(dtype))
    return int(match[1])


def parse_layer_config(text: str) -> dict[str, Any]:
    """Humming's LayerConfig text as a dictionary. Raises ManifestError when it is not one."""
    try:
        config = json.loads(text)
    except ValueError as error:
        raise ManifestError("layer_config", "a JSON object", f"text that does not parse ({error})") from error
    if not isinstance(config, dict):
        raise ManifestError("layer_config", "a JSON object", type(config).__name__)
    for name in ("shape_n", "shape_k", "pad_shape_n", "pad_shape_k", "num_experts"):
        if type(config.get(name)) is not int:
            raise ManifestError(f"layer_config.{name}", "an integer", repr(config.get(name)))
    for name in ("a_dtype", "b_dtype", "c_dtype"):
        if not isinstance(config.get(name), str):
            raise ManifestError(f"layer_config.{name}", "a dtype", repr(config.get(name)))
    return config


def facts_of(entry: SublayerEntry) -> Facts:
    """The layout facts of a sublayer. Raises ManifestError for a `layer_config` that contradicts the entry."""
    config = parse_layer_config(entry.layer_config)
    n, k = int(config["shape_n"]), int(config["shape_k"])
    logical = (n - config["pad_shape_n"], k - config["pad_shape_k"])
    if logical != (entry.shape_n, entry.shape_k):
        raise ManifestError(
            "layer_config", f"a shape of {entry.shape_n} x {entry.shape_k}", f"{logical[0]} x {logical[1]}"
        )
    return Facts(
        config=config,
        flags=entry.fingerprint.flags,
        n=n,
        k=k,
        weight_bits=bits_of(config["b_dtype"]),
        activation_bits=bits_of(config["a_dtype"]),
        group=int(config.get("weight_scale_group_size") or 0),
    )


def n_axis(key: str, tensor: TensorEntry, facts: Facts) -> Axis | None:
    """How `tensor` (called `key` in its sublayer) lies along N; None when it has no N axis.

    Raises ManifestError when its shape cannot be cut as its layout says.
    """
    if key in ("input_scale", "input_scale_2") or len(tensor.shape) < 2:
        return None
    nbytes = _expert_bytes(tensor)
    if key == "weight" and facts.flags["use_flat_weight"]:
        chunks = facts.k * facts.weight_bits // 128
        return _axis(tensor, chunks, facts.n // 64, 64, nbytes)
    if key == "weight" and facts.flags["use_raw_weight"]:
        return _axis(tensor, 1, facts.n, 1, nbytes)
    tile = _n_tile(key, facts)
    rows = math.prod(tensor.shape[1:-1])
    return _axis(tensor, rows, facts.n // tile, tile, nbytes, _fill(key, facts))


def _n_tile(key: str, facts: Facts) -> int:
    config = facts.config
    if key == "weight_scale" and config.get("weight_scale_type") == "block":
        return int(config["weight_scale_group_size_n"])
    if key == "weight_scale" and facts.flags["use_block_scaled_mma"] and facts.group:
        return 128 if config["sm_version"] // 10 in (10, 11) else 16
    per_channel = key in ("bias", "weight_scale_2") or (key == "weight_scale" and not facts.group)
    return 32 if per_channel else 64


def k_axis(key: str, tensor: TensorEntry, facts: Facts) -> Axis | None:
    """How `tensor` lies along K; None when it has no K axis: every rank needs the whole of it. Raises ManifestError."""
    nbytes = _expert_bytes(tensor)
    if key == "weight":
        if facts.flags["use_flat_weight"]:
            tile = 128 // math.gcd(128, facts.weight_bits)
            return _axis(tensor, 1, facts.k // tile, tile, nbytes)
        if facts.flags["use_raw_weight"]:
            tile = 32 // math.gcd(32, facts.weight_bits)
            return _axis(tensor, facts.n, facts.k // tile, tile, nbytes)
        rows = tensor.shape[1] if len(tensor.shape) == 3 else 0
        return _axis(tensor, 1, rows, _k_tile(tensor, facts, rows), nbytes)
    if key not in ("weight_scale", "zero_point") or not facts.group or len(tensor.shape) != 3:
        return None
    rows = tensor.shape[1]
    return _axis(tensor, 1, rows, _k_tile(tensor, facts, rows), nbytes, _fill(key, facts))


def _k_tile(tensor: TensorEntry, facts: Facts, rows: int) -> int:
    if rows == 0 or facts.k % rows:
        raise ManifestError(tensor.name, f"rows that divide K = {facts.k}", f"shape {list(tensor.shape)}")
    return facts.k // rows


def _axis(tensor: TensorEntry, rows: int, tiles: int, tile: int, nbytes: int, fill: int = 0) -> Axis:
    if rows * tiles == 0 or nbytes % (rows * tiles):
        raise ManifestError(tensor.name, f"{rows} rows of {tiles} tiles", f"shape {list(tensor.shape)}")
    return Axis(rows, tiles, nbytes // (rows * tiles), tile, fill)


def _fill(key: str, facts: Facts) -> int:
    if key != "weight_scale" or facts.config.get("bs_dtype") != "float8e8m0":
        return 0
    return _E5M0_ONE if facts.config["c_dtype"] == "float16" else _E8M0_ONE


def _expert_bytes(tensor: TensorEntry) -> int:
    dtype_info(tensor.dtype, tensor.name)
    if not tensor.shape or tensor.shape[0] == 0:
        raise ManifestError(tensor.name, "an axis of experts", f"shape {list(tensor.shape)}")
    return tensor_nbytes(tensor.dtype, tensor.shape, tensor.name) // tensor.shape[0]
