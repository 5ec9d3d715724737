"""Humming's schema objects from plain dictionaries and back, and which activation a weight can have."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping

import torch

from humming_convert.errors import Problem, UnsupportedError
from humming_convert.host.foreign import Foreign
from humming_convert.host.target import humming
from humming_convert.target import Target

PARAM_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def param_dtype_of(dtype: str | torch.dtype) -> torch.dtype:
    """The dtype of unquantized parameters. Raises UnsupportedError for any but bfloat16 and float16."""
    name = str(dtype).removeprefix("torch.")
    if name not in PARAM_DTYPES:
        raise UnsupportedError([Problem("param dtype", " or ".join(PARAM_DTYPES), name)])
    return PARAM_DTYPES[name]


def weight_schema_of(schema: object) -> Foreign:
    """Humming's weight schema object from its dictionary (or itself).

    Raises UnsupportedError for what it does not know.
    """
    base = humming().schema.BaseWeightSchema
    if not isinstance(schema, Mapping):
        return _own(base, schema, "weight schema")
    return _from_config(base, schema, "weight schema")


def input_schema_of(schema: object) -> tuple[Foreign, bool]:
    """Humming's input schema object (None: 16 bits) and whether another activation may take its place."""
    if schema is None:
        return humming().schema.HummingInputSchema(), False
    base = humming().schema.BaseInputSchema
    if not isinstance(schema, Mapping):
        return _own(base, schema, "input schema"), False
    config = dict(schema)
    fallback = bool(config.pop("allow_fallback", False))
    return _from_config(base, config, "input schema"), fallback


def _own(base: Foreign, schema: object, where: str) -> Foreign:
    if not isinstance(schema, base):
        expected = f"a dictionary or Humming's {base.__name__}"
        raise UnsupportedError([Problem(where, expected, f"{schema!r:.80}")])
    return schema


def _from_config(base: Foreign, config: Mapping[str, Foreign], where: str) -> Foreign:
    if "quant_method" not in config:
        raise UnsupportedError([Problem(where, "a quant_method", str(dict(config)))])
    try:
        return base.from_config(dict(config))
    except (AssertionError, ValueError, TypeError, NotImplementedError) as error:
        reason = str(error) or "values that its checks refuse"
        raise UnsupportedError([Problem(f"{where} {dict(config)}", "a schema that Humming takes", reason)]) from error


def schema_to_dict(schema: object) -> dict[str, Foreign] | None:
    """A schema as JSON values that `from_config` accepts back; None for None.

    Raises TypeError for an unknown field type.
    """
    if schema is None:
        return None
    if isinstance(schema, Mapping):
        return {key: _plain(value) for key, value in schema.items()}
    fields = dataclasses.fields(schema)  # type: ignore[arg-type]
    return {item.name: _plain(getattr(schema, item.name)) for item in fields}


def _plain(value: Foreign) -> Foreign:
    if isinstance(value, enum.Enum):
        return value.value
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, humming().dtypes.DataType):
        return str(value)
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    raise TypeError(f"a schema value of type {type(value).__name__} has no plain form")


