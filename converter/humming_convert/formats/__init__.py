"""The checkpoint formats, as one explicit tuple: adding one is a file and a row here."""

from __future__ import annotations

from humming_convert.errors import Problem
from humming_convert.formats.awq import AwqGemm
from humming_convert.formats.base import Accepted, CheckpointFormat, RefusalError, Refused, Sublayer
from humming_convert.formats.ct_floats import CtFloat8, CtMxfp4, CtNvfp4
from humming_convert.formats.ct_integers import CtPackedIntegers, CtPlainIntegers
from humming_convert.formats.fp8 import Fp8Block, Fp8Tensor
from humming_convert.formats.gpt_oss import GptOssMxfp4
from humming_convert.formats.later import LaterFormats

FORMATS: tuple[CheckpointFormat, ...] = (
    Fp8Tensor(),
    Fp8Block(),
    GptOssMxfp4(),
    CtMxfp4(),
    AwqGemm(),
    CtPackedIntegers(),
    CtPlainIntegers(),
    CtFloat8(),
    CtNvfp4(),
    LaterFormats(),
)

# quant_method as Hugging Face writes it, and what it is called here. Everything else is unknown.
METHODS: dict[str, str] = {
    "fp8": "fp8",
    "mxfp4": "mxfp4",
    "awq": "awq",
    "compressed-tensors": "compressed-tensors",
    "compressed_tensors": "compressed-tensors",
    "auto-round": "auto-round",
    "auto_round": "auto-round",
}
METHODS_TO_COME: tuple[str, ...] = ("gptq", "modelopt", "quark", "bitnet", "humming")


def detect(sublayer: Sublayer) -> Accepted | Refused:
    """The one format that `sublayer` is in, or why there is none, with what every format said."""
    trace = []
    for candidate in FORMATS:
        try:
            answer = candidate.match(sublayer)
        except RefusalError as refusal:
            return refusal.refused
        if isinstance(answer, Accepted):
            return answer
        if candidate.summary:
            trace.append(f"{candidate.name}: {answer.reason}")
    expected = "a supported checkpoint format"
    return Refused(Problem(sublayer.where, expected, sublayer.describe(), "not " + "; not ".join(trace)))
