"""The checkpoint formats, as one explicit tuple: adding one is a file and a row here."""

from __future__ import annotations

from humming_convert.errors import Problem
from humming_convert.formats.awq import AwqGemm
from humming_convert.formats.base import Accepted, CheckpointFormat, RefusalError, Refused, Sublayer
from humming_convert.formats.ct_floats import CtFloat8, CtMxfp4, CtNvfp4
from humming_convert.formats.ct_integers import CtPackedIntegers, CtPlainIntegers
from humming_convert.formats.fp8 import Fp8Block, Fp8Tensor
from humming_convert.formats.gpt_oss import GptOssMxfp4
from humming_convert.formats.gptq import Gptq
from humming_convert.formats.humming_standard import HummingStandard
from humming_convert.formats.later import LaterFormats
from humming_convert.formats.quark_integers import QuarkIntegers

FORMATS: tuple[CheckpointFormat, ...] = (
    Fp8Tensor(),
    Fp8Block(),
    GptOssMxfp4(),
    CtMxfp4(),
    AwqGemm(),
    Gptq(),
    CtPackedIntegers(),
    CtPlainIntegers(),
    CtFloat8(),
    CtNvfp4(),
    QuarkIntegers(),
    HummingStandard(),
    LaterFormats(),
)

# quant_method as Hugging Face writes it, and what it is called here. Everything else is unknown.
METHODS: dict[str, str] = {
    "fp8": "fp8",
    "mxfp4": "mxfp4",
    "awq": "awq",
    "gptq": "gptq",
    "compressed-tensors": "compressed-tensors",
    "compressed_tensors": "compressed-tensors",
    "auto-round": "auto-round",
    "auto_round": "auto-round",
    "intel/auto-round": "auto-round",
    "quark": "quark",
    "humming": "humming",
}
METHODS_TO_COME: tuple[str, ...] = ("modelopt", "bitnet")


def detect(sublayer: Sublayer) -> Accepted | Refused:
    """The one format that `sublayer` is in, or why there is none, with what every format said."""
    told, others = [], []
    for candidate in FORMATS:
        try:
            answer = candidate.match(sublayer)
        except RefusalError as refusal:
            return refusal.refused
        if isinstance(answer, Accepted):
            return answer
        if answer.reason.startswith("there is no "):
            others.append(candidate.name)
        elif candidate.summary:
            told.append(f"not {candidate.name}: {answer.reason}")
    expected = _likely(sublayer)
    if expected is not None:
        hint = "fetch the missing shards, or quantize again; under another name it is not known here"
        return Refused(Problem(sublayer.where, expected, sublayer.describe(), hint))
    hint = "; ".join([*told, f"none of {', '.join(others)}"] if others else told)
    return Refused(Problem(sublayer.where, "a supported checkpoint format", sublayer.describe(), hint))


# A weight and what must stand beside it, one of them at least.
_COMPANIONS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("weight", "F8_E4M3", ("weight_scale_inv", "weight_scale")),
    ("weight", "I8", ("weight_scale",)),
    ("weight_packed", "I32", ("weight_scale",)),
    ("weight_packed", "U8", ("weight_scale",)),
    ("qweight", "I32", ("scales",)),
)
_WEIGHTS = ("weight", "weight_packed", "qweight", "blocks", "")


def _likely(sublayer: Sublayer) -> str | None:
    """What is missing from a sublayer that looks like a format but for one tensor."""
    for weight, code, scales in _COMPANIONS:
        if sublayer.has(**{weight: code}) and not sublayer.parameters.intersection(scales):
            return f"{' or '.join(scales)} beside {weight} {code}"
    if not sublayer.parameters.intersection(_WEIGHTS):
        return "a weight beside its scales"
    return None
