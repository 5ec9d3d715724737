"""A layer with Humming alone, no vLLM: what the README shows, held against float32."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import torch

from humming_loader import HummingExpertsTensors, load_layer, read_manifest
from scripts.serve_layers import TOLERANCE, Cases, Result, inputs, relative, routing
from scripts.serve_reference import Reference

# Group scales, second scales, zero points; not gpt-oss, whose gate and up alternate.
NAMES = ("qwen3-fp8-block", "qwen3-nvfp4", "mixtral-awq")


def alone(work: Path) -> Cases:
    """A layer with Humming alone, no vLLM, from `load_layer`; against float32."""
    return {name: partial(_alone_case, work, name) for name in NAMES}


def _alone_case(work: Path, name: str) -> Result:
    source = work / f"{name}-e8"
    out = Path(f"{source}.out")
    manifest = read_manifest(out)
    layer_name, entry = next(iter(manifest.layers.items()))
    layer = load_layer(out, layer_name, "cuda:0")
    x = inputs(64, entry.hidden_size, getattr(torch, manifest.param_dtype), 5)
    weights, ids = routing(64, entry.num_experts, 5)
    error = relative(humming_moe(layer, x, weights, ids), Reference(source, layer_name, "cuda")(x, weights, ids))
    without_vllm = "vllm" not in sys.modules
    return {"ok": error < TOLERANCE and without_vllm, "relative_error": error, "without_vllm": without_vllm}


def humming_moe(
    layer: HummingExpertsTensors, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor
) -> torch.Tensor:
    """SwiGLU experts: hidden states `[B, H]`, weights and expert ids `[B, top_k]`; float32 `[B, H]`.

    Rows are sorted by expert; `expert_layout` says where each expert's begin, `locks` is scratch of the kernels.
    """
    from humming.forward import humming_forward

    top_k = ids.shape[1]
    order = ids.flatten().argsort(stable=True)
    counts = ids.flatten().bincount(minlength=len(layer.part.experts))
    common = {
        "compute_config": {"gemm_type": "grouped_contiguous"},
        "expert_layout": torch.nn.functional.pad(counts.cumsum(0), (1, 0)),
        "valid_shape_m": ids.numel(),
        "locks": torch.zeros(4096, dtype=torch.int32, device=x.device),
    }
    rows = x[order // top_k]
    gate, up = humming_forward(inputs=rows, **layer.w13.forward_arguments(), **common).chunk(2, -1)
    hidden = (torch.nn.functional.silu(gate.float()) * up.float()).to(x.dtype)
    result = humming_forward(inputs=hidden, **layer.w2.forward_arguments(), **common)
    weighted = result.float() * weights.flatten()[order, None]
    return torch.zeros_like(x, dtype=torch.float32).index_add_(0, order // top_k, weighted)
