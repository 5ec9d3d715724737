"""Which kernels serving a converted checkpoint can ask for: every rank's shapes, every way of grouping, all inputs.

This knows what vLLM 0.33's Humming experts call; which kernels such a call needs is Humming's own choice.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from humming_convert.errors import Problem, UnsupportedError
from humming_convert.host.foreign import Foreign
from humming_convert.host.kernels import KernelHost
from humming_loader.entries import LayerEntry, Manifest
from humming_loader.parts import find_part, layer_names, tp_size_of
from humming_loader.slicing import SublayerSlice, slice_layer

GEMM_TYPES: dict[str, str] = {
    "indexed": "indexed",
    "grouped": "grouped_contiguous",
    "grouped_masked": "grouped_masked",
}
# How vLLM 0.33.0 spells each activation function to Humming; the text becomes part of a kernel's source.
ACTIVATIONS: dict[str, dict[str, str]] = {
    "silu": {"activation_type": "binary_split", "activation_impl": "(a / (1.f + expf(-a))) * b"},
    "swigluoai": {
        "activation_type": "binary_interleaved",
        "activation_impl": "[](float a, float b) {\n"
        "    const float gate = fminf(a, (7.0f));\n"
        "    const float up = fmaxf(fminf(b, (7.0f)), -(7.0f));\n"
        "    const float activated_gate = gate / (1.f + expf(-(1.702f) * gate));\n"
        "    return activated_gate * (up + (1.0f));\n"
        "}(a, b)",
    },
}


@dataclass(frozen=True, slots=True)
class Serving:
    """How a checkpoint may be served: keys of `GEMM_TYPES`, numbers of tensor- and expert-parallel ranks (1: neither),
    and how many experts a token goes to (None: not known).
    """

    gemm_types: tuple[str, ...]
    tp_sizes: tuple[int, ...] = (1,)
    ep_sizes: tuple[int, ...] = ()
    top_k: int | None = None


@dataclass(frozen=True, slots=True)
class RankLayer:
    """What one rank has of a layer: Humming's LayerConfigs, and whether it has a part of the experts only."""

    w13: Foreign
    w2: Foreign
    hadamard: tuple[int | None, int | None]
    activation_function: str
    is_expert_parallel: bool

    def key(self) -> tuple[object, ...]:
        """What tells it from other layers, as far as kernels are concerned."""
        return (self.w13.to_str(), self.w2.to_str(), self.hadamard, self.activation_function, self.is_expert_parallel)


def rank_layers(manifest: Manifest, serving: Serving) -> list[RankLayer]:
    """Every different layer that any rank can have. Raises LoaderError for a number of ranks that cannot be."""
    found: dict[tuple[object, ...], RankLayer] = {}
    for name in layer_names(manifest.layers):
        for rank in _ranks(manifest, name, serving):
            found.setdefault(rank.key(), rank)
    return list(found.values())


def _ranks(manifest: Manifest, name: str, serving: Serving) -> Iterator[RankLayer]:
    for size in serving.tp_sizes:
        for rank in range(size if tp_size_of(manifest.layers) > 1 else 1):  # the ranks of one whole layer are alike
            layer = find_part(manifest, name, rank, size)
            part = slice_layer(name, layer, tp_rank=rank, tp_size=size)
            yield _rank(layer, part.sublayers, layer.num_experts, is_expert_parallel=False)
    for size in serving.ep_sizes:
        layer = find_part(manifest, name, 0, 1)
        if size > layer.num_experts:
            raise UnsupportedError([Problem("--ep", f"at most {layer.num_experts}, the experts", f"{size}")])
        fewest = layer.num_experts // size
        for count in {fewest, fewest + bool(layer.num_experts % size)}:
            part = slice_layer(name, layer, experts=range(count))
            yield _rank(layer, part.sublayers, count, is_expert_parallel=size > 1)


def _rank(
    layer: LayerEntry, parts: Mapping[str, SublayerSlice], num_experts: int, *, is_expert_parallel: bool
) -> RankLayer:
    from humming_loader.humming_host import local_config

    entries = layer.sublayers
    configs = {key: local_config(entries[key].layer_config, parts[key], num_experts) for key in ("w13", "w2")}
    sizes = [entries[key].weight_schema.get("hadamard_block_size") for key in ("w13", "w2")]
    return RankLayer(configs["w13"], configs["w2"], (sizes[0], sizes[1]), layer.activation_function, is_expert_parallel)


def ask(host: KernelHost, layers: list[RankLayer], serving: Serving) -> list[str]:
    """Let Humming choose kernels for all of `layers`; what could not be asked for, in words.

    Raises UnsupportedError for a layer that Humming has no kernels for.
    """
    notes: dict[str, None] = {}
    for layer in layers:
        for name in serving.gemm_types:
            for config in (layer.w13, layer.w2):
                host.ask_gemm(config.to_str(), GEMM_TYPES[name])
            for config, problem in _inputs(layer, name, serving, notes):
                host.ask_process_input(problem, config)
    return list(notes)


def _inputs(
    layer: RankLayer, gemm_type: str, serving: Serving, notes: dict[str, None]
) -> Iterator[tuple[Foreign, dict[str, Any]]]:
    """The input preparations of one experts class: of w13, of w2 without (load_layer) and with the activation."""
    layout = "grouped_mask" if gemm_type == "grouped_masked" else "normal"
    first, second = (
        _problem(config, hadamard) for config, hadamard in zip((layer.w13, layer.w2), layer.hadamard, strict=True)
    )
    for config, problem in ((layer.w13, first), (layer.w2, second)):
        if problem["quant_mode"] != "none" or (problem["hadamard_block_size"] or 1) > 1:
            yield config, problem | {"layout": layout}
    if gemm_type == "grouped":  # rows go to their experts while they are prepared
        if serving.top_k is None:
            notes["grouped: the kernel that scatters rows needs --top-k, the experts of a token"] = None
        else:
            yield layer.w13, first | {"layout": "scatter", "scatter_width": serving.top_k}
    activation = ACTIVATIONS.get(layer.activation_function)
    if activation is None:
        notes[f"activation {layer.activation_function}: its kernel is compiled where the checkpoint is served"] = None
        return
    yield layer.w2, second | activation | {"layout": layout}
    if gemm_type == "indexed" and layer.is_expert_parallel:  # many rows of which some are other ranks'
        yield layer.w2, second | activation | {"layout": "scatter", "scatter_width": 1}


def _problem(config: Foreign, hadamard: int | None) -> dict[str, Any]:
    """The fields of Humming's ProcessInputProblemConfig that a LayerConfig decides."""
    is_quantized = config.input_quant_mode.should_quantize
    return {
        "input_dtype": config.c_dtype,
        "hidden_size": config.shape_k - config.pad_shape_k,
        "quant_mode": config.input_quant_mode.value if is_quantized else "none",
        "quant_dtype": config.a_dtype if is_quantized else None,
        "quant_group_size": (config.input_scale_group_size or None) if is_quantized else None,
        "group_scale_dtype": config.as_dtype if is_quantized else None,
        "hadamard_block_size": hadamard,
    }
