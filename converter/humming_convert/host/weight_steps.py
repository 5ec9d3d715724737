"""The weight's own steps of a conversion whose decisions a shadow run has made: for one slice of experts at a
time."""

from __future__ import annotations

import torch

from humming_convert.host import cpu, native
from humming_convert.host.foreign import Foreign
from humming_convert.host.shadow import Record
from humming_convert.host.target import humming


def contains_lowest(packed: torch.Tensor, bits: int) -> bool:
    """Whether offset-binary codes hold the lowest one, which sign and magnitude cannot say."""
    if packed.device.type == "cpu":
        return native.contains_code(packed.contiguous(), bits, 0)
    return bool((humming().ops.unpack_weight(packed, bits) == 0).any())


def lay_out(
    packed: torch.Tensor, rows: slice, *, schema: Foreign, config: Foreign, record: Record
) -> torch.Tensor:
    """Packed int32 codes `[e, N, K * bits / 32]` of the experts `rows` in the layout that `record` decided.

    `schema` is Humming's for these codes, `config` the sublayer's LayerConfig. The codes stay as they are.
    """
    if record.transform is None:
        raise ValueError("expected a shadow run that laid out one weight")
    arguments = dict(record.arguments)
    if arguments.get("zero_point") is not None:
        arguments["zero_point"] = arguments["zero_point"][rows]
    pad_n, pad_words = config.pad_shape_n, config.pad_shape_k * config.b_dtype.num_bits // 32
    is_plain = not pad_n and not pad_words and record.offsets is None
    kinds = _kind(schema.b_dtype), _kind(arguments["b_dtype"])
    if is_plain and kinds[0] != kinds[1] and record.repacks_as_is is not False and packed.device.type == "cpu":
        packed = packed.contiguous()
        with cpu.converting(packed, *kinds) as conversion:
            result: torch.Tensor = record.transform(packed, **arguments)
        record.repacks_as_is = conversion.is_done
        if conversion.is_done:
            return result.contiguous()
    packed = _as_kind(packed, schema, record.arguments["b_dtype"])
    if pad_n or pad_words:
        packed = torch.nn.functional.pad(packed, (0, pad_words, 0, pad_n))
    if record.offsets is not None:
        folded = torch.empty_like(packed)
        offsets = record.offsets[rows].contiguous()
        packed = humming().ops.process_mxfp4_w4a8_weight(packed, offsets, outputs=folded)
    result = record.transform(packed, **arguments)
    return result.contiguous()


def _as_kind(packed: torch.Tensor, schema: Foreign, final: Foreign) -> torch.Tensor:
    """The codes as the layout wants them: offset binary or sign and magnitude."""
    source_kind, kind = _kind(schema.b_dtype), _kind(final)
    if source_kind == kind:
        return packed
    bits = final.num_bits
    if packed.device.type == "cpu":
        out = torch.empty_like(packed)
        native.convert(packed.contiguous(), out, bits, source_kind, kind)
        return out
    converted: torch.Tensor
    if kind == "sign_magnitude":
        converted = schema.convert_symmetric_integer_weight({"weight": packed})[1]["weight"]
        return converted
    middle = 1 << (bits - 1)
    codes = humming().ops.unpack_weight(packed, bits)
    low = codes & (middle - 1)
    offset = torch.where(codes >= middle, middle - low, middle + low)
    converted = humming().ops.pack_weight(offset, bits)
    return converted


def _kind(dtype: Foreign) -> str:
    """The kind of codes of a Humming dtype.

    Integers and floats without an exponent convert into each other.
    """
    if dtype.is_integer_type:
        return "uint"  # offset binary, whatever the sign says, until the layout step
    return "sign_magnitude" if dtype.exponent_bits == 0 else str(dtype)