def choose_input_schema(
    weight: Foreign, source: Foreign, param_dtype: torch.dtype, target: Target, *, allow_fallback: bool
) -> Foreign:
    """The activation that the kernels will run for a converted weight schema; call it inside an emulation of
    `target`.

    Without `allow_fallback` it is `source`, or UnsupportedError names the pair. With it, vLLM's order of
    preference: `source` itself unless the GPU runs it badly, then kinds ever farther from it, at last 16
    bits.
    """
    schema = source.to_humming_schema(param_dtype)
    dtypes = humming().dtypes
    if schema.a_dtype in (dtypes.float6e2m3, dtypes.float6e3m2):
        schema = dataclasses.replace(schema, a_dtype=dtypes.float8e4m3)
    compatible = schema.is_compatible_with(weight, param_dtype)
    if compatible and (not allow_fallback or _bits(schema.a_dtype) == 16):
        return schema
    if compatible and not is_slow(schema.a_dtype, target.sm):
        return humming().schema.HummingInputSchema() if _prefers_16_bits(weight, schema, target.sm) else schema
    for dtype in _fallbacks(schema.a_dtype, param_dtype) if allow_fallback else ():
        candidate = _candidate(dtype, weight, target.sm)
        if not is_slow(dtype, target.sm) and candidate.is_compatible_with(weight, param_dtype):
            return candidate
    name = dtypes.DataType.from_torch_dtype(param_dtype)
    group = weight.weight_scale_group_size or "none"
    where = f"weights {weight.b_dtype} (scales {weight.bs_dtype or name}, group {group})"
    found = f"activation {schema.a_dtype or name} (group {schema.input_scale_group_size or 'none'})"
    zero = ", with zero points" if weight.has_zero_point else ""
    hint = "choose another --activation or --target"
    raise UnsupportedError(
        [Problem(where + zero, f"an activation that Humming's kernels take with them on {target}", found, hint)]
    )


def is_slow(dtype: Foreign, sm: int) -> bool:
    """Whether vLLM 0.33 avoids this activation dtype on `sm` when it may choose."""
    if _bits(dtype) == 16:
        return False
    dtypes = humming().dtypes
    if 100 <= sm < 120:
        return True
    return bool(dtype == dtypes.int4 and sm >= 90)


def _bits(dtype: Foreign) -> int:
    return 16 if dtype is None else int(dtype.num_bits)


def _prefers_16_bits(weight: Foreign, schema: Foreign, sm: int) -> bool:
    """8-bit activations with any group-wise scale are left for 16 bits, but for MXFP8 from SM 120 on."""
    is_mxfp8 = (
        sm >= 120
        and schema.a_dtype.is_floating_point_type
        and schema.input_scale_group_size == 32
        and schema.input_scale_dtype == humming().dtypes.float8e8m0
    )
    is_groupwise = schema.input_scale_group_size > 0 or weight.weight_scale_group_size > 0
    return _bits(schema.a_dtype) == 8 and is_groupwise and not is_mxfp8


def _fallbacks(dtype: Foreign, param_dtype: torch.dtype) -> tuple[Foreign, ...]:
    order = {
        "float8e5m2": ("float8e4m3", "float8e3m4", "int8"),
        "float8e4m3": ("float8e3m4", "int8"),
        "float8e3m4": ("float8e4m3", "int8"),
        "float4e2m1": ("float8e4m3", "float8e3m4", "int8"),
        "float4e0m3": ("int4", "float8e4m3", "float8e3m4", "int8"),
        "int8": ("float8e4m3", "float8e3m4"),
        "int4": ("int8", "float8e4m3", "float8e3m4"),
    }
    own = () if dtype is None else (dtype,)
    names = order.get(str(dtype), ())
    data_type = humming().dtypes.DataType
    return (*own, *(data_type.from_str(name) for name in names), data_type.from_torch_dtype(param_dtype))


def _candidate(dtype: Foreign, weight: Foreign, sm: int) -> Foreign:
    dtypes, schema = humming().dtypes, humming().schema.HummingInputSchema
    if _bits(dtype) == 16:
        return schema(a_dtype=dtype, input_quant_mode="none")
    is_mx = weight.weight_scale_group_size == 32 and weight.bs_dtype == dtypes.float8e8m0
    if dtype in (dtypes.float8e4m3, dtypes.float8e3m4) and sm >= 120 and (weight.weight_scale_group_size == 0 or is_mx):
        return schema(
            a_dtype=dtype,
            input_scale_group_size=32,
            input_scale_dtype=dtypes.float8e8m0,
            input_quant_mode="dynamic_group",
        )
    return schema(a_dtype=dtype, input_scale_dtype=dtypes.float32, input_quant_mode="dynamic_token")
