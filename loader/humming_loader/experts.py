"""vLLM's method of a routed-experts layer whose weights are packed already: nothing is converted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from humming_loader import humming_host, vllm_compat
from humming_loader.entries import LayerEntry, Manifest
from humming_loader.errors import ServingError
from humming_loader.host_layout import check_flags, check_host
from humming_loader.layer import moves_of
from humming_loader.load import empty_target, fill
from humming_loader.parts import find_part, whole_intermediate_size
from humming_loader.slicing import LayerSlice, local_intermediate_size, slice_layer
from humming_loader.vllm_compat import FusedMoEMethodBase

# vLLM's own gpt-oss method passes these whatever the model's config says.
_SWIGLUOAI = {"gemm1_alpha": 1.702, "gemm1_beta": 1.0, "gemm1_clamp_limit": 7.0}


class RefusingLoader:
    """The `weight_loader` of packed parameters: nothing but the experts files may fill them."""

    def __init__(self, layer_name: str) -> None:
        self._layer_name = layer_name

    def __call__(self, *_args: object, **_kwargs: object) -> bool:
        """Raises ServingError: a tensor of the checkpoint was meant for a packed parameter."""
        raise ServingError(self._layer_name, "packed experts, read from humming/", "a checkpoint tensor for them")

    @property
    def __name__(self) -> str:
        """Asked for only when vLLM prepares to load weights into a running model. Raises ServingError."""
        raise ServingError(
            self._layer_name, "packed experts, which stay as they were loaded", "a reload of weights; start again"
        )


class PrepackedHummingMoEMethod(FusedMoEMethodBase):  # type: ignore[misc]
    """Registers packed parameters in their final shapes, fills them by byte ranges, and runs vLLM's Humming experts."""

    def __init__(self, layer: Any, folder: Path, manifest: Manifest, stored_name: str) -> None:  # noqa: ANN401
        """Check everything that can be checked before a byte is read. Raises the family of LoaderError."""
        super().__init__(layer.moe_config)
        self.layer_name = str(layer.layer_name)
        self.folder = folder
        parallel = layer.moe_config.moe_parallel_config
        self.entry = find_part(manifest, stored_name, parallel.tp_rank, parallel.tp_size)
        self.is_dummy = vllm_compat.load_format() == "dummy"
        self.part: LayerSlice | None = None
        self.humming_configs: dict[str, Any] = {}
        self.processed = False
        check_layer(self.layer_name, self.entry, manifest, self.moe)
        check_device(self.layer_name, self.entry, manifest)
        self.local_size = local_intermediate_size(stored_name, self.entry, parallel.tp_size)
        self.experts_cls = select_experts(self.layer_name, self.entry, self.moe)

    def maybe_roundup_sizes(
        self,
        hidden_size: int,
        intermediate_size_per_partition: int,
        act_dtype: torch.dtype,
        moe_parallel_config: Any,  # noqa: ANN401
    ) -> tuple[int, int]:
        """The hidden size as packed and the rank's part of the intermediate size. Raises ServingError."""
        hidden, _ = super().maybe_roundup_sizes(
            hidden_size, intermediate_size_per_partition, act_dtype, moe_parallel_config
        )
        if hidden != self.entry.hidden_size:
            found = f"{hidden}, rounded up for the all-to-all backend {moe_parallel_config.all2all_backend}"
            raise ServingError(self.layer_name, f"a hidden size of {self.entry.hidden_size}, as packed", found)
        return hidden, self.local_size

    def create_weights(
        self,
        layer: Any,  # noqa: ANN401 - vLLM's RoutedExperts
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,  # noqa: ANN401 - vLLM's signature
    ) -> None:
        """Register `{w13,w2}_*` as they will be used; the current default device is the model's."""
        if layer.apply_router_weight_on_input:
            raise ServingError(self.layer_name, "router weights applied to the output", "apply_router_weight_on_input")
        parallel = self.moe.moe_parallel_config
        experts = logical_experts(layer, self.entry.num_experts)
        self.part = slice_layer(
            self.layer_name, self.entry, tp_rank=parallel.tp_rank, tp_size=parallel.tp_size, experts=experts
        )
        if len(experts) != num_experts:
            raise ServingError(self.layer_name, f"{num_experts} local experts", f"{len(experts)} in the expert map")
        loader = RefusingLoader(self.layer_name)
        for name, sublayer in self.part.sublayers.items():
            for key, piece in sublayer.tensors.items():
                tensor = empty_target(piece, torch.get_default_device())
                parameter = torch.nn.Parameter(tensor, requires_grad=False)
                parameter.weight_loader = loader  # type: ignore[attr-defined]
                layer.register_parameter(f"{name}_{key}", parameter)

    def process_weights_after_loading(self, layer: Any) -> None:  # noqa: ANN401 - vLLM's RoutedExperts
        """Fill the parameters from the experts files (not for load_format=dummy), then build vLLM's kernel."""
        if self.processed:
            return
        if self.part is None:
            raise ServingError(self.layer_name, "create_weights before process_weights_after_loading", "none")
        if not self.is_dummy:
            fill(self.folder, moves_of(self.part, _targets(layer, self.part)))
        layer.weight_schemas = {}
        layer.input_schemas = {}
        for name, sublayer in self.part.sublayers.items():
            entry = self.entry.sublayers[name]
            layer.weight_schemas[name] = humming_host.weight_schema(entry.weight_schema)
            layer.input_schemas[name] = humming_host.input_schema(entry.input_schema)
            self.humming_configs[name] = humming_host.local_config(entry.layer_config, sublayer, len(self.part.experts))
        layer.humming_configs = self.humming_configs
        self.moe_quant_config = self.get_fused_moe_quant_config(layer)
        self.moe_kernel = vllm_compat.make_humming_moe_kernel(
            self.moe_quant_config, self.moe, self.experts_cls, routing_tables=layer._expert_routing_tables()
        )
        self.processed = True

    def get_fused_moe_quant_config(self, layer: Any) -> Any:  # noqa: ANN401 - vLLM's types
        """vLLM's description of the packed tensors for its experts."""
        limits = {
            "gemm1_alpha": getattr(layer, "swiglu_alpha", None),
            "gemm1_beta": getattr(layer, "swiglu_beta", None),
            "gemm1_clamp_limit": getattr(layer, "swiglu_limit", None),
        }
        is_gpt_oss = layer.activation == vllm_compat.MoEActivation.SWIGLUOAI and not any(limits.values())
        return vllm_compat.get_humming_moe_quant_config(
            layer, self.humming_configs, **(_SWIGLUOAI if is_gpt_oss else limits)
        )

    @property
    def supports_eplb(self) -> bool:
        """Experts can move between ranks when every tensor has an axis of experts."""
        return all("input_scale" not in key for entry in self.entry.sublayers.values() for key in entry.tensors)

    def apply(
        self,
        layer: Any,  # noqa: ANN401 - vLLM's RoutedExperts
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: Any,  # noqa: ANN401 - vLLM's SharedExperts
        shared_experts_input: torch.Tensor | None,
    ) -> Any:  # noqa: ANN401 - vLLM's output
        """Run vLLM's modular kernel on the packed weights."""
        if self.moe_kernel is None:
            raise ServingError(self.layer_name, "loaded weights", "a forward pass before they were")
        return self.moe_kernel.apply(
            hidden_states=x,
            w1=layer.w13_weight,
            w2=layer.w2_weight,
            topk_ids=topk_ids,
            topk_weights=topk_weights,
            activation=layer.activation,
            global_num_experts=layer.global_num_experts,
            expert_map=layer.expert_map,
            apply_router_weight_on_input=layer.apply_router_weight_on_input,
            shared_experts=shared_experts,
            shared_experts_input=shared_experts_input,
        )


