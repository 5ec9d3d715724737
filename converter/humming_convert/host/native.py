"""The compiled operators, called through ctypes: the interpreter's lock is released while one runs.

Only this file knows their C signatures (host/native.h). Arguments are contiguous CPU tensors.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from collections.abc import Sequence

import torch

KINDS = {"uint": 0, "int": 1, "sign_magnitude": 2}

_P = ctypes.c_void_p
_I64 = ctypes.c_int64
_INT = ctypes.c_int

_SIGNATURES: dict[str, list[type]] = {
    "hc_pack": [_P, _P, _I64, _INT, _INT],
    "hc_unpack": [_P, _P, _I64, _INT, _INT],
    "hc_convert": [_P, _P, _I64, _INT, _INT, _INT],
    "hc_contains": [_P, _I64, _INT, ctypes.c_uint32],
    "hc_fold_e2m1": [_P, _P, _P, _I64, _I64],
    "hc_repack": [_P, _INT],
    "hc_awq": [_P, _P, _I64, _I64, _I64, _INT],
    "hc_zero_points": [_P, _P, _I64, _I64, _I64, _INT, _INT, _P, _I64],
    "hc_awq_in_order": [_P, _P, _I64],
    "hc_transpose": [_P, _P, _I64, _I64, _I64, _INT, _P, _I64, _INT],
}

_REPACK_ERRORS = {
    1: "weights of 1 to 8 bits",
    2: "activations of 4, 8 or 16 bits",
    3: "weights no wider than the activations",
    4: "a multiple of 64 rows (N)",
    5: "columns (K) a multiple of 512 divided by the activation bits",
    6: "8-bit activations, weights of an even width and K a multiple of 64 for the packed-K layout",
    7: "packed zero points and a positive group size",
}


class RepackArgs(ctypes.Structure):
    """The fields of `RepackArgs` in native.h, in its order."""

    _fields_ = (
        ("weight", _P),
        ("out", _P),
        ("zero_point", _P),
        ("experts", _I64),
        ("n", _I64),
        ("k", _I64),
        ("zero_group", _I64),
        ("bits", ctypes.c_int32),
        ("activation_bits", ctypes.c_int32),
        ("packed", ctypes.c_int32),
        ("int2fp", ctypes.c_int32),
        ("transpose_mini", ctypes.c_int32),
        ("interleave", ctypes.c_int32),
        ("packed_k", ctypes.c_int32),
        ("native_dequant", ctypes.c_int32),
        ("source_kind", ctypes.c_int32),
        ("target_kind", ctypes.c_int32),
    )


@functools.cache
def _library() -> ctypes.CDLL:
    """The extension module's shared library. Raises ImportError when the package was not built."""
    spec = importlib.util.find_spec("humming_convert.host._native")
    if spec is None or spec.origin is None:
        raise ImportError(
            "humming_convert.host._native is not built: install with pip, which needs a C++17 compiler"
        )
    library = ctypes.CDLL(spec.origin)
    for name, arguments in _SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes = arguments
        function.restype = _INT
    return library


def _check(tensor: torch.Tensor, *dtypes: torch.dtype) -> None:
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise ValueError(
            f"expected a contiguous CPU tensor, found {tensor.device}, strides {tensor.stride()}"
        )
    if tensor.dtype not in dtypes:
        raise ValueError(f"expected {' or '.join(map(str, dtypes))}, found {tensor.dtype}")


def pack(values: torch.Tensor, out: torch.Tensor, bits: int) -> None:
    """The low `bits` bits of int8, uint8 or int32 `values` `[..., 32 * m]` as int32 `[..., bits * m]`."""
    _check(values, torch.int8, torch.uint8, torch.int32)
    _check(out, torch.int32)
    if values.shape[-1] % 32 or out.numel() * 32 != values.numel() * bits:
        raise ValueError(f"cannot pack {bits}-bit codes {tuple(values.shape)} into {tuple(out.shape)}")
    _raise(
        _library().hc_pack(values.data_ptr(), out.data_ptr(), values.numel(), bits, values.element_size()),
        "pack",
        bits,
    )


def unpack(words: torch.Tensor, out: torch.Tensor, bits: int) -> None:
    """The inverse of `pack`: int32 `words` `[..., bits * m]` as codes in int8, uint8 or int32 `out` `[..., 32
    * m]`."""
    _check(words, torch.int32)
    _check(out, torch.int8, torch.uint8, torch.int32)
    if words.shape[-1] % bits or words.numel() * 32 != out.numel() * bits:
        raise ValueError(f"cannot unpack {bits}-bit codes from {tuple(words.shape)} into {tuple(out.shape)}")
    _raise(
        _library().hc_unpack(words.data_ptr(), out.data_ptr(), out.numel(), bits, out.element_size()),
        "unpack",
        bits,
    )


def convert(words: torch.Tensor, out: torch.Tensor, bits: int, source: str, target: str) -> None:
    """Packed codes from one kind (`KINDS`) to another; `out` may be `words`.

    A magnitude that does not fit saturates.
    """
    _check(words, torch.int32)
    _check(out, torch.int32)
    if words.numel() != out.numel():
        raise ValueError(f"cannot convert {tuple(words.shape)} into {tuple(out.shape)}")
    code = _library().hc_convert(
        words.data_ptr(), out.data_ptr(), words.numel(), bits, KINDS[source], KINDS[target]
    )
    _raise(code, "convert", bits)


