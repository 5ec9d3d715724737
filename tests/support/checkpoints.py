"""Tiny deterministic checkpoints by family, format and sharding, in the layouts that real producers write.

Nothing here imports the packages under test. Weights are random codes, so a decoder can be held against them;
scales are positive and of ordinary size.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


class RawTensor(NamedTuple):
    """A safetensors dtype code and an array of the same element width (BF16 as uint16, F8 as uint8)."""

    dtype: str
    array: Array


Tensors = dict[str, RawTensor]
Edit = Callable[[Tensors, dict[str, Any]], None]

CT_METHOD = "compressed-tensors"
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)

# model_type: parent module, hub names of gate, up and down, config field of E, config field of I, dense first
# layers
_FAMILIES: dict[str, tuple[str, tuple[str, str, str], str, str, int]] = {
    "mixtral": ("block_sparse_moe", ("w1", "w3", "w2"), "num_local_experts", "intermediate_size", 0),
    "qwen2_moe": ("mlp", ("gate_proj", "up_proj", "down_proj"), "num_experts", "moe_intermediate_size", 0),
    "qwen3_moe": ("mlp", ("gate_proj", "up_proj", "down_proj"), "num_experts", "moe_intermediate_size", 0),
    "deepseek_v2": (
        "mlp",
        ("gate_proj", "up_proj", "down_proj"),
        "n_routed_experts",
        "moe_intermediate_size",
        1,
    ),
    "deepseek_v3": (
        "mlp",
        ("gate_proj", "up_proj", "down_proj"),
        "n_routed_experts",
        "moe_intermediate_size",
        1,
    ),
    "glm4_moe": (
        "mlp",
        ("gate_proj", "up_proj", "down_proj"),
        "n_routed_experts",
        "moe_intermediate_size",
        1,
    ),
    "gpt_oss": ("mlp", ("gate_proj", "up_proj", "down_proj"), "num_local_experts", "intermediate_size", 0),
}
FAMILIES = tuple(_FAMILIES)


def bf16(values: Array) -> RawTensor:
    """Float32 values cut to bfloat16 (not rounded: the stored bits are the value)."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    return RawTensor("BF16", (bits >> 16).astype(np.uint16))


def floats(values: Array, code: str) -> RawTensor:
    """Float32 values in BF16, F16, F32, or as F8_E8M0 / U8 exponents of the next lower power of two."""
    values = np.asarray(values, dtype=np.float32)
    if code == "BF16":
        return bf16(values)
    if code == "F16":
        return RawTensor(code, values.astype(np.float16))
    if code == "F32":
        return RawTensor(code, values)
    return RawTensor(code, ((values.view(np.uint32) >> 23) & 0xFF).astype(np.uint8))


def pack_words(codes: Array, bits: int) -> Array:
    """Codes `[R, C]` below 2**bits as int32 words `[R, C*bits/32]`, dense, least significant bit first."""
    planes = (codes[..., None].astype(np.uint8) >> np.arange(bits, dtype=np.uint8)) & 1
    packed = np.packbits(planes.reshape(codes.shape[0], -1), axis=1, bitorder="little")
    words: Array = np.pad(packed, ((0, 0), (0, -packed.shape[1] % 4))).view(np.int32)
    return words


def pack_padded_words(codes: Array, bits: int) -> Array:
    """The packing of compressed-tensors before mid-2026: 32 // bits whole codes a word."""
    per_word = 32 // bits
    padded = np.pad(codes.astype(np.uint32), ((0, 0), (0, -codes.shape[1] % per_word)))
    words = padded.reshape(codes.shape[0], -1, per_word) << (np.arange(per_word, dtype=np.uint32) * bits)
    packed: Array = words.sum(axis=2, dtype=np.uint32).view(np.int32)
    return packed


def pack_awq(codes: Array) -> Array:
    """4 bit codes `[R, N]` as int32 words `[R, N/8]`, AWQ's nibble order."""
    ordered = codes.reshape(codes.shape[0], -1, 8)[..., list(_AWQ_ORDER)].astype(np.uint32)
    nibbles = ordered << (np.arange(8, dtype=np.uint32) * 4)
    words: Array = nibbles.sum(axis=2, dtype=np.uint32).view(np.int32)
    return words


