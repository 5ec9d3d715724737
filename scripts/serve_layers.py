"""Layer by layer on the GPU: experts classes against float32, ranks that sum to the whole."""

from __future__ import annotations

import contextlib
import gc
import json
import math
import os
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from tests.support.vllm_layers import parallel_config, routed_experts

from humming_loader.checkpoint import read_manifest
from humming_loader.entries import LayerEntry, Manifest
from scripts.serve_models import MODELS
from scripts.serve_reference import Reference

Result = dict[str, Any]
Cases = dict[str, Callable[[], Result]]
BATCHES = (1, 8, 64, 512)
RANK_TOKENS = 64
TOLERANCE = 2e-2  # of the output's norm: two roundings to 16 bits and the checkpoint's scale rounding
SUM_TOLERANCE = 1e-2
TOP_K = 2


@cache
def quant_config(folder: Path) -> Any:  # noqa: ANN401 - a vLLM quantization config
    """The configuration that vLLM makes for a model folder."""
    from vllm.config import ModelConfig
    from vllm.config.load import LoadConfig
    from vllm.model_executor.model_loader.weight_utils import get_quant_config
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    model = ModelConfig(model=str(folder), tokenizer=str(folder), skip_tokenizer_init=True, max_model_len=64)
    config = get_quant_config(model, LoadConfig())
    config.maybe_update_config(model.model, hf_config=model.hf_config, revision=None)
    return config


@cache
def _vllm_config() -> Any:  # noqa: ANN401 - vLLM's VllmConfig
    from vllm.config import VllmConfig

    return VllmConfig()


@contextlib.contextmanager
def vllm_context() -> Iterator[Any]:
    """A vLLM configuration, a workspace and a forward context, without an engine."""
    from vllm.config import set_current_vllm_config
    from vllm.forward_context import set_forward_context
    from vllm.v1.worker import workspace

    config = _vllm_config()
    with contextlib.suppress(AssertionError):
        workspace.reset_workspace_manager()
    workspace.init_workspace_manager(torch.device("cuda", 0))
    with set_current_vllm_config(config), set_forward_context(None, config):
        yield config


def build(
    folder: Path,
    *,
    process: bool = True,
    tokens: Sequence[int] = (RANK_TOKENS,),
    **options: Any,  # noqa: ANN401 - several types
) -> Any:  # noqa: ANN401 - vLLM's RoutedExperts
    """The first packed layer of `folder` on the GPU, loaded; `tokens`: batch sizes to come; `options` go to
    `routed_experts`.
    """
    manifest = read_manifest(folder)
    name, entry = next(iter(manifest.layers.items()))
    with vllm_context():
        layer = routed_experts(quant_config(folder), **(sizes(name, entry, manifest) | options))
        if process:
            layer.quant_method.process_weights_after_loading(layer)
            compile_only_used(layer.quant_method.moe_kernel.fused_experts, tokens)
    return layer


def compile_only_used(experts: Any, tokens: Sequence[int]) -> None:  # noqa: ANN401 - vLLM's Humming experts
    """Let Humming compile its choice for the batch sizes used here, not for every range of sizes."""
    original = experts.humming_forward
    # vLLM's own estimate of a rank's rows.
    rows = {math.ceil(count * TOP_K * experts.num_experts / experts.global_num_experts) for count in tokens}

    def forward(*args: Any, tuning_config: str, **options: Any) -> Any:  # noqa: ANN401 - vLLM's types
        wanted = [
            [least, most, config]
            for least, most, config in json.loads(tuning_config)
            if any(least < row <= most for row in rows)
        ]
        wanted[0][0] = 0  # Humming looks up one row first, whatever the batch size
        return original(*args, tuning_config=json.dumps(wanted), **options)

    experts.humming_forward = forward


def sizes(name: str, entry: LayerEntry, manifest: Manifest) -> dict[str, Any]:
    """What `routed_experts` needs to know of a layer."""
    return {
        "layer_name": name,
        "experts": entry.num_experts,
        "hidden": entry.hidden_size,
        "intermediate": entry.intermediate_size,
        "dtype": getattr(torch, manifest.param_dtype),
        "device": "cuda:0",
        "activation": "swigluoai" if entry.gate_up == "interleaved" else "silu",
        "has_bias": entry.has_bias,
        "top_k": TOP_K,
    }