def check_layer(layer_name: str, entry: LayerEntry, manifest: Manifest, moe: Any) -> None:  # noqa: ANN401 - FusedMoEConfig
    """Raises ServingError, naming the value, when vLLM's layer is not the one that was packed."""
    if moe.is_lora_enabled:
        raise ServingError(layer_name, "no LoRA", "LoRA is enabled, and Humming's experts do not take adapters")
    dtype = str(moe.in_dtype).removeprefix("torch.")
    if dtype != manifest.param_dtype:
        hint = f"serve with --dtype {manifest.param_dtype}, or convert with --dtype {dtype}"
        raise ServingError(layer_name, f"{manifest.param_dtype} parameters, as packed", f"{dtype}; {hint}")
    wanted: Mapping[str, tuple[object, object]] = {
        "experts": (entry.num_experts, moe.num_logical_experts),
        "hidden size": (entry.hidden_size, moe.hidden_dim),
        "intermediate size": (whole_intermediate_size(entry), moe.intermediate_size),
        "bias": (entry.has_bias, moe.has_bias),
        "gated": (entry.is_gated, moe.activation.is_gated),
        "interleaved gate and up": (
            entry.gate_up == "interleaved",
            moe.activation == vllm_compat.MoEActivation.SWIGLUOAI,
        ),
    }
    for what, (packed, found) in wanted.items():
        if packed != found:
            raise ServingError(layer_name, f"{what} {packed}, as packed", str(found))


