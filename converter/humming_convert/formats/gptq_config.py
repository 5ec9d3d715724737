"""What configs say of weights in GPTQ's packing: AutoGPTQ's, GPTQModel's and auto-round's words for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from humming_convert.formats.base import Sublayer, broken, unsupported
from humming_convert.formats.module_rules import UNQUANTIZED, scheme_fields

# Zero points are stored one less in the first format, as they are in the second.
V1, V2 = "gptq", "gptq_v2"
_PLANES = "gptq_p"
# GPTQModel's packing in planes is the usual one where a code fills whole parts of a word.
_WORD_BITS = (2, 4, 8)
_GPTQ_BITS = (2, 3, 4, 8)
_AUTO_ROUND_BITS = (2, 3, 4, 5, 6, 7, 8)
_AUTO_ROUND_PACKINGS = {"auto_round:auto_gptq": V1, "auto_round": V2, "auto_round:gptqmodel": V2}
_OTHER_PACKINGS = ("awq", "fp8", "mlx", "llm_compressor")
_AGAIN = "quantize again, or save it as gptq_v2"
# The first release whose 3 bit zero points are known to be stored one less; earlier ones took other numbers away.
_SOUND_GPTQMODEL = (7, 7)


class GptqScheme(NamedTuple):
    """Width, group size as the config has it, whether all zero points are the middle, and how they are stored.

    `offset` is `V1`, `V2` or "" where nothing says it. `is_borrowing`: a zero point of 0 was made one less as
    GPTQModel does it, which can be undone.
    """

    bits: int
    group_size: object
    sym: bool
    offset: str
    is_borrowing: bool
    notes: tuple[str, ...]


def gptq_scheme(sublayer: Sublayer, told_by_tensors: int | None) -> GptqScheme:
    """The scheme of the sublayer; `told_by_tensors` is the width that its zero points tell.

    Raises RefusalError for a config that contradicts itself or the tensors, and for packings that are not known.
    """
    config, is_auto_round = sublayer.quantization, sublayer.method == "auto-round"
    fields = scheme_fields(sublayer)
    bits = _bits(sublayer, fields, told_by_tensors)
    sym = fields.get("sym", True)
    if type(sym) is not bool:
        raise broken(sublayer, "sym true or false in the quantization config", f"{sym!r}"[:80])
    if not is_auto_round and (config.get("rotation") or _meta(config).get("rotation")):
        hint = "Humming's kernels do not transform activations: quantize again without it"
        raise unsupported(sublayer, "weights that are not rotated", "rotation in the quantization config", hint)
    offset = _auto_round_offset(sublayer, fields) if is_auto_round else _gptq_offset(sublayer, bits)
    known = _AUTO_ROUND_BITS if is_auto_round else _GPTQ_BITS
    if bits not in known:
        expected = f"{', '.join(map(str, known[:-1]))} or {known[-1]} bit in GPTQ's packing"
        hint = "" if is_auto_round else "GPTQModel splits other widths into planes of bits"
        raise unsupported(sublayer, expected, f"{bits} bit", hint)
    version = None if is_auto_round else _gptqmodel_version(config)
    if not sym and offset == V1 and bits == 3 and version is not None and version < _SOUND_GPTQMODEL:
        found = f"3 bit zero points of GPTQModel {'.'.join(map(str, version))}, which stored others"
        raise unsupported(sublayer, "zero points stored one less", found, _AGAIN)
    return GptqScheme(bits, fields.get("group_size"), sym, offset, version is not None, _notes(config, fields))


def _bits(sublayer: Sublayer, fields: Mapping[str, Any], told_by_tensors: int | None) -> int:
    bits = fields.get("bits", told_by_tensors)
    if type(bits) is not int or not 0 < bits < UNQUANTIZED:
        hint = "give a config with --quant-config"
        raise broken(sublayer, "bits, a whole number below 16, in the quantization config", f"{bits!r}"[:80], hint)
    if told_by_tensors not in (None, bits):
        expected = f"{bits} bit weights, as the quantization config says"
        raise broken(sublayer, expected, f"zero points of {told_by_tensors} bit ({sublayer.describe()})")
    return bits


def _gptq_offset(sublayer: Sublayer, bits: int) -> str:
    config = sublayer.quantization
    if config.get("is_marlin_format"):
        raise unsupported(sublayer, "GPTQ's own packing", "is_marlin_format", "convert the checkpoint to gptq first")
    stated = str(config.get("checkpoint_format") or config.get("format") or V1).lower()
    if stated == _PLANES and bits in _WORD_BITS:
        return V2
    if stated not in (V1, V2):
        hint = "other formats pack otherwise: save it as gptq or gptq_v2"
        raise unsupported(sublayer, f"checkpoint_format {V1} or {V2}", repr(stated), hint)
    return stated if sublayer.method else ""


def _auto_round_offset(sublayer: Sublayer, fields: Mapping[str, Any]) -> str:
    packing = str(sublayer.quantization.get("packing_format") or "")
    if any(word in packing for word in _OTHER_PACKINGS):
        raise broken(sublayer, f"tensors packed as packing_format {packing!r} says", "GPTQ's packing")
    kind = str(fields.get("data_type", "int"))
    if not kind.startswith("int"):
        raise broken(sublayer, f"{kind} weights, as data_type says", "GPTQ's packing")
    return _AUTO_ROUND_PACKINGS.get(packing, "")


def _notes(config: Mapping[str, Any], fields: Mapping[str, Any]) -> tuple[str, ...]:
    notes = []
    if fields.get("desc_act"):
        notes.append("desc_act is true: whether columns are in order is told by g_idx, which is read while converting")
    act_bits = config.get("act_bits")
    if type(act_bits) is int and act_bits < UNQUANTIZED:
        notes.append(f"act_bits is {act_bits}: activations of this packing have no scheme here, they stay 16 bit")
    return tuple(notes)


def _meta(config: Mapping[str, Any]) -> Mapping[str, Any]:
    meta = config.get("meta")
    return meta if isinstance(meta, dict) else {}


def _gptqmodel_version(config: Mapping[str, Any]) -> tuple[int, ...] | None:
    """GPTQModel's version, if it wrote the checkpoint: `meta.quantizer` is "gptqmodel:7.7.0" or a list of such."""
    stated = _meta(config).get("quantizer")
    for text in stated if isinstance(stated, list) else [stated]:
        name, _, version = str(text).partition(":")
        if name.lower() == "gptqmodel":
            return tuple(int(part) for part in version.split(".")[:3] if part.isdigit())
    return None
