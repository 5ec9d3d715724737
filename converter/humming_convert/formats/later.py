"""Formats that are recognized but not converted yet, so that the refusal names them."""

from __future__ import annotations

from humming_convert.formats.base import Accepted, Rejected, Sublayer, unsupported

_HINT = "this format is not supported yet"


class LaterFormats:
    """MXFP8, and FP8 scales under the name `scale`."""

    name = "later"
    summary = ""

    def match(self, sublayer: Sublayer) -> Accepted | Rejected:
        """Raises RefusalError for what it knows, and accepts nothing."""
        expected = "a supported checkpoint format"
        if sublayer.has(weight="F8_E4M3", weight_scale=("U8", "F8_E8M0")):
            raise unsupported(sublayer, expected, "MXFP8 (F8_E4M3 with exponent bytes)", _HINT)
        if "scale" in sublayer.parameters:
            raise unsupported(sublayer, expected, "scales under the name scale (DeepSeek V4)", _HINT)
        return Rejected("its tensors are none of MXFP8's and DeepSeek V4's")
