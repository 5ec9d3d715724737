"""Leave of a checkpoint's experts what one tensor-parallel rank has, in numpy and by format.

Written after what vLLM's weight loaders do for each format, not after the code under test.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from tests.support.checkpoints import Array, Edit, RawTensor, Tensors, floats

# Formats with one scale (and zero point) for a whole row of weights.
_PER_ROW = ("_channel", "ct_w8a8", "ct_w8a8_asym")
_PER_PROJECTION = ("weight_global_scale", "input_global_scale", "input_scale")


@dataclass(frozen=True, slots=True)
class Share:
    """The values `begin` to `end` of an intermediate size of `whole`, made up to `width`."""

    whole: int
    begin: int
    end: int
    width: int


def keep_share(format: str, share: Share) -> Edit:
    """An edit for `make_checkpoint`: cut every expert's tensors, and say so in the config."""

    def edit(tensors: Tensors, config: dict[str, object]) -> None:
        for name, tensor in list(tensors.items()):
            if ".experts." in name:
                tensors[name] = RawTensor(tensor.dtype, _cut(format, name, tensor, share))
        for field in ("moe_intermediate_size", "intermediate_size"):
            if config.get(field) == share.whole:
                config[field] = share.width

    return edit


def _cut(format: str, name: str, tensor: RawTensor, share: Share) -> Array:
    array, is_down = tensor.array, "down_proj" in name or ".w2." in name
    if name.endswith("weight_shape"):
        shape = array.copy()
        shape[1 if is_down else 0] = share.width
        return shape
    if is_down and name.endswith("bias"):
        # The ranks' results are added up: one of them has the bias.
        return array if share.begin == 0 else np.zeros_like(array)
    axis = axis_of(format, name, is_down)
    is_one_number = name.endswith(_PER_PROJECTION) or (format.endswith("fp8_tensor") and "scale" in name)
    if axis is None or is_one_number or (is_down and array.shape[axis] == 1 and format.endswith(_PER_ROW)):
        return array
    first, last, size = (value * array.shape[axis] // share.whole for value in (share.begin, share.end, share.width))
    kept = np.take(array, range(first, last), axis=axis)
    missing = list(array.shape)
    missing[axis] = size - (last - first)
    # vLLM makes up FP8 blocks with scales of one, and MXFP4 with bytes of zero.
    is_block_scale = name.endswith("weight_scale_inv")
    rest = floats(np.ones(missing), tensor.dtype).array if is_block_scale else np.zeros(missing, array.dtype)
    return np.ascontiguousarray(np.concatenate([kept, rest], axis=axis))


def axis_of(format: str, name: str, is_down: bool) -> int | None:
    """The axis of the intermediate size in a source tensor; None where it has none."""
    if format == "mxfp4_gpt_oss":
        if name.endswith("_bias"):
            return None if is_down else 1
        return 2 if is_down else 1
    if name.endswith(".bias"):
        return None if is_down else 0
    if format.startswith("awq"):
        return 0 if is_down else 1
    return 1 if is_down else 0
