"""A repository as large as a real one that takes no room: headers are real, payloads are holes in sparse files."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path

HIDDEN, INTERMEDIATE, EXPERTS = 2048, 768, 128
_BLOCK = 128

Entry = tuple[str, str, list[int], int]


def write_qwen3(folder: Path, *, layers: int, shards: int) -> int:
    """Qwen3-30B-A3B's shapes in block FP8 with fewer layers, in `shards` files; the bytes of all files together."""
    folder.mkdir()
    entries = list(_entries(layers))
    names = [f"model-{number + 1:05d}-of-{shards:05d}.safetensors" for number in range(shards)]
    per_shard = -(-len(entries) // shards)
    weight_map: dict[str, str] = {}
    for number, name in enumerate(names):
        part = entries[number * per_shard : (number + 1) * per_shard]
        _write(folder / name, part)
        weight_map |= {entry[0]: name for entry in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(_config(layers)))
    (folder / "tokenizer.json").write_text(json.dumps({"version": "1.0", "vocabulary": ["x" * 100] * 10_000}))
    return sum(path.stat().st_size for path in folder.iterdir())


def _entries(layers: int) -> Iterator[Entry]:
    yield _plain("model.embed_tokens.weight", [151936, HIDDEN])
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        for name, rows in (("q_proj", 4096), ("k_proj", 512), ("v_proj", 512)):
            yield _plain(f"{prefix}.self_attn.{name}.weight", [rows, HIDDEN])
        yield _plain(f"{prefix}.self_attn.o_proj.weight", [HIDDEN, 4096])
        yield _plain(f"{prefix}.mlp.gate.weight", [EXPERTS, HIDDEN])
        for expert in range(EXPERTS):
            for name, shape in (
                ("gate_proj", [INTERMEDIATE, HIDDEN]),
                ("up_proj", [INTERMEDIATE, HIDDEN]),
                ("down_proj", [HIDDEN, INTERMEDIATE]),
            ):
                weight = f"{prefix}.mlp.experts.{expert}.{name}.weight"
                yield weight, "F8_E4M3", shape, shape[0] * shape[1]
                blocks = [extent // _BLOCK for extent in shape]
                yield f"{weight}_scale_inv", "F32", blocks, 4 * blocks[0] * blocks[1]
    yield _plain("lm_head.weight", [151936, HIDDEN])


def _plain(name: str, shape: list[int]) -> Entry:
    return name, "BF16", shape, 2 * shape[0] * shape[1]


def _write(path: Path, entries: list[Entry]) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, dtype, shape, size in entries:
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + offset)


def _config(layers: int) -> dict[str, object]:
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": HIDDEN,
        "moe_intermediate_size": INTERMEDIATE,
        "intermediate_size": 6144,
        "num_experts": EXPERTS,
        "num_experts_per_tok": 8,
        "num_hidden_layers": layers,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
        "quantization_config": {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [_BLOCK, _BLOCK],
        },
    }
