"""Tiny models that real vLLM can serve, experts quantized and everything else not: `serve_models.py DIR [NAME ...]`.

Experts come from the tests' generator, in the layouts that real producers write; this adds real configs and the other
tensors. Without NAME all of `MODELS` are written.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.support.checkpoints import Tensors, make_checkpoint

from scripts.serve_families import (
    COMMON_CONFIG,
    FAMILY_CONFIG,
    HIDDEN,
    INTERMEDIATE,
    LAYER_TENSORS,
    LAYERS,
    VOCAB,
    Config,
    Writer,
    add_glm4_mtp,
)


@dataclass(frozen=True, slots=True)
class Model:
    """One model: family and experts' format of the tests' generator, its options, and environment for vLLM."""

    family: str
    format: str
    options: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    dtype: str = "bfloat16"


MODELS: dict[str, Model] = {
    "qwen3-fp8-block": Model("qwen3_moe", "fp8_block"),
    "gpt-oss-mxfp4": Model("gpt_oss", "mxfp4_gpt_oss"),
    "mixtral-awq": Model("mixtral", "awq", {"group_size": 128}, dtype="float16"),
    "qwen3-ct-int4": Model("qwen3_moe", "ct_int4", {"group_size": 128}),
    "qwen3-nvfp4": Model("qwen3_moe", "ct_nvfp4"),
    "deepseek-fp8-block": Model("deepseek_v3", "fp8_block", environment={"VLLM_MLA_DISABLE": "1"}),
    "glm4-ct-int4": Model("glm4_moe", "ct_int4", {"group_size": 128}),
}

# Not in the list that is served by default: FP8 a channel has no groups that forbid a size.
EXTRA_MODELS: dict[str, Model] = {"qwen3-fp8-channel": Model("qwen3_moe", "ct_fp8_channel")}


def _unquantized(tensors: Tensors) -> list[str]:
    """The modules that hold the tensors that are not quantized, and can be."""
    return sorted(name.removesuffix(".weight") for name, tensor in tensors.items() if tensor.array.ndim == 2)


def write_model(folder: Path, name: str, *, experts: int = 8, intermediate: int = INTERMEDIATE) -> Path:
    """Write `MODELS[name]` into `folder` and return it; `experts` routed experts a layer, `intermediate` their I."""
    model = (MODELS | EXTRA_MODELS)[name]

    def edit(tensors: Tensors, config: Config) -> None:
        for key in [key for key in tensors if ".experts." not in key]:
            del tensors[key]
        writer = Writer(model.dtype, seed=1)
        writer.add("model.embed_tokens.weight", VOCAB, HIDDEN, scale=1.0)
        for layer in range(LAYERS):
            head = f"model.layers.{layer}"
            writer.norm(f"{head}.input_layernorm.weight", HIDDEN)
            writer.norm(f"{head}.post_attention_layernorm.weight", HIDDEN)
            LAYER_TENSORS[model.family](writer, head, experts)
        if model.family == "glm4_moe":
            add_glm4_mtp(tensors, writer, experts)
        writer.norm("model.norm.weight", HIDDEN)
        writer.add("lm_head.weight", VOCAB, HIDDEN)
        tensors.update(writer.tensors)
        config.update(COMMON_CONFIG | FAMILY_CONFIG[model.family] | {"torch_dtype": model.dtype, "dtype": model.dtype})
        if model.family == "deepseek_v3":
            del config["head_dim"]
        section = config["quantization_config"]
        ignored = "ignore" if section["quant_method"] == "compressed-tensors" else "modules_to_not_convert"
        section[ignored] = _unquantized(writer.tensors)

    make_checkpoint(
        folder,
        model.family,
        model.format,
        layers=LAYERS,
        experts=experts,
        hidden=HIDDEN,
        intermediate=intermediate,
        seed=7,
        edit=edit,
        side_files=False,
        **model.options,
    )
    (folder / "generation_config.json").write_text(json.dumps({"bos_token_id": 1, "eos_token_id": 2}))
    return folder


def main() -> None:
    """Write the models asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--experts", type=int, default=8)
    options = parser.parse_args()
    for name in options.names or MODELS:
        print(write_model(options.folder / name, name, experts=options.experts))


if __name__ == "__main__":
    main()
