"""What identifies a layout: the flags that Humming resolved for a target, and the bytes of a small fixed
sublayer."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch

from humming_convert.errors import UnsupportedError
from humming_convert.host.foreign import Foreign
from humming_convert.host.target import emulate, humming
from humming_convert.kernel_format import PAD_K, PAD_N, SublayerConverter
from humming_convert.schemas import input_schema_of, param_dtype_of, weight_schema_of
from humming_convert.sublayer_inputs import Facts, attributes, explained, weight_name
from humming_convert.target import Target
from humming_loader.fingerprint import FLAGS

_EXPERTS = 2


def fingerprint(config: Foreign, target: Target) -> dict[str, bool]:
    """The nine layout flags of Humming's LayerConfig as it resolves them on `target`."""
    with emulate(target):
        return {flag: bool(getattr(config, flag)) for flag in FLAGS}


def layer_config_to_str(config: Foreign) -> str:
    """Humming's LayerConfig as its own JSON text."""
    return str(config.to_str())


def probe_digest(converter: SublayerConverter) -> str:
    """SHA-256 of `probe_digest_of` for a converter's final schemas."""
    return probe_digest_of(
        converter.weight_schema,
        converter.input_schema,
        param_dtype=converter.param_dtype,
        has_bias=converter.has_bias,
        target=converter.target,
    )


def probe_digest_of(
    weight_schema: object,
    input_schema: object,
    *,
    param_dtype: str | torch.dtype,
    has_bias: bool,
    target: Target,
) -> str:
    """SHA-256 over name, dtype, shape and bytes of a fixed two-expert sublayer in the layout of final Humming
    schemas.

    Takes Humming's objects or their dictionaries, so that a manifest is enough to recompute it.
    """
    schema, dtype = weight_schema_of(weight_schema), param_dtype_of(param_dtype)
    activation, _ = input_schema_of(input_schema)
    n, k = probe_shape(schema)
    facts = Facts(schema, n, k, _EXPERTS, target)
    attrs = attributes(facts, dtype, has_bias, 1)
    tensors = {name: _filled(index, attr) for index, (name, attr) in enumerate(sorted(attrs.items()))}
    with explained(facts), emulate(target):
        _, final = humming().transform.prepare_and_transform_humming_tensors(
            tensors=tensors,
            shape_n=n,
            shape_k=k,
            weight_schema=schema,
            input_schema=activation,
            num_experts=_EXPERTS,
            pad_n_to_multiple=PAD_N,
            pad_k_to_multiple=PAD_K,
            has_bias=has_bias,
            torch_dtype=dtype,
            device=torch.device("cpu"),
        )
    digest = hashlib.sha256()
    for name, tensor in sorted(final.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def probe_shape(schema: Foreign) -> tuple[int, int]:
    """A small N x K that any group or block size of `schema` divides."""
    block = getattr(schema, "weight_block_size", None) or getattr(schema, "block_structure", None) or (1, 0)
    rows = max(1, block[0], getattr(schema, "weight_scale_group_size_n", 0))
    columns = max(
        1, block[1] or getattr(schema, "weight_scale_group_size", 0) or getattr(schema, "group_size", 0) or 1
    )
    return rows * -(-256 // rows), columns * -(-512 // columns)


def _filled(seed: int, attr: Mapping[str, Foreign]) -> torch.Tensor:
    """Fixed values: all codes occur in packed words; scales are exact in every dtype."""
    count = 1
    for extent in attr["shape"]:
        count *= extent
    counter = torch.arange(count, dtype=torch.int64) + (seed + 1) * 1_000_003
    # A 64-bit linear congruential step; int64 wraps, and the high half is well mixed.
    mixed = (counter * 6364136223846793005 + 1442695040888963407) >> 33
    dtype = attr["dtype"]
    if dtype == torch.int32:
        return mixed.to(torch.int32).mul(2654435761 - (1 << 32)).reshape(attr["shape"])
    if dtype in (torch.float8_e8m0fnu, torch.uint8):
        return (120 + mixed % 8).to(torch.uint8).view(dtype).reshape(attr["shape"])
    if dtype == torch.float8_e4m3fn:
        return (32 + mixed % 64).to(torch.uint8).view(dtype).reshape(attr["shape"])
    return ((64 + mixed % 64).float() / 4096).to(dtype).reshape(attr["shape"])


def check_compatible(
    weight_schema: object, input_schema: object, param_dtype: str | torch.dtype, target: Target
) -> None:
    """Decide a small sublayer with made-up scales and no weight.

    Raises UnsupportedError when no weight could convert.
    """
    schema, dtype = weight_schema_of(weight_schema), param_dtype_of(param_dtype)
    n, k = probe_shape(schema)
    facts = Facts(schema, n, k, 1, target)
    attrs = attributes(facts, dtype, False, 1)
    name = weight_name(attrs, facts)
    source, _ = input_schema_of(input_schema)
    attrs |= source.get_tensors_attrs(k, dtype, num_experts=1)
    converter = SublayerConverter(
        schema,
        input_schema,
        shape_n=n,
        shape_k=k,
        shape_n_stacks=(n,),
        num_experts=1,
        has_bias=False,
        param_dtype=dtype,
        target=target,
        small={
            key: _filled(0, attr)
            for key, attr in attrs.items()
            if key != name and attr["dtype"] != torch.int64
        },
    )
    if not converter.needs_scan:
        return
    try:
        converter.decide(has_lowest_code=True)
    except UnsupportedError:
        converter.decide(has_lowest_code=False)
