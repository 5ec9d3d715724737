"""Where a packed sublayer may be cut for tensor parallelism, written into the manifest beside the tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from humming_convert.host.foreign import Foreign


def slicing_rules(name: str, config: Foreign, flags: Mapping[str, bool]) -> dict[str, Any]:
    """How `name` (w13 or w2) is cut, by Humming's LayerConfig and its layout flags.

    w13 is cut along N, separately in its gate and up rows, w2 along K.

    `layout` says how the weight lies: `repacked` in rows of `k_rows` values of K, `flat`, or `raw` (one expert's rows
    one after the other). A cut is possible at multiples of `multiple`, in values of N (w13) or K (w2), and needs no
    padding at multiples of `aligned`. `exact` is false where a value was chosen over the whole sublayer, so
    that a slice is right but not bit-identical to converting the slice.
    """
    layout, rows = _weight_layout(config, flags)
    group = config.weight_scale_group_size or 1
    if flags["use_block_scaled_mma"] and config.is_group_weight_scale:
        group *= 4  # block-scaled kernels read four K groups of scales as one word
    if name == "w13":
        is_wide = flags["use_block_scaled_mma"] and config.sm_version // 10 in (10, 11)
        multiple = 128 if is_wide else 64
        if config.is_block_weight_scale:
            multiple = math.lcm(multiple, config.weight_scale_group_size_n)
    else:
        multiple = math.lcm(rows, group)
    exact = not (flags["use_int_weight_scale"] or flags["use_fused_e8m0_scale"])
    return {
        "axis": "n" if name == "w13" else "k",
        "layout": layout,
        "k_rows": rows,
        "multiple": multiple,
        "aligned": math.lcm(multiple, 128),
        "exact": exact,
    }


def _weight_layout(config: Foreign, flags: Mapping[str, bool]) -> tuple[str, int]:
    bits = config.b_dtype.num_bits
    if flags["use_raw_weight"]:
        return "raw", 32 // math.gcd(32, bits)
    if flags["use_flat_weight"]:
        return "flat", 128 // math.gcd(128, bits)
    return "repacked", 64 if flags["use_packed_k_layout"] else 256 // config.a_dtype.num_bits
