"""MXFP4 as OpenAI published gpt-oss: all experts in one tensor, gate and up rows alternating."""

from __future__ import annotations

from humming_convert.formats.base import (
    Accepted,
    Rejected,
    Rule,
    Sublayer,
    bias_rule,
    broken,
    exponent_check,
)

_BLOCK = 32


class GptOssMxfp4:
    """`_blocks` U8 [E, N, K/32, 16] (low nibble first), `_scales` U8 e8m0 [E, N, K/32], `_bias` [E, N]."""

    name = "mxfp4-gpt-oss"
    summary = "MXFP4 with fused experts (gpt-oss: _blocks, _scales, _bias)"

    def match(self, sublayer: Sublayer) -> Accepted | Rejected:
        """From the names and dtypes alone; the config has nothing that would be needed."""
        if not sublayer.is_fused or "blocks" not in sublayer.parameters:
            return Rejected("there is no fused _blocks tensor")
        if not sublayer.has(blocks="U8", scales="U8"):
            raise broken(sublayer, "blocks U8 and scales U8", sublayer.describe())
        blocks = sublayer.stacks[0]["blocks"].shape
        scales = sublayer.stacks[0]["scales"].shape
        if len(blocks) != 4 or blocks[3] != _BLOCK // 2 or scales != blocks[:3]:
            expected = "blocks [E, N, K/32, 16] and scales [E, N, K/32]"
            raise broken(sublayer, expected, f"{list(blocks)} and {list(scales)}")
        rows, shape_k = blocks[1], blocks[2] * _BLOCK
        if 0 in blocks[1:]:
            raise broken(sublayer, "blocks that hold something", f"{list(blocks)}")
        if sublayer.name == "w13" and rows % 2:
            raise broken(sublayer, "as many gate as up rows", f"{rows} rows")
        return Accepted(
            format=self.name,
            stacks_n=(rows // 2, rows // 2) if sublayer.name == "w13" else (rows,),
            shape_k=shape_k,
            weight_schema={"quant_method": "gpt_oss_mxfp4"},
            rules=(
                Rule(name="weight", parameter="blocks", dtype="U8", shape=(rows, shape_k // 2), is_weight=True),
                Rule(
                    name="weight_scale",
                    parameter="scales",
                    dtype="U8",
                    shape=(rows, shape_k // _BLOCK),
                    check=exponent_check(sublayer),
                ),
                *bias_rule(sublayer, (rows,)),
            ),
        )
