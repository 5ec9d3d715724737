"""What one rank needs of a packed layer: shapes and byte ranges, or the reason why it cannot be cut so.

Integers only. Tensor parallelism cuts the intermediate size I: w13 along N (gate and up rows each, or both at once
where they alternate), w2 along K. I is cut in whole units, the least size that every tensor of the layer can be cut
at; the rank's part is made up to vLLM's padding with tiles of zeros. Expert parallelism selects experts on axis 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from humming_loader.dtypes import tensor_nbytes
from humming_loader.entries import LayerEntry, SublayerEntry, TensorEntry
from humming_loader.errors import ParallelismError, PreshardedError, RankError
from humming_loader.layout import PAD_K, PAD_N, Axis, Facts, facts_of, k_axis, n_axis

LARGEST_TP = 64


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive tiles of every row that move together: from tile `source` to tile `target`."""

    source: int
    target: int
    count: int


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """A rank's part of one tensor.

    `shape` is the local one, `dtype` a safetensors code. Per expert, `source_bytes` become `target_bytes`: each of
    `rows` rows has `source_tiles` tiles of `tile_bytes` in the file and `target_tiles` here; `segments` move, what
    they leave is the byte `fill`. `has_experts` is False for a tensor that all experts share; `is_zero` means that the
    rank gets zeros (the bias of w2 is added once).
    """

    entry: TensorEntry
    shape: tuple[int, ...]
    rows: int
    source_tiles: int
    target_tiles: int
    tile_bytes: int
    segments: tuple[Segment, ...]
    fill: int = 0
    has_experts: bool = True
    is_zero: bool = False

    @property
    def dtype(self) -> str:
        """The safetensors code, the stored one."""
        return self.entry.dtype

    @property
    def source_bytes(self) -> int:
        """Bytes of one expert (or of the whole tensor without experts) in the file."""
        return self.rows * self.source_tiles * self.tile_bytes

    @property
    def target_bytes(self) -> int:
        """Bytes of one expert at the rank."""
        return self.rows * self.target_tiles * self.tile_bytes

    @property
    def is_whole(self) -> bool:
        """Whether an expert's bytes are taken as they are."""
        return self.segments == (Segment(0, 0, self.source_tiles),) and self.source_tiles == self.target_tiles


@dataclass(frozen=True, slots=True)
class SublayerSlice:
    """A rank's w13 or w2: logical shape, padding, and its tensors by name."""

    shape_n: int
    shape_k: int
    pad_n: int
    pad_k: int
    tensors: Mapping[str, TensorSlice]


@dataclass(frozen=True, slots=True)
class LayerSlice:
    """A rank's part of a layer: `experts` are logical ids in local order, `intermediate_size` the rank's own.

    `is_exact` is False where a choice was made over the whole layer (integer scales, fused E8M0 scales), so that the
    rank's bytes are right but not those of converting its part alone.
    """

    experts: tuple[int, ...]
    intermediate_size: int
    is_exact: bool
    sublayers: Mapping[str, SublayerSlice]


def slice_layer(
    layer_name: str,
    layer: LayerEntry,
    *,
    tp_rank: int = 0,
    tp_size: int = 1,
    experts: Sequence[int] | None = None,
) -> LayerSlice:
    """The part of `layer` for one rank; `experts` are logical ids (None: all), repeats allowed.

    A part that was packed for a rank is that rank's alone. Raises ParallelismError, which names the tensor-parallel
    sizes that work, PreshardedError for a part of another size, RankError for numbers out of range, and ManifestError
    for an entry that contradicts itself.
    """
    chosen = tuple(range(layer.num_experts)) if experts is None else tuple(experts)
    if not 0 <= tp_rank < tp_size:
        raise RankError(layer_name, f"a tensor-parallel rank below {tp_size}", str(tp_rank))
    outside = [expert for expert in chosen if not 0 <= expert < layer.num_experts]
    if outside:
        raise RankError(layer_name, f"experts below {layer.num_experts}", str(outside[0]))
    facts = {name: facts_of(entry) for name, entry in layer.sublayers.items()}
    size = local_intermediate_size(layer_name, layer, tp_size)
    if layer.tensor_parallel is not None:
        if layer.tensor_parallel.rank != tp_rank:
            raise RankError(layer_name, f"rank {layer.tensor_parallel.rank}, whose part this is", str(tp_rank))
        tp_rank, tp_size = 0, 1  # it was cut before it was packed
    begin = min(tp_rank * size, layer.intermediate_size)
    part = range(begin, min(begin + size, layer.intermediate_size))
    sublayers = {}
    for name, entry in layer.sublayers.items():
        if tp_size == 1:
            whole = _whole_sublayer(entry, facts[name])
        elif name == "w13":
            whole = _slice_w13(layer, entry, facts[name], part, size)
        else:
            whole = _slice_w2(entry, facts[name], part, size, is_first=tp_rank == 0)
        sublayers[name] = _with_experts(whole, len(chosen))
    is_exact = tp_size == 1 or all(fact.is_exact for fact in facts.values())
    return LayerSlice(chosen, size, is_exact, sublayers)


