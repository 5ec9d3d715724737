"""Humming's weight operators for tensors on a CPU, with the signatures of humming-kernels 0.1.19 and 0.1.20.

Each takes what Humming passes and dispatches by device: a CUDA tensor goes to Humming's own kernel, a CPU
tensor to `host/native.py`, and a tensor on the meta device gets a result of the right shape, so that
Humming's shape and scale logic can run before any weight is read. Wrong shapes raise ValueError, as Humming's
checks would.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass

import torch

from humming_convert.host import native
from humming_convert.host.foreign import Foreign

Operator = Callable[..., Foreign]
_PAGE = 4096
NAMES = ("pack_weight", "unpack_weight", "convert_weight", "repack_weight", "process_mxfp4_w4a8_weight")
MISSING = ("quant_weight", "dequant_weight")


@dataclass(slots=True)
class Conversion:
    """Packed codes that the next repack of this very memory is to take as `source` and lay out as `target`."""

    words: torch.Tensor
    source: str
    target: str
    is_done: bool = False


_conversion: ContextVar[Conversion | None] = ContextVar("humming_convert_conversion", default=None)


@contextlib.contextmanager
def converting(words: torch.Tensor, source: str, target: str) -> Iterator[Conversion]:
    """Fuse a conversion between kinds of codes (`native.KINDS`) into the repack of `words` in this block, in this
    thread; `is_done` says afterwards whether there was one."""
    conversion = Conversion(words, source, target)
    token = _conversion.set(conversion)
    try:
        yield conversion
    finally:
        _conversion.reset(token)


def kind_and_bits(dtype: str) -> tuple[str, int]:
    """`uint4` as ("uint", 4), `float4e0m3` as ("sign_magnitude", 4).

    Raises ValueError for a dtype with an exponent.
    """
    match = re.fullmatch(r"(u?int)(\d+)|float(\d+)e0m(\d+)", dtype)
    if match is None or (match[3] and int(match[3]) != int(match[4]) + 1):
        raise ValueError(f"only intN, uintN and floatNe0m(N-1) codes convert into each other, found {dtype}")
    return (match[1], int(match[2])) if match[1] else ("sign_magnitude", int(match[3]))


def _output(
    given: torch.Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    if given is None:
        return torch.empty(shape, dtype=dtype, device=device)
    if tuple(given.shape) != shape or given.dtype != dtype or given.device != device:
        raise ValueError(f"expected outputs {shape} {dtype}, found {tuple(given.shape)} {given.dtype}")
    return given


def _page_aligned(shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """An int32 tensor that begins at a page, so that it can be written to a disk without a copy."""
    if device.type == "meta":
        return torch.empty(shape, dtype=torch.int32, device=device)
    room = torch.empty(math.prod(shape) + _PAGE // 4, dtype=torch.int32)
    start = -room.data_ptr() % _PAGE // 4
    return room[start : start + math.prod(shape)].view(shape)


def pack_weight(inputs: torch.Tensor, num_bits: int, outputs: torch.Tensor | None = None) -> torch.Tensor:
    """Codes `[..., 32 * m]` as int32 `[..., num_bits * m]`."""
    if inputs.shape[-1] % 32:
        raise ValueError(f"codes are packed 32 at a time, found a last axis of {inputs.shape[-1]}")
    shape = (*inputs.shape[:-1], inputs.shape[-1] * num_bits // 32)
    out = _output(outputs, shape, torch.int32, inputs.device)
    if inputs.device.type == "cpu":
        native.pack(inputs, out, num_bits)
    return out


def unpack_weight(
    inputs: torch.Tensor,
    num_bits: int,
    outputs: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Packed int32 `[..., num_bits * m]` as codes `[..., 32 * m]` of `dtype` (default int32)."""
    if inputs.shape[-1] % num_bits:
        raise ValueError(
            f"packed {num_bits}-bit codes need a last axis divisible by {num_bits}, found {inputs.shape[-1]}"
        )
    wanted = dtype or (torch.int32 if outputs is None else outputs.dtype)
    shape = (*inputs.shape[:-1], inputs.shape[-1] // num_bits * 32)
    out = _output(outputs, shape, wanted, inputs.device)
    if inputs.device.type == "cpu":
        native.unpack(inputs, out, num_bits)
    return out


def convert_weight(
    inputs: torch.Tensor,
    source_dtype_str: str,
    target_dtype_str: str,
    inplace: bool = False,
    outputs: torch.Tensor | None = None,
    check_only: bool = False,
) -> torch.Tensor:
    """Packed codes from one dtype to another of the same width.

    With `check_only` an int32 1 if every code fits, else 0.
    """
    source, bits = kind_and_bits(source_dtype_str)
    target, target_bits = kind_and_bits(target_dtype_str)
    if bits != target_bits:
        raise ValueError(f"expected dtypes of one width, found {source_dtype_str} and {target_dtype_str}")
    if check_only:
        out = _output(outputs, (), torch.int32, inputs.device)
        if inputs.device.type == "cpu":
            lowest = {"uint": 0, "int": 1 << (bits - 1)}.get(source)
            fits = (
                target != "sign_magnitude" or lowest is None or not native.contains_code(inputs, bits, lowest)
            )
            out.fill_(int(fits))
        return out
    out = inputs if inplace else _output(outputs, tuple(inputs.shape), torch.int32, inputs.device)
    if inputs.device.type == "cpu":
        native.convert(inputs, out, bits, source, target)
    return out


def process_mxfp4_w4a8_weight(
    inputs: torch.Tensor,
    delta_scale_offsets: torch.Tensor,
    inplace: bool = False,
    outputs: torch.Tensor | None = None,
) -> torch.Tensor:
    """E2M1 codes with part of their scale folded in: times 2^-offset, rounded to the nearest value, ties away
    from zero."""
    if inplace and outputs is not None:
        raise ValueError("expected either inplace or outputs, found both")
    out = inputs if inplace else _output(outputs, tuple(inputs.shape), torch.int32, inputs.device)
    words = inputs.numel() // max(1, delta_scale_offsets.numel())
    if words < 4 or words & (words - 1) or words * delta_scale_offsets.numel() != inputs.numel():
        raise ValueError(f"scale groups must be 32 codes times a power of two, found {words * 8}")
    if inputs.device.type == "cpu":
        native.fold_e2m1(inputs, out, delta_scale_offsets)
    return out


def repack_weight(
    inputs: torch.Tensor,
    weight_bits: int,
    activation_bits: int,
    is_weight_packed: bool,
    should_preprocess_for_int2fp: bool = False,
    should_preprocess_with_zp: bool = False,
    use_fused_e8m0_scale: bool = False,
    interleave_mode: int = 3,
    group_size_zp: int = 0,
    padded_shape_n: int | None = None,
    padded_shape_k: int | None = None,
    zero_point: torch.Tensor | None = None,
    use_packed_k_layout: bool = False,
    use_native_dequant: bool = False,
    outputs: torch.Tensor | None = None,
    inplace: bool = False,
) -> torch.Tensor:
    """Weights `[N, K]` or `[E, N, K]`, packed or one code a word, in the layout of Humming's kernels."""
    n, k = inputs.shape[-2], inputs.shape[-1]
    if is_weight_packed:
        k = k * 32 // weight_bits
    if padded_shape_n not in (None, n) or padded_shape_k not in (None, k):
        raise ValueError(
            f"expected padded weights, found {n} x {k} to pad to {padded_shape_n} x {padded_shape_k}"
        )
    experts = inputs.shape[0] if inputs.ndim == 3 else 1
    rows = 64 if use_packed_k_layout else 256 // activation_bits
    shape = (k // rows, n * rows * weight_bits // 32)
    full = (experts, *shape) if inputs.ndim == 3 else shape
    given = _page_aligned(full, inputs.device) if outputs is None else outputs
    out = _output(given, full, torch.int32, inputs.device)
    zeros = (
        _packed_zero_points(inputs, zero_point, weight_bits, is_weight_packed)
        if should_preprocess_with_zp
        else None
    )
    if inputs.device.type == "meta":
        return out
    arguments = native.RepackArgs(
        weight=_data(inputs),
        out=_data(out),
        zero_point=None if zeros is None else _data(zeros),
        experts=experts,
        n=n,
        k=k,
        zero_group=group_size_zp or k,
        bits=weight_bits,
        activation_bits=activation_bits,
        packed=is_weight_packed,
        int2fp=should_preprocess_for_int2fp,
        transpose_mini=use_packed_k_layout and not use_fused_e8m0_scale,
        interleave=interleave_mode,
        packed_k=use_packed_k_layout,
        native_dequant=use_native_dequant,
    )
    conversion = _conversion.get()
    if conversion is not None and inputs.data_ptr() == conversion.words.data_ptr():
        arguments.source_kind, arguments.target_kind = native.KINDS[conversion.source], native.KINDS[conversion.target]
        conversion.is_done = True
    native.repack(arguments)
    return inputs.copy_(out.view(inputs.shape)).view(out.shape) if inplace else out


def _packed_zero_points(
    inputs: torch.Tensor, zero_point: torch.Tensor | None, bits: int, packed: bool
) -> torch.Tensor:
    if zero_point is None or zero_point.dtype != torch.int32:
        raise ValueError("expected int32 zero points to subtract from the weights, found none")
    rows = inputs.shape[-2] * bits // 32 if packed else inputs.shape[-2]
    if zero_point.ndim != inputs.ndim or zero_point.shape[:-1] != (*inputs.shape[:-2], rows):
        raise ValueError(f"expected {rows} rows of zero points per expert, found {tuple(zero_point.shape)}")
    return zero_point.contiguous()


def _data(tensor: torch.Tensor) -> int:
    if tensor.device.type != "cpu" or not tensor.is_contiguous() or tensor.dtype != torch.int32:
        raise ValueError(f"expected a contiguous int32 CPU tensor, found {tensor.dtype} on {tensor.device}")
    return tensor.data_ptr()


def by_device(ours: Operator, original: Operator | None) -> Operator:
    """An operator that runs `original` for CUDA tensors and `ours` for all others."""

    def operator(inputs: torch.Tensor, *args: Foreign, **kwargs: Foreign) -> Foreign:
        if inputs.device.type == "cuda" and original is not None:
            return original(inputs, *args, **kwargs)
        return ours(inputs, *args, **kwargs)

    return operator


def missing(name: str, original: Operator) -> Operator:
    """An operator that exists only as a CUDA kernel. Raises NotImplementedError for CPU tensors."""

    def operator(inputs: torch.Tensor, *args: Foreign, **kwargs: Foreign) -> Foreign:
        if inputs.device.type == "cuda":
            return original(inputs, *args, **kwargs)
        raise NotImplementedError(f"Humming's {name} has no CPU version: use --device cuda")

    return operator