def write_safetensors(
    path: Path, tensors: Mapping[str, RawTensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Write one file, tensors in the given order."""
    header: dict[str, Any] = {"__metadata__": dict(metadata or {"format": "pt"})}
    offset = 0
    for name, tensor in tensors.items():
        end = offset + tensor.array.nbytes
        header[name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.array.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors.values():
            file.write(np.ascontiguousarray(tensor.array).tobytes())


def make_checkpoint(
    path: Path,
    family: str = "qwen3_moe",
    format: str = "fp8_block",
    *,
    layers: int = 2,
    experts: int = 4,
    hidden: int = 256,
    intermediate: int = 256,
    shards: int = 1,
    seed: int = 0,
    edit: Edit | None = None,
    **options: Any,  # noqa: ANN401 - format options, documented below
) -> Path:
    """Write a model folder at `path` and return it.

    `format`: bf16, fp8_tensor, fp8_block, mxfp4_gpt_oss, ct_mxfp4, awq, awq_sym,
    ct_int{2..8}[_asym][_channel], ct_w8a8[_asym], ct_fp8_tensor, ct_fp8_channel, ct_fp8_block, ct_nvfp4.
    Options: `group_size`, `block` (pair), `scale_dtype` (code), `static` (with input scales), `bias`, `names`
    ("hub" or "linear": gate_proj/up_proj/down_proj), `dtype` (config's), `padded` (old packing of odd
    widths), `side_files`. `edit` may change tensors and config before they are written. With several shards
    tensors go round robin, so companions lie in different files.
    """
    rng = np.random.default_rng(seed)
    sizes = _Sizes(layers, experts, hidden, intermediate)
    tensors = _other_tensors(family, sizes, rng)
    writer = ExpertsWriter(format, rng, options)
    for layer in range(_FAMILIES[family][4], layers):
        tensors |= _layer_tensors(family, layer, sizes, writer)
    config = _config(family, sizes, writer, options)
    if edit is not None:
        edit(tensors, config)
    path.mkdir(parents=True, exist_ok=True)
    write_shards(path, tensors, shards)
    (path / "config.json").write_text(json.dumps(config, indent=1))
    if options.get("side_files", True):
        (path / "generation_config.json").write_text('{"eos_token_id": 2}')
        (path / "tokenizer.json").write_text('{"version": "1.0"}')
    return path


class _Sizes(NamedTuple):
    layers: int
    experts: int
    hidden: int
    intermediate: int


def write_shards(path: Path, tensors: Tensors, shards: int) -> None:
    if shards == 1:
        write_safetensors(path / "model.safetensors", tensors)
        return
    names = [f"model-{i + 1:05d}-of-{shards:05d}.safetensors" for i in range(shards)]
    weight_map = {name: names[i % shards] for i, name in enumerate(tensors)}
    for file in names:
        write_safetensors(path / file, {name: tensors[name] for name in tensors if weight_map[name] == file})
    total = sum(tensor.array.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


def _config(family: str, sizes: _Sizes, writer: ExpertsWriter, options: dict[str, Any]) -> dict[str, Any]:
    _, _, experts_field, intermediate_field, dense = _FAMILIES[family]
    config: dict[str, Any] = {
        "architectures": ["TinyForCausalLM"],
        "model_type": family,
        "dtype": options.get("dtype", "float16" if writer.format.startswith("awq") else "bfloat16"),
        "hidden_act": "silu",
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.intermediate,
        "num_hidden_layers": sizes.layers,
        "num_experts_per_tok": 2,
        "vocab_size": 32,
    }
    config[experts_field] = sizes.experts
    config[intermediate_field] = sizes.intermediate
    if dense:
        config |= {"first_k_dense_replace": dense, "moe_layer_freq": 1, "n_shared_experts": 1}
    quantization = writer.config()
    if quantization is not None:
        config["quantization_config"] = quantization
    return config


def _other_tensors(family: str, sizes: _Sizes, rng: np.random.Generator) -> Tensors:
    """Everything but routed experts: embeddings, attention, norms, routers, dense and shared experts."""

    def plain(*shape: int) -> RawTensor:
        return bf16(rng.standard_normal(shape, dtype=np.float32) * 0.02)

    parent, names, _, _, dense = _FAMILIES[family]
    router = "router" if family == "gpt_oss" else "gate"
    tensors: Tensors = {"model.embed_tokens.weight": plain(32, sizes.hidden)}
    for layer in range(sizes.layers):
        head = f"model.layers.{layer}"
        tensors[f"{head}.self_attn.q_proj.weight"] = plain(16, sizes.hidden)
        tensors[f"{head}.input_layernorm.weight"] = plain(sizes.hidden)
        if layer < dense:
            for name in names:
                tensors[f"{head}.mlp.{name}.weight"] = plain(16, 16)
            continue
        tensors[f"{head}.{parent}.{router}.weight"] = plain(sizes.experts, sizes.hidden)
        if family in ("deepseek_v3", "glm4_moe"):
            correction = RawTensor("F32", rng.standard_normal(sizes.experts, dtype=np.float32))
            tensors[f"{head}.mlp.gate.e_score_correction_bias"] = correction
        shared = {"qwen2_moe": "shared_expert", "deepseek_v2": "shared_experts"}
        shared |= {"deepseek_v3": "shared_experts", "glm4_moe": "shared_experts"}
        if family in shared:
            for name in names:
                tensors[f"{head}.mlp.{shared[family]}.{name}.weight"] = plain(16, 16)
    tensors["model.norm.weight"] = plain(sizes.hidden)
    tensors["lm_head.weight"] = plain(32, sizes.hidden)
    return tensors


def _layer_tensors(family: str, layer: int, sizes: _Sizes, writer: ExpertsWriter) -> Tensors:
    parent, hub, _, _, _ = _FAMILIES[family]
    linear = writer.options.get("names") == "linear"
    names = ("gate_proj", "up_proj", "down_proj") if linear else hub
    head = f"model.layers.{layer}.{parent}.experts"
    if writer.format == "mxfp4_gpt_oss":
        return writer.fused(head, sizes)
    tensors: Tensors = {}
    for expert in range(sizes.experts):
        for index, name in enumerate(names):
            n, k = (sizes.hidden, sizes.intermediate) if index == 2 else (sizes.intermediate, sizes.hidden)
            for parameter, tensor in writer.projection(n, k).items():
                tensors[f"{head}.{expert}.{name}.{parameter}"] = tensor
    return tensors


class ExpertsWriter:
    """Writes the tensors of one projection, and the quantization config that goes with them."""

    def __init__(self, format: str, rng: np.random.Generator, options: dict[str, Any]) -> None:
        self.format = format
        self.options = options
        self._rng = rng
        integer = re.fullmatch(r"ct_int([2-8])(_asym)?(_channel)?", format)
        self._bits = int(integer[1]) if integer else 4
        self._symmetric = not format.endswith("_asym") and not (integer and integer[2])
        self._channel = bool(integer and integer[3])
        default = {"ct_nvfp4": 16, "ct_mxfp4": 32}.get(format, 128)
        self._group = int(options.get("group_size", default))
        self._block = tuple(options.get("block", (128, 128)))

    def projection(self, n: int, k: int) -> dict[str, RawTensor]:
        """Parameters of one [n, k] projection of one expert."""
        makers: dict[str, Callable[[int, int], dict[str, RawTensor]]] = {
            "bf16": self._bf16,
            "fp8_tensor": self._fp8,
            "fp8_block": self._fp8,
            "ct_fp8_tensor": self._fp8,
            "ct_fp8_channel": self._fp8,
            "ct_fp8_block": self._fp8,
            "ct_mxfp4": self._mxfp4,
            "ct_nvfp4": self._nvfp4,
            "awq": self._awq,
            "awq_sym": self._awq,
            "ct_w8a8": self._int8,
            "ct_w8a8_asym": self._int8,
        }
        found = makers[self.format](n, k) if self.format in makers else self._packed(n, k)
        if self.options.get("bias"):
            found["bias"] = bf16(self._rng.standard_normal(n, dtype=np.float32))
        return found

    def _scale(self, *shape: int, default: str = "BF16") -> RawTensor:
        values = self._rng.uniform(0.001, 0.02, shape).astype(np.float32)
        return floats(values, self.options.get("scale_dtype", default))

    def _codes(self, shape: tuple[int, ...], bits: int) -> Array:
        return self._rng.integers(0, 1 << bits, shape, dtype=np.uint8)

    def _fp8_codes(self, shape: tuple[int, ...]) -> Array:
        codes = self._codes(shape, 8)
        return np.where((codes & 0x7F) == 0x7F, codes & 0x80, codes).astype(np.uint8)  # no NaN

    def _bf16(self, n: int, k: int) -> dict[str, RawTensor]:
        return {"weight": bf16(self._rng.standard_normal((n, k), dtype=np.float32))}

    def _fp8(self, n: int, k: int) -> dict[str, RawTensor]:
        found = {"weight": RawTensor("F8_E4M3", self._fp8_codes((n, k)))}
        if self.format.endswith("block"):
            blocks = (-(-n // self._block[0]), -(-k // self._block[1]))
            name = "weight_scale_inv" if self.format == "fp8_block" else "weight_scale"
            found[name] = self._scale(*blocks, default="F32" if self.format == "fp8_block" else "BF16")
        elif self.format == "ct_fp8_channel":
            found["weight_scale"] = self._scale(n, 1)
        else:
            shape: tuple[int, ...] = () if self.format == "fp8_tensor" else (1,)
            found["weight_scale"] = self._scale(*shape, default="F32" if shape == () else "BF16")
            if self.options.get("static", False):
                found["input_scale"] = self._scale(*shape, default="F32" if shape == () else "BF16")
        return found

    def _mxfp4(self, n: int, k: int) -> dict[str, RawTensor]:
        return {
            "weight_packed": RawTensor("U8", self._codes((n, k // 2), 8)),
            "weight_scale": RawTensor("U8", self._rng.integers(114, 126, (n, k // 32), dtype=np.uint8)),
        }

    def _nvfp4(self, n: int, k: int) -> dict[str, RawTensor]:
        found = {
            "weight_packed": RawTensor("U8", self._codes((n, k // 2), 8)),
            "weight_scale": RawTensor(
                "F8_E4M3", self._rng.integers(0x20, 0x7E, (n, k // 16), dtype=np.uint8)
            ),
            "weight_global_scale": floats(self._rng.uniform(100, 2000, (1,)), "F32"),
        }
        if self.options.get("static", True):
            found["input_global_scale"] = floats(self._rng.uniform(1, 20, (1,)), "F32")
        return found

    def _awq(self, n: int, k: int) -> dict[str, RawTensor]:
        groups = k // self._group
        zeros = self._codes((groups, n), 4) if self.format == "awq" else np.full((groups, n), 8, np.uint8)
        return {
            "qweight": RawTensor("I32", pack_awq(self._codes((k, n), 4))),
            "qzeros": RawTensor("I32", pack_awq(zeros)),
            "scales": self._scale(groups, n, default="F16"),
        }

    def _packed(self, n: int, k: int) -> dict[str, RawTensor]:
        pack = pack_padded_words if self.options.get("padded") else pack_words
        groups = 1 if self._channel else k // self._group
        found = {
            "weight_packed": RawTensor("I32", pack(self._codes((n, k), self._bits), self._bits)),
            "weight_scale": self._scale(n, groups),
            "weight_shape": RawTensor("I64", np.array([n, k], dtype=np.int64)),
        }
        if not self._symmetric:
            zeros = pack_words(self._codes((groups, n), self._bits), self._bits).T
            found["weight_zero_point"] = RawTensor("I32", np.ascontiguousarray(zeros))
        return found

    def _int8(self, n: int, k: int) -> dict[str, RawTensor]:
        found = {
            "weight": RawTensor("I8", self._codes((n, k), 8).view(np.int8)),
            "weight_scale": self._scale(n, 1),
        }
        if not self._symmetric:
            found["weight_zero_point"] = RawTensor("I8", self._codes((n, 1), 8).view(np.int8))
        return found

    def fused(self, head: str, sizes: _Sizes) -> Tensors:
        """The two fused projections of gpt-oss, gate and up rows alternating."""
        tensors: Tensors = {}
        rows = {
            "gate_up_proj": (2 * sizes.intermediate, sizes.hidden),
            "down_proj": (sizes.hidden, sizes.intermediate),
        }
        for name, (n, k) in rows.items():
            shape = (sizes.experts, n, k // 32)
            tensors[f"{head}.{name}_blocks"] = RawTensor("U8", self._codes((*shape, 16), 8))
            tensors[f"{head}.{name}_scales"] = RawTensor(
                "U8", self._rng.integers(114, 126, shape, dtype=np.uint8)
            )
            tensors[f"{head}.{name}_bias"] = bf16(
                self._rng.standard_normal((sizes.experts, n), dtype=np.float32)
            )
        return tensors

    def config(self) -> dict[str, Any] | None:
        """The quantization section of config.json."""
        if self.format == "bf16":
            return None
        if self.format == "mxfp4_gpt_oss":
            return {
                "quant_method": "mxfp4",
                "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"],
            }
        if self.format == "fp8_tensor":
            scheme = "static" if self.options.get("static", False) else "dynamic"
            return {"quant_method": "fp8", "activation_scheme": scheme, "ignored_layers": ["lm_head"]}
        if self.format == "fp8_block":
            return {
                "quant_method": "fp8",
                "activation_scheme": "dynamic",
                "fmt": "e4m3",
                "weight_block_size": list(self._block),
                "modules_to_not_convert": ["gate", "lm_head"],
            }
        if self.format.startswith("awq"):
            return {
                "quant_method": "awq",
                "bits": 4,
                "group_size": self._group,
                "zero_point": self.format == "awq",
                "version": "gemm",
                "modules_to_not_convert": ["lm_head"],
            }
        text, weights, inputs = self._ct_group()
        group = {"format": text, "targets": ["Linear"], "weights": weights, "input_activations": inputs}
        return {
            "quant_method": CT_METHOD,
            "format": text,
            "config_groups": {"group_0": group | {"output_activations": None}},
            "ignore": ["lm_head"],
            "quantization_status": "compressed",
            "version": "0.19.0",
        }

    def _ct_group(self) -> tuple[str, dict[str, Any], dict[str, Any] | None]:
        weights: dict[str, Any] = {
            "num_bits": 8,
            "type": "float",
            "strategy": "channel",
            "symmetric": self._symmetric,
            "group_size": None,
            "block_structure": None,
            "actorder": None,
            "dynamic": False,
        }
        token = {
            "num_bits": 8,
            "type": "float",
            "strategy": "token",
            "dynamic": True,
            "symmetric": True,
            "group_size": None,
        }
        if self.format == "ct_fp8_channel":
            return "float-quantized", weights, token
        if self.format == "ct_fp8_block":
            block = {"strategy": "block", "block_structure": list(self._block)}
            return "float-quantized", weights | block, token | {"strategy": "group", "group_size": 128}
        if self.format == "ct_fp8_tensor":
            inputs = token | {"strategy": "tensor", "dynamic": not self.options.get("static", False)}
            return "float-quantized", weights | {"strategy": "tensor"}, inputs
        if self.format in ("ct_w8a8", "ct_w8a8_asym"):
            return "int-quantized", weights | {"type": "int"}, token | {"type": "int"}
        if self.format in ("ct_mxfp4", "ct_nvfp4"):
            is_mx = self.format == "ct_mxfp4"
            weights |= {
                "num_bits": 4,
                "strategy": "group" if is_mx else "tensor_group",
                "group_size": self._group,
            }
            if is_mx:
                return "mxfp4-pack-quantized", weights, None
            local = {"num_bits": 4, "dynamic": "local", "strategy": "tensor_group", "group_size": 16}
            return "nvfp4-pack-quantized", weights, token | local
        weights |= {"num_bits": self._bits, "type": "int"}
        if not self._channel:
            weights |= {"strategy": "group", "group_size": self._group}
        return "pack-quantized", weights, None
