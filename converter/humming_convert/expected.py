"""What a packed sublayer must decode to, given its source: Humming's roundings and rescalings, done in numpy.

Codes are never rounded, except where fused e8m0 scales change MXFP4 codes. Float scales become the parameter
dtype, rounded to nearest even; e8m0 and FP8 scales stay as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from humming_convert.decode import Decoded, PackedLayout
from humming_convert.decode_source import Codes, Floats, Projection, Raw
from humming_convert.errors import Problem, VerificationError

_INT_SCALE_STEPS = np.float32(1024)
# Binades below the largest scale that stay apart when e8m0 scales are fused into the weights.
_FUSED_RANGE = {"float8e4m3": 11, "int8": 3}
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True, slots=True)
class Expert:
    """One expert: its projections stacked along N. `scale_2` and a scale `(stacks,)` are one of each."""

    codes: Codes
    scale: Raw
    scale_code: str
    zero_point: Codes | None
    scale_2: Floats | None
    bias: Floats | None
    rows: tuple[int, ...]


def stack(projections: Sequence[Projection], *, is_interleaved: bool = False) -> Expert:
    """Gate over up (or the one projection) of one expert; their rows in turns if `is_interleaved`."""
    first = projections[0]

    def joined(parts: Sequence[Raw]) -> Raw:
        if is_interleaved and parts[0].shape[0] > 1:
            return np.stack(parts, axis=1).reshape(-1, *parts[0].shape[1:])
        return np.concatenate(parts)

    def rows(parts: Sequence[Raw | None]) -> Raw | None:
        given = [part for part in parts if part is not None]
        return joined(given) if given else None

    scale = joined([projection.scale for projection in projections])
    twos = [projection.scale_2 for projection in projections if projection.scale_2 is not None]
    return Expert(
        codes=joined([projection.codes for projection in projections]),
        scale=scale,
        scale_code=first.scale_code,
        zero_point=rows([projection.zero_point for projection in projections]),
        scale_2=np.array(twos, np.float32) if twos else None,
        bias=rows([projection.bias for projection in projections]),
        rows=tuple(projection.codes.shape[0] for projection in projections),
    )


def round_to(values: Floats, dtype: str) -> Raw:
    """Float32 values as the bits of `bfloat16` or `float16`, rounded to nearest, ties to even."""
    if dtype == "float16":
        with np.errstate(over="ignore"):
            return values.astype(np.float16).view(np.uint16)
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(values), np.uint32(0x7FC0), rounded).astype(np.uint16)


def widen(bits: Raw, dtype: str) -> Floats:
    """The values of `bfloat16` or `float16` bits."""
    if dtype == "float16":
        return bits.view(np.float16).astype(np.float32)
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def expected(
    layout: PackedLayout, experts: Sequence[Expert], humming_version: str, int_scale_max: float | None = None
) -> Decoded:
    """What `decode` must give for `experts`.

    `int_scale_max` is the largest scale of the whole sublayer in the parameter dtype, needed with integer
    scales. Raises VerificationError when the layout cannot come from this source.
    """
    codes = np.stack([expert.codes for expert in experts])
    zero_point: Codes | None = None
    if layout.has_zero_point:
        zero_point = np.stack([_zero_point(expert, layout) for expert in experts])
    given = [expert.bias for expert in experts if expert.bias is not None]
    bias = np.stack([round_to(values, layout.result.name) for values in given]) if given else None
    if layout.flags["use_fused_e8m0_scale"]:
        exponents = np.stack([expert.scale for expert in experts])
        codes, exponents, factor = _fused(layout, codes, exponents, humming_version)
        return Decoded(codes, exponents, zero_point, factor, bias)
    scale = _scale(layout, experts)
    scale_2 = _scale_2(layout, experts)
    if layout.flags["use_int_weight_scale"]:
        if int_scale_max is None:
            raise VerificationError(
                [Problem("weight_scale", "the largest scale of the sublayer", "none given")]
            )
        step = np.float32(int_scale_max) / _INT_SCALE_STEPS
        steps = np.rint(widen(scale, layout.result.name) / step)
        scale = steps.astype(np.int16).view(np.uint16)
        scale_2 = np.full(len(experts), step, np.float32)
    return Decoded(codes, scale, zero_point, scale_2, bias)


def largest_scale(layout: PackedLayout, experts: Sequence[Expert]) -> float:
    """The largest magnitude among the scales, as they are in the parameter dtype."""
    return float(np.abs(widen(_scale(layout, experts), layout.result.name)).max())


def _zero_point(expert: Expert, layout: PackedLayout) -> Codes:
    if expert.zero_point is None:
        raise VerificationError([Problem("zero_point", "none, as the source has none", "zero points")])
    zero_point: Codes = _regrouped(layout, expert.zero_point)
    return zero_point


def _regrouped(layout: PackedLayout, values: Raw) -> Raw:
    """`(N, G)` with each column repeated for the kernel's own groups. Raises VerificationError if none do."""
    groups = layout.logical_k // layout.group if layout.group else 1
    if groups % values.shape[1]:
        found = f"{values.shape[1]} in the source"
        wanted = f"{groups} scales a row, as layer_config says"
        raise VerificationError([Problem("weight_scale", wanted, found)])
    return values.repeat(groups // values.shape[1], axis=1)


def _scale(layout: PackedLayout, experts: Sequence[Expert]) -> Raw:
    if layout.scale_type == "tensor":
        for expert in experts:
            if expert.scale.ndim != 1 or (expert.scale != expert.scale[0]).any():
                found = "different ones in the source"
                raise VerificationError([Problem("weight_scale", "one scale per expert", found)])
        return np.array([expert.scale[0] for expert in experts], np.float32)
    rows = [_regrouped(layout, _by_rows(expert.scale, expert.rows)) for expert in experts]
    stacked = np.stack(rows)
    if experts[0].scale_code == "F32":
        return round_to(stacked, layout.result.name)
    software = layout.scale.name == "float8e8m0" and not layout.flags["use_block_scaled_mma"]
    if software and layout.result.name == "float16":
        # E8M0 becomes an E5M0 that float16 can hold: 2^-14 to 2^15.
        return (np.clip(stacked.astype(np.int16) - 112, 0, 30) << 3).astype(np.uint8)
    return stacked


def _by_rows(scale: Raw, rows: tuple[int, ...]) -> Raw:
    """`(N, G)`; one scale per projection is repeated for its rows."""
    return scale.repeat(rows)[:, None] if scale.ndim == 1 else scale


def _scale_2(layout: PackedLayout, experts: Sequence[Expert]) -> Raw | None:
    given = [expert.scale_2 for expert in experts if expert.scale_2 is not None]
    if not given:
        return None
    if layout.scale_2_type == "channel":
        return round_to(
            np.stack([two.repeat(expert.rows) for two, expert in zip(given, experts, strict=True)]),
            layout.result.name,
        )
    if layout.scale_2_type != "tensor" or any((two != two[0]).any() for two in given):
        found = f"{layout.scale_2_type}, while the source's differ between projections"
        raise VerificationError([Problem("weight_scale_2", "one second scale per expert or per row", found)])
    return np.array([two[0] for two in given], np.float32)


def _fused(
    layout: PackedLayout, codes: Codes, scale: Codes, humming_version: str
) -> tuple[Codes, Codes, Raw]:
    """MXFP4 for 8-bit activations: scales relative to the largest, smaller blocks rounded to fit."""
    padded = _pad_exponents(layout, scale, humming_version)
    per_row = layout.scale_2_type == "channel"
    view = padded if per_row else padded.reshape(padded.shape[0], 1, -1)
    largest, smallest = view.max(axis=-1, keepdims=True), view.min(axis=-1, keepdims=True)
    floor = largest - np.minimum(largest - smallest, _FUSED_RANGE[layout.activation.name]).astype(np.uint8)
    # Of the padding, only the part in the range of the whole expert counts.
    floor = floor[:, : layout.logical_n]
    raised = np.maximum(scale, floor)
    below = raised - scale
    group = layout.group
    shrunk = _shrink_table()[np.minimum(below, 127)[..., None], codes.reshape(*scale.shape, group)]
    relative = raised - floor + np.uint8(layout.activation.name == "float8e4m3")
    factor = np.ldexp(np.float32(1), floor[..., 0].astype(np.int32) - 128).astype(np.float32)
    scale_2 = round_to(factor, layout.result.name) if per_row else factor[:, 0]
    return shrunk.reshape(codes.shape), relative, scale_2


def _pad_exponents(layout: PackedLayout, scale: Codes, humming_version: str) -> Codes:
    """Exponents with the padding that enters the range: columns repeat the row's largest, rows are 2^0.

    From humming-kernels 0.1.20 on, padded rows repeat the expert's largest.
    """
    experts, n, groups = scale.shape
    columns = layout.shape_k // layout.group
    padded = np.full((experts, layout.shape_n, columns), 127, np.uint8)
    padded[:, :n, :groups] = scale
    padded[:, :n, groups:] = scale.max(axis=-1, keepdims=True)
    if _version(humming_version) >= (0, 1, 20):
        padded[:, n:] = scale.max(axis=(-2, -1))[:, None, None]
    return padded


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:3] if part.isdigit())


def _shrink_table() -> Codes:
    """`[below, code]`: the E2M1 code of a code's value times 2^-below, nearest, ties away from zero.

    The sign stays, but a negative zero becomes a positive one first.
    """
    values = np.array(_E2M1)
    table = np.empty((128, 16), np.uint8)
    for below in range(128):
        for code in range(16):
            start = 0 if code == 8 else code
            target = values[start & 7] * 2.0**-below
            distances = np.abs(values - target)
            nearest = int(np.flatnonzero(distances == distances.min())[-1])
            table[below, code] = nearest | (start & 8)
    return table