def contains_code(words: torch.Tensor, bits: int, code: int) -> bool:
    """Whether any `bits`-bit code of int32 `words` equals `code`; stops at the first."""
    _check(words, torch.int32)
    found: int = _library().hc_contains(words.data_ptr(), words.numel(), bits, code)
    if found < 0:
        raise ValueError(f"cannot look for {bits}-bit codes in {words.numel()} words")
    return found == 1


def fold_e2m1(words: torch.Tensor, out: torch.Tensor, offsets: torch.Tensor) -> None:
    """E2M1 codes times 2^-offset, one uint8 offset per equal run of words; `out` may be `words`.

    Offsets above 127 are refused: the exponent arithmetic that they stand for is not defined there.
    """
    _check(words, torch.int32)
    _check(out, torch.int32)
    _check(offsets, torch.uint8)
    groups = offsets.numel()
    if groups == 0 or words.numel() % groups:
        raise ValueError(f"{words.numel()} words do not divide into {groups} groups")
    if int(offsets.max()) > 127:
        raise ValueError(
            f"a scale lies 2^{int(offsets.max())} below the range kept for its tensor; 2^127 is the most"
        )
    pointers = (words.data_ptr(), out.data_ptr(), offsets.data_ptr())
    _raise(_library().hc_fold_e2m1(*pointers, groups, words.numel() // groups), "fold", 4)


def repack(arguments: RepackArgs, *, fast: bool = True) -> None:
    """Run one repack; without `fast` the portable code, whatever the processor.

    Raises ValueError, with what was expected, for a shape that the layout does not have.
    """
    code = _library().hc_repack(ctypes.byref(arguments), int(fast))
    if code:
        weights = f"{arguments.bits}-bit weights, N {arguments.n}, K {arguments.k}"
        shape = f"{weights}, {arguments.activation_bits}-bit activations"
        raise ValueError(f"the kernel layout takes {_REPACK_ERRORS[code]}, found {shape}")


def awq_to_packed(qweight: torch.Tensor, out: torch.Tensor, *, fast: bool = True) -> None:
    """AWQ's int32 `[..., K, N / 8]` (nibbles in the order 0 2 4 6 1 3 5 7) as int32 `[..., N, K / 8]`."""
    _check(qweight, torch.int32)
    _check(out, torch.int32)
    k, n = qweight.shape[-2], qweight.shape[-1] * 8
    if tuple(out.shape) != (*qweight.shape[:-2], n, k // 8) or k % 8:
        raise ValueError(f"cannot transpose {tuple(qweight.shape)} into {tuple(out.shape)}")
    experts = qweight.numel() // (k * n // 8)
    _raise(_library().hc_awq(qweight.data_ptr(), out.data_ptr(), experts, k, n, int(fast)), "transpose", 4)


def awq_in_order(words: torch.Tensor) -> torch.Tensor:
    """AWQ's int32 words, nibbles in the order 0 2 4 6 1 3 5 7, as words of nibbles in their own order."""
    _check(words, torch.int32)
    out = torch.empty_like(words)
    _library().hc_awq_in_order(words.data_ptr(), out.data_ptr(), words.numel())
    return out


def transpose(values: torch.Tensor, out: torch.Tensor, order: Sequence[int], *, fast: bool = True) -> None:
    """`[..., n, groups]` of 1, 2 or 4 bytes as `[..., groups, n]`, column i of each block of `len(order)` columns
    being row `order[i]` of that block of rows. Raises ValueError when n is not whole blocks."""
    _check(values, values.dtype)
    _check(out, values.dtype)
    n, groups = values.shape[-2:]
    if tuple(out.shape) != (*values.shape[:-2], groups, n) or n % len(order):
        raise ValueError(f"cannot transpose {tuple(values.shape)} into {tuple(out.shape)} by blocks of {len(order)}")
    rows = (ctypes.c_int32 * len(order))(*order)
    where = None if len(order) == 1 else rows
    pointers = (values.data_ptr(), out.data_ptr())
    shape = (values.numel() // (n * groups), n, groups, values.element_size())
    if _library().hc_transpose(*pointers, *shape, where, len(order), int(fast)):
        raise ValueError(f"cannot transpose {values.dtype} by {tuple(order)}")


def zero_points(words: torch.Tensor, out: torch.Tensor, bits: int, out_bits: int, order: Sequence[int]) -> None:
    """int32 `[..., n * bits / 32, groups]`, packed along n, as `[..., groups, n * out_bits / 32]` (4 or 8 bits a code),
    code i of each block of `len(order)` codes being code `order[i]` of that block. Raises ValueError when n is not
    whole blocks of a multiple of 32."""
    _check(words, torch.int32)
    _check(out, torch.int32)
    packed, groups = words.shape[-2:]
    n, block = packed * 32 // bits, len(order)
    if packed * 32 % bits or tuple(out.shape) != (*words.shape[:-2], groups, n * out_bits // 32):
        raise ValueError(f"cannot lay out zero points {tuple(words.shape)} as {tuple(out.shape)}")
    rows = (ctypes.c_int32 * block)(*order)
    shape = (words.numel() // (packed * groups), n, groups)
    if _library().hc_zero_points(words.data_ptr(), out.data_ptr(), *shape, bits, out_bits, rows, block):
        raise ValueError(f"cannot lay out {bits}-bit zero points of {n} rows in blocks of {block} by {out_bits} bits")


def _raise(code: int, name: str, bits: int) -> None:
    if code:
        raise ValueError(f"cannot {name} {bits}-bit codes of this shape")