def routing(tokens: int, experts: int, seed: int, among: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights float32 and ids int32 `[tokens, TOP_K]`; `among`: only the first so many experts are chosen."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    scores = torch.rand((tokens, among or experts), device="cuda", generator=generator)
    weights, ids = scores.topk(TOP_K, dim=-1)
    return (weights / weights.sum(-1, keepdim=True)).float(), ids.int()


def inputs(tokens: int, hidden: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Hidden states of ordinary size."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return (torch.randn((tokens, hidden), device="cuda", generator=generator) * 0.5).to(dtype)


def forward(layer: Any, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:  # noqa: ANN401
    """The layer's output in float32."""
    with vllm_context(), torch.inference_mode():
        output: torch.Tensor = layer.quant_method.apply(layer, x, weights, ids, None, None)
        return output.float()


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference over the norm of what was expected."""
    return float((found - expected).norm() / expected.norm().clamp_min(1e-30))


def each(cases: Mapping[str, Callable[[], Result]], save: Callable[[Result], None]) -> None:
    """Run cases on their own, one that fails is recorded with its traceback; `save` gets the results after each."""
    results: Result = {}
    for name, case in cases.items():
        try:
            results[name] = case()
        except Exception:
            results[name] = {"ok": False, "traceback": traceback.format_exc()[-3000:]}
        gc.collect()
        torch.cuda.empty_cache()
        is_done = len(results) == len(cases)
        facts: Result = {} if is_done else {"error": f"{len(results)} of {len(cases)} cases ran"}
        save({"ok": is_done and all(result["ok"] for result in results.values()), **facts, "cases": results})


def classes(work: Path, gemm_type: str, *names: str) -> Cases:
    """One experts class on every model against float32, at every batch size."""
    return {name: partial(_class_case, work, name, gemm_type) for name in names or MODELS}


def _class_case(work: Path, name: str, gemm_type: str) -> Result:
    source = work / f"{name}-e8"
    out = Path(f"{source}.out")
    manifest = read_manifest(out)
    layer_name, entry = next(iter(manifest.layers.items()))
    reference = Reference(source, layer_name, "cuda")
    is_batched = gemm_type == "grouped_masked"
    os.environ["VLLM_HUMMING_MOE_GEMM_TYPE"] = "indexed" if is_batched else gemm_type
    layer = build(out, tokens=BATCHES)
    if is_batched:
        _make_batched(layer, entry.num_experts)
    experts = type(layer.quant_method.moe_kernel.fused_experts).__name__
    errors = {}
    for tokens in BATCHES:
        x = inputs(tokens, entry.hidden_size, getattr(torch, manifest.param_dtype), tokens)
        weights, ids = routing(tokens, entry.num_experts, tokens)
        errors[tokens] = relative(forward(layer, x, weights, ids), reference(x, weights, ids))
    return {"ok": all(error < TOLERANCE for error in errors.values()), "class": experts, "relative_error": errors}


def _make_batched(layer: Any, experts: int) -> None:  # noqa: ANN401 - vLLM's RoutedExperts
    """Put the batched class, which vLLM selects only for DeepEP and NIXL, behind vLLM's reference batching."""
    import vllm.model_executor.layers.fused_moe.modular_kernel as mk
    from vllm.model_executor.layers.fused_moe.experts.fused_humming_moe import BatchedHummingGroupedExperts
    from vllm.model_executor.layers.fused_moe.prepare_finalize.batched import BatchedPrepareAndFinalize

    class Unquantized(BatchedPrepareAndFinalize):  # type: ignore[misc]
        def prepare(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - vLLM's types
            arguments = list(args)
            if len(arguments) > 7:
                arguments[7] = False
            kwargs.pop("defer_input_quant", None)
            return super().prepare(*arguments, **kwargs)

    method = layer.quant_method
    limit = max(BATCHES)
    prepare = Unquantized(max_num_tokens=limit, num_local_experts=experts, num_dispatchers=1, rank=0)
    with vllm_context():
        batched = BatchedHummingGroupedExperts(
            moe_config=method.moe, quant_config=method.moe_quant_config, max_num_tokens=limit, num_dispatchers=1
        )
        method.moe_kernel = mk.FusedMoEKernel(prepare, batched)
    compile_only_used(batched, BATCHES)


def expert_ranks(work: Path, *names: str) -> Cases:
    """Layers of every expert-parallel rank sum to the whole layer, with 10 experts."""
    cases: Cases = {}
    for name in names or MODELS:
        for size in (2, 4):
            for placement in ("linear", "round_robin"):
                for among in (None, 2):
                    key = f"{name} ep{size} {placement}{' few' if among else ''}"
                    ranks = [
                        {"parallel": parallel_config(ep=(rank, size)), "placement": placement, "expert_groups": 2}
                        for rank in range(size)
                    ]
                    cases[key] = partial(_sum_of_ranks, work / f"{name}-e10.out", among, ranks)
    return cases


def tensor_ranks(work: Path, *names: str) -> Cases:
    """Layers of every tensor-parallel rank sum to the whole layer."""
    cases: Cases = {}
    for name in names or MODELS:
        for size in (2, 4):
            ranks = [{"parallel": parallel_config(tp=(rank, size))} for rank in range(size)]
            cases[f"{name} tp{size}"] = partial(_sum_of_ranks, work / f"{name}-e8.out", None, ranks)
    return cases


@cache
def _whole(out: Path) -> Any:  # noqa: ANN401 - vLLM's RoutedExperts
    return build(out)


def _sum_of_ranks(out: Path, among: int | None, ranks: list[dict[str, Any]]) -> Result:
    manifest = read_manifest(out)
    entry = next(iter(manifest.layers.values()))
    x = inputs(RANK_TOKENS, entry.hidden_size, getattr(torch, manifest.param_dtype), 3)
    weights, ids = routing(RANK_TOKENS, entry.num_experts, 3, among)
    whole = forward(_whole(out), x, weights, ids)
    total, parts = torch.zeros_like(whole), []
    for options in ranks:
        layer = build(out, **options)
        part = forward(layer, x, weights, ids)
        experts = layer.quant_method.part.experts
        parts.append({"experts": len(experts), "first": experts[:3], "norm": float(part.norm())})
        total += part
    error = relative(total, whole)
    return {"ok": error < SUM_TOLERANCE, "relative_error": error, "ranks": parts}
