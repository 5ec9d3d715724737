"""The one table of safetensors dtype codes. An unknown code is an error that names the tensor."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from humming_loader.errors import DtypeError


@dataclass(frozen=True, slots=True)
class DtypeInfo:
    """One code: `bits` per element, and the torch dtype that holds one element (None: there is none).

    F4 has none although torch has `float4_e2m1fn_x2`: that holds two elements, so shapes differ.
    """

    code: str
    torch_name: str | None
    bits: int


# Codes and widths: the Dtype enumeration of safetensors 0.8.
_ROWS: tuple[DtypeInfo, ...] = (
    DtypeInfo("BOOL", "bool", 8),
    DtypeInfo("F4", None, 4),
    DtypeInfo("F6_E2M3", None, 6),
    DtypeInfo("F6_E3M2", None, 6),
    DtypeInfo("U8", "uint8", 8),
    DtypeInfo("I8", "int8", 8),
    DtypeInfo("F8_E5M2", "float8_e5m2", 8),
    DtypeInfo("F8_E4M3", "float8_e4m3fn", 8),
    DtypeInfo("F8_E8M0", "float8_e8m0fnu", 8),
    DtypeInfo("F8_E4M3FNUZ", "float8_e4m3fnuz", 8),
    DtypeInfo("F8_E5M2FNUZ", "float8_e5m2fnuz", 8),
    DtypeInfo("I16", "int16", 16),
    DtypeInfo("U16", "uint16", 16),
    DtypeInfo("F16", "float16", 16),
    DtypeInfo("BF16", "bfloat16", 16),
    DtypeInfo("I32", "int32", 32),
    DtypeInfo("U32", "uint32", 32),
    DtypeInfo("F32", "float32", 32),
    DtypeInfo("C64", "complex64", 64),
    DtypeInfo("F64", "float64", 64),
    DtypeInfo("I64", "int64", 64),
    DtypeInfo("U64", "uint64", 64),
)

SAFETENSORS_DTYPES: Mapping[str, DtypeInfo] = MappingProxyType({row.code: row for row in _ROWS})

CODE_OF_TORCH_NAME: Mapping[str, str] = MappingProxyType(
    {row.torch_name: row.code for row in _ROWS if row.torch_name is not None}
)


def dtype_info(code: str, tensor_name: str) -> DtypeInfo:
    """The row of `code`. Raises DtypeError, naming `tensor_name`, when the format has no such code."""
    info = SAFETENSORS_DTYPES.get(code)
    if info is None:
        raise DtypeError(tensor_name, code)
    return info


def code_of_torch_dtype(torch_dtype: object, tensor_name: str) -> str:
    """The code of a `torch.dtype` (seen only through its text, so torch is not imported).

    Raises DtypeError, naming `tensor_name`, for a dtype that the format has no code for.
    """
    name = str(torch_dtype).removeprefix("torch.")
    code = CODE_OF_TORCH_NAME.get(name)
    if code is None:
        raise DtypeError(tensor_name, name)
    return code


def tensor_nbytes(code: str, shape: Sequence[int], tensor_name: str) -> int:
    """Bytes of a tensor of `shape`. Raises DtypeError for an unknown code, or if it ends inside a byte."""
    bits = dtype_info(code, tensor_name).bits * math.prod(shape)
    if bits % 8 != 0:
        raise DtypeError(tensor_name, f"{code} of shape {list(shape)}, which ends inside a byte")
    return bits // 8
