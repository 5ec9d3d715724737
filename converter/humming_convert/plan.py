"""What will be read and written, as frozen data made from headers alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Step:
    """A pure function of `humming_convert.steps`, by name, that a source tensor passes before stacking."""

    name: str
    args: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class Part:
    """One source tensor and where it goes: its expert (None: it holds all, on axis 0) and stack index.

    `stack` is 0 for gate (or the only projection), 1 for up; a tensor that already holds both has 0.
    """

    source: str
    expert: int | None
    stack: int


@dataclass(frozen=True, slots=True)
class Run:
    """`count` consecutive elements of an axis from `start` on, made up to `width`."""

    start: int
    count: int
    width: int


@dataclass(frozen=True, slots=True)
class Cut:
    """What one tensor-parallel rank has of a stacked tensor: `runs`, one after the other, along `axis`.

    `axis` is one of the per-expert shape, `extent` what the whole tensor has there. What makes a run up to its width
    is `fill`.
    """

    axis: int
    extent: int
    runs: tuple[Run, ...]
    fill: float = 0.0


@dataclass(frozen=True, slots=True)
class StackedTensor:
    """One tensor of a sublayer under the schema's own name, all experts stacked on axis 0.

    `shape` is `(E, ...)`, `dtype` a safetensors code; `axis` is the axis of the per-expert shape along which
    the parts of one expert follow each other (gate first), in order of expert and then of stack. Every part
    passes `steps` first and then has `dtype`. `is_weight` marks the one tensor that is large enough to be
    read in slices of experts. `check` names the rule of `humming_convert.checks` that each part's values, as
    stored, must obey. `is_interleaved` says that an expert's parts take turns along `axis` instead. With `cut`,
    `shape` is a rank's, and everything else is about the whole.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    axis: int
    parts: tuple[Part, ...]
    steps: tuple[Step, ...] = ()
    is_weight: bool = False
    check: str = ""
    is_interleaved: bool = False
    cut: Cut | None = None

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """The shape before a cut."""
        if self.cut is None:
            return self.shape
        return (*self.shape[: self.cut.axis + 1], self.cut.extent, *self.shape[self.cut.axis + 2 :])


@dataclass(frozen=True, slots=True)
class SublayerPlan:
    """w13 (gate and up) or w2 (down) of one MoE layer.

    `shape_n` x `shape_k` is one expert's weight, `shape_n_stacks` its rows by projection. The schemas are
    plain dictionaries that `humming.schema.Base{Weight,Input}Schema.from_config` accepts; `input_schema` is
    what the checkpoint says of its activations (None: 16 bit). `unused` names source tensors that belong to
    the experts but have no place in the kernel layout (weight_shape, g_idx, input scales when activations
    stay 16 bit). `source_schema` is the weight schema as the checkpoint states it; it differs from
    `weight_schema` only where steps change the form of a scale (a block scale expanded to rows), and
    quantization keys must be derived from it. `expected` names unused integer tensors (weight_shape) whose
    values must be these when they are read; `checks` names unused tensors of whole numbers and the rule of
    `humming_convert.packed_checks` that their values must obey (a g_idx in order, zero points in the middle).
    """

    name: str
    shape_n: int
    shape_k: int
    shape_n_stacks: tuple[int, ...]
    has_bias: bool
    format: str
    weight_schema: dict[str, Any]
    input_schema: dict[str, Any] | None
    source_schema: dict[str, Any]
    tensors: tuple[StackedTensor, ...]
    input_tensors: tuple[StackedTensor, ...] = ()
    unused: tuple[str, ...] = ()
    expected: tuple[tuple[str, tuple[int, ...]], ...] = ()
    checks: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPart:
    """Which part of `layer` a rank has: of its `intermediate_size` the values from `begin` to `end`.

    What the rank's own intermediate size is beyond that are weights of zero, with scales of `scale_fill`.
    """

    layer: str
    rank: int
    size: int
    intermediate_size: int
    begin: int
    end: int
    scale_fill: float


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """One MoE layer; `layer_name` is vLLM's (`model.layers.0.mlp.experts`).

    `ranks` are its parts where each tensor-parallel rank is packed for itself: plans of their own, whose `part` says
    which, and whose tensors are cut.
    """

    layer_name: str
    family: str
    num_experts: int
    hidden_size: int
    intermediate_size: int
    activation_function: str
    is_gated: bool
    is_interleaved: bool
    has_bias: bool
    sublayers: tuple[SublayerPlan, ...]
    source_bytes: int
    ranks: tuple[LayerPlan, ...] = ()
    part: RankPart | None = None


@dataclass(frozen=True, slots=True)
class ConversionPlan:
    """The whole conversion: which layers are packed and which tensors are passed through, byte for byte."""

    source: str
    param_dtype: str
    layers: tuple[LayerPlan, ...]
    passthrough: tuple[str, ...]
    notes: tuple[str, ...] = ()
    tp_size: int = 1

    @property
    def packed(self) -> tuple[LayerPlan, ...]:
        """What is packed, in order: the layers, or the parts of each."""
        return tuple(part for layer in self.layers for part in (layer.ranks or (layer,)))
