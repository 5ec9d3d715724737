"""vLLM's routed-experts module for any rank, without a process group or a model around it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from humming_loader.checkpoint import read_manifest
from humming_loader.parts import layer_names, whole_intermediate_size


def parallel_config(*, tp: tuple[int, int] = (0, 1), ep: tuple[int, int] = (0, 1), batched: bool = False) -> Any:  # noqa: ANN401 - vLLM's FusedMoEParallelConfig
    """vLLM's parallel configuration of one rank; `tp` and `ep` are (rank, size). `batched`: as DeepEP's low latency."""
    from vllm.model_executor.layers.fused_moe.config import FusedMoEParallelConfig

    return FusedMoEParallelConfig(
        tp_size=tp[1],
        tp_rank=tp[0],
        pcp_size=1,
        pcp_rank=0,
        dp_size=1,
        dp_rank=0,
        ep_size=ep[1],
        ep_rank=ep[0],
        sp_size=1,
        use_ep=ep[1] > 1,
        all2all_backend="deepep_low_latency" if batched else "allgather_reducescatter",
        enable_eplb=False,
    )


def routed_experts(
    quant_config: Any,  # noqa: ANN401 - a vLLM quantization config
    *,
    layer_name: str,
    experts: int,
    hidden: int,
    intermediate: int,
    dtype: torch.dtype,
    device: str,
    parallel: Any = None,  # noqa: ANN401 - vLLM's FusedMoEParallelConfig
    placement: str = "linear",
    redundant: int = 0,
    expert_groups: int | None = None,
    activation: str = "silu",
    has_bias: bool = False,
    top_k: int = 2,
    routed_experts_cls: Any = None,  # noqa: ANN401 - a subclass of RoutedExperts
    **config: Any,  # noqa: ANN401 - fields of FusedMoEConfig
) -> Any:  # noqa: ANN401 - vLLM's RoutedExperts
    """The module as vLLM's factory builds it, for `experts` logical experts."""
    from vllm.model_executor.layers.fused_moe import RoutedExperts
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, RoutingMethodType
    from vllm.model_executor.layers.fused_moe.expert_map_manager import ExpertMapManager

    parallel = parallel or parallel_config()
    # vLLM builds layers, and with them the map of experts, under the device that they run on.
    with torch.device(device):
        manager = ExpertMapManager(
            max_num_batched_tokens=1024,
            top_k=top_k,
            global_num_experts=experts + redundant,
            num_redundant_experts=redundant,
            num_expert_group=expert_groups,
            moe_parallel_config=parallel,
            placement_strategy=placement,
            enable_eplb=redundant > 0,
        )
    moe = FusedMoEConfig(
        num_experts=experts + redundant,
        experts_per_token=top_k,
        hidden_dim=hidden,
        intermediate_size=intermediate,
        num_local_experts=manager.local_num_experts,
        num_logical_experts=experts,
        activation=MoEActivation(activation),
        device=torch.device(device),
        routing_method=RoutingMethodType.Renormalize,
        moe_parallel_config=parallel,
        in_dtype=dtype,
        has_bias=has_bias,
        **config,
    )
    with torch.device(device):
        return (routed_experts_cls or RoutedExperts)(layer_name, dtype, moe, quant_config, expert_map_manager=manager)


def model_config(serving: SimpleNamespace, folder: Path, **options: Any) -> Any:  # noqa: ANN401 - vLLM's types
    """vLLM's ModelConfig of a folder."""
    return serving.config.ModelConfig(
        model=str(folder), tokenizer=str(folder), skip_tokenizer_init=True, max_model_len=64, **options
    )


def quant_config(serving: SimpleNamespace, folder: Path) -> Any:  # noqa: ANN401 - vLLM's types
    """The quantization configuration that vLLM makes for a folder, as VllmConfig does."""
    model = model_config(serving, folder)
    config = serving.weights.get_quant_config(model, serving.load.LoadConfig())
    config.maybe_update_config(model.model, hf_config=model.hf_config, revision=model.revision)
    return config


def layer_of(config: Any, folder: Path, **options: Any) -> Any:  # noqa: ANN401 - vLLM's types
    """The first packed layer as vLLM builds it, on the CPU."""
    manifest = read_manifest(folder)
    name, entry = layer_names(manifest.layers)[0], next(iter(manifest.layers.values()))
    given: dict[str, Any] = {
        "layer_name": name,
        "experts": entry.num_experts,
        "hidden": entry.hidden_size,
        "intermediate": whole_intermediate_size(entry),
        "dtype": getattr(torch, manifest.param_dtype),
        "device": "cpu",
        "activation": "swigluoai" if entry.gate_up == "interleaved" else "silu",
        "has_bias": entry.has_bias,
    }
    return routed_experts(config, **(given | options))