def local_intermediate_size(layer_name: str, layer: LayerEntry, tp_size: int) -> int:
    """Every rank's intermediate size at `tp_size`, padding of the last ranks included.

    Raises ParallelismError or, for a part that was packed for ranks of another size, PreshardedError.
    """
    packed = 1 if layer.tensor_parallel is None else layer.tensor_parallel.size
    if packed not in (1, tp_size):
        mend = "humming-convert SRC OUT" + (f" --tp {tp_size}" if tp_size > 1 else "")
        raise PreshardedError(layer_name, packed, tp_size, mend)
    if tp_size in (1, packed):
        return layer.intermediate_size
    reason = _refusal(layer, tp_size)
    if reason:
        can_convert = layer.intermediate_size % tp_size == 0
        raise ParallelismError(layer_name, tp_size, reason, valid_tp_sizes(layer), can_convert=can_convert)
    unit = cut_unit(layer)
    return math.ceil(math.ceil(layer.intermediate_size / unit) / tp_size) * unit


def valid_tp_sizes(layer: LayerEntry, largest: int = LARGEST_TP) -> tuple[int, ...]:
    """The tensor-parallel sizes up to `largest` that this layer can be cut for."""
    return tuple(size for size in range(1, largest + 1) if size == 1 or not _refusal(layer, size))


def cut_unit(layer: LayerEntry) -> int:
    """The values of I that stay together whatever the rank: every tensor can be cut at their multiples."""
    w13, w2 = layer.sublayers["w13"], layer.sublayers["w2"]
    along_n = math.lcm(1, *(axis.tile for axis in _axes(w13, "n").values()))
    if layer.gate_up == "interleaved":
        along_n //= math.gcd(along_n, 2)
    return math.lcm(along_n, *(axis.tile for axis in _axes(w2, "k").values()))


def _axes(entry: SublayerEntry, which: str) -> dict[str, Axis]:
    facts, of = facts_of(entry), n_axis if which == "n" else k_axis
    found = {key: of(key, tensor, facts) for key, tensor in entry.tensors.items()}
    return {key: axis for key, axis in found.items() if axis is not None}


