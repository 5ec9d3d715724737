"""Tensors as the bytes that are read into them."""

from __future__ import annotations

import torch

from humming_convert.errors import CheckpointError, Problem
from humming_loader.dtypes import dtype_info


def torch_dtype(code: str, name: str) -> torch.dtype:
    """The torch dtype of a safetensors code. Raises DtypeError (with `name`) when torch has none."""
    info = dtype_info(code, name)
    found = getattr(torch, info.torch_name) if info.torch_name else None
    if not isinstance(found, torch.dtype):
        raise CheckpointError([Problem(name, "a dtype that torch knows", code)])
    return found


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The storage of a contiguous CPU tensor as writable bytes."""
    return tensor.view(-1).view(torch.uint8).numpy().data