def check_device(layer_name: str, entry: LayerEntry, manifest: Manifest) -> None:
    """Raises HostMismatchError when this GPU and its Humming lay weights out otherwise."""
    if not vllm_compat.current_platform.is_cuda():
        raise ServingError(
            layer_name, "a CUDA device, for Humming's kernels", str(vllm_compat.current_platform.device_name)
        )
    host = humming_host.probe_host(torch.device("cuda", torch.cuda.current_device()))
    check_host(manifest, host)
    for name, sublayer in entry.sublayers.items():
        flags = humming_host.resolve_flags(sublayer.layer_config, host.sm)
        check_flags(f"{layer_name}.{name}", manifest, sublayer, flags, host)


def select_experts(layer_name: str, entry: LayerEntry, moe: Any) -> Any:  # noqa: ANN401 - FusedMoEConfig, experts class
    """vLLM's choice among its Humming experts, by the format that the checkpoint had. Raises ServingError."""
    w13 = entry.sublayers["w13"]
    weight = vllm_compat.weight_key(w13.source_schema, moe.in_dtype)
    activation = vllm_compat.activation_key(w13.input_schema, moe.in_dtype)
    found = vllm_compat.select_humming_moe_experts(config=moe, weight_key=weight, activation_key=activation)
    if found is None:
        expected = "a format and a parallel configuration that vLLM's Humming experts take"
        raise ServingError(layer_name, expected, f"weights {weight}, activations {activation}")
    return found


def logical_experts(layer: Any, num_logical: int) -> tuple[int, ...]:  # noqa: ANN401 - vLLM's RoutedExperts
    """The checkpoint's expert in each local slot. Redundant experts repeat the logical ones in order."""
    expert_map = layer._expert_map
    if expert_map is None:
        slots: Sequence[int] = range(layer.global_num_experts)
    else:
        local = {slot: expert for expert, slot in enumerate(expert_map.tolist()) if slot >= 0}
        slots = [local[slot] for slot in range(len(local))]
    return tuple(slot if slot < num_logical else (slot - num_logical) % num_logical for slot in slots)


def _targets(layer: Any, part: LayerSlice) -> dict[str, dict[str, torch.Tensor]]:  # noqa: ANN401 - RoutedExperts
    return {
        name: {key: getattr(layer, f"{name}_{key}").data for key in sublayer.tensors}
        for name, sublayer in part.sublayers.items()
    }