def _refusal(layer: LayerEntry, tp_size: int) -> str:
    """Why `layer` cannot be cut for `tp_size`, or nothing."""
    size, unit = layer.intermediate_size, cut_unit(layer)
    if size % tp_size:
        return f"vLLM needs a size that divides the intermediate size {size}"
    if layer.is_gated and layer.gate_up == "split" and size % _n_unit(layer):
        return f"gate and up rows meet at {size}, not a multiple of {_n_unit(layer)} where packed rows can be cut"
    if all(facts_of(entry).can_pad for entry in layer.sublayers.values()):
        return ""
    if size % (unit * tp_size) or (_stacks(layer) * size // tp_size) % PAD_N or (size // tp_size) % PAD_K:
        return f"a rank's part of {size} must be a multiple of {math.lcm(unit, PAD_K)}: this layout cannot be padded"
    return ""


def _n_unit(layer: LayerEntry) -> int:
    return math.lcm(1, *(axis.tile for axis in _axes(layer.sublayers["w13"], "n").values()))


def _stacks(layer: LayerEntry) -> int:
    return 2 if layer.is_gated else 1


def _slice_w13(layer: LayerEntry, entry: SublayerEntry, facts: Facts, part: range, size: int) -> SublayerSlice:
    shape_n = _stacks(layer) * size
    padded_n = -(-shape_n // PAD_N) * PAD_N
    if layer.is_gated and layer.gate_up == "split":
        stacks = [(part, 0), (range(part.start + layer.intermediate_size, part.stop + layer.intermediate_size), size)]
    else:
        factor = _stacks(layer)
        stacks = [(range(part.start * factor, part.stop * factor), 0)]
    tensors = {}
    for key, tensor in entry.tensors.items():
        axis = n_axis(key, tensor, facts)
        if axis is None:
            tensors[key] = _whole(key, tensor)
        else:
            tensors[key] = _cut(tensor, axis, stacks, padded_n, _n_shape(key, tensor, facts, padded_n))
    return SublayerSlice(shape_n, entry.shape_k, padded_n - shape_n, facts.k - entry.shape_k, tensors)


def _slice_w2(entry: SublayerEntry, facts: Facts, part: range, size: int, *, is_first: bool) -> SublayerSlice:
    padded_k = -(-size // PAD_K) * PAD_K
    tensors = {}
    for key, tensor in entry.tensors.items():
        axis = k_axis(key, tensor, facts)
        if axis is None:
            whole = _whole(key, tensor)
            tensors[key] = replace(whole, is_zero=key == "bias" and not is_first)
        else:
            tensors[key] = _cut(tensor, axis, [(part, 0)], padded_k, _k_shape(key, tensor, facts, padded_k))
    return SublayerSlice(entry.shape_n, size, facts.n - entry.shape_n, padded_k - size, tensors)


def _cut(
    tensor: TensorEntry, axis: Axis, stacks: Sequence[tuple[range, int]], padded: int, shape: tuple[int, ...]
) -> TensorSlice:
    """Move each range of values to its place in a row of `padded` values; its last tile may be part empty."""
    segments = tuple(
        Segment(
            values.start // axis.tile, target // axis.tile, -(-values.stop // axis.tile) - values.start // axis.tile
        )
        for values, target in stacks
        if values
    )
    return TensorSlice(
        entry=tensor,
        shape=shape,
        rows=axis.rows,
        source_tiles=axis.tiles,
        target_tiles=-(-padded // axis.tile),
        tile_bytes=axis.tile_bytes,
        segments=segments,
        fill=axis.fill,
    )


def _n_shape(key: str, tensor: TensorEntry, facts: Facts, padded_n: int) -> tuple[int, ...]:
    is_n_first = key == "weight" and (facts.flags["use_flat_weight"] or facts.flags["use_raw_weight"])
    axis = 1 if is_n_first else len(tensor.shape) - 1
    return _scaled(tensor, axis, padded_n, facts.n)


def _k_shape(key: str, tensor: TensorEntry, facts: Facts, padded_k: int) -> tuple[int, ...]:
    is_n_first = key == "weight" and (facts.flags["use_flat_weight"] or facts.flags["use_raw_weight"])
    return _scaled(tensor, 2 if is_n_first else 1, padded_k, facts.k)


def _scaled(tensor: TensorEntry, axis: int, size: int, whole: int) -> tuple[int, ...]:
    return (*tensor.shape[:axis], -(-tensor.shape[axis] * size // whole), *tensor.shape[axis + 1 :])


def _whole_sublayer(entry: SublayerEntry, facts: Facts) -> SublayerSlice:
    tensors = {key: _whole(key, tensor) for key, tensor in entry.tensors.items()}
    return SublayerSlice(entry.shape_n, entry.shape_k, facts.n - entry.shape_n, facts.k - entry.shape_k, tensors)


def _whole(key: str, tensor: TensorEntry) -> TensorSlice:
    has_experts = key not in ("input_scale", "input_scale_2")
    nbytes = tensor_nbytes(tensor.dtype, tensor.shape, tensor.name) // (tensor.shape[0] if has_experts else 1)
    return TensorSlice(tensor, tensor.shape, 1, 1, 1, nbytes, (Segment(0, 0, 1),), has_experts=has_experts)


def _with_experts(sublayer: SublayerSlice, count: int) -> SublayerSlice:
    tensors = {
        key: replace(tensor, shape=(count, *tensor.shape[1:])) if tensor.has_experts else tensor
        for key, tensor in sublayer.tensors.items()
    }
    return replace(sublayer, tensors=tensors)
