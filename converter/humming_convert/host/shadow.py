"""Run Humming's code with the weight left out, and give the weight's own steps back to run later, slice by
slice.

In a shadow run the weight is a tensor on the meta device: scales, zero points and every decision are made for
real, for all experts at once, and the one call that lays the weight out is recorded instead of paid for. The
same seams also spare real runs two copies of the weight that Humming makes for nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import SimpleNamespace

import torch

from humming_convert.host import native
from humming_convert.host.foreign import Foreign

Function = Callable[..., Foreign]


@dataclass(slots=True)
class Record:
    """What a shadow run learned about the weight: the layout call and the offsets folded in before it.

    `repacks_as_is` says whether that call gave the weight's own memory to the repack, once a slice has shown it.
    """

    transform: Function | None = None
    arguments: dict[str, Foreign] = field(default_factory=dict)
    offsets: torch.Tensor | None = None
    repacks_as_is: bool | None = None


_record: ContextVar[Record | None] = ContextVar("humming_convert_record", default=None)
_weight_only: ContextVar[bool] = ContextVar("humming_convert_weight_only", default=False)


@contextlib.contextmanager
def recording() -> Iterator[Record]:
    """Collect the weight's steps of the conversion that runs in this block, in this thread."""
    record = Record()
    token = _record.set(record)
    try:
        yield record
    finally:
        _record.reset(token)


@contextlib.contextmanager
def weight_only() -> Iterator[None]:
    """Say that of a source schema's conversion in this block, in this thread, only the weight will be looked at."""
    token = _weight_only.set(True)
    try:
        yield
    finally:
        _weight_only.reset(token)


def _transform_weight(original: Function) -> Function:
    def transform_humming_weight(weight: torch.Tensor, *args: Foreign, **kwargs: Foreign) -> Foreign:
        record = _record.get()
        if record is not None and weight.device.type == "meta":
            if args or record.transform is not None:
                raise ValueError("expected one layout call with named arguments for a sublayer")
            record.transform, record.arguments = original, dict(kwargs)
        return original(weight, *args, **kwargs)

    return transform_humming_weight


def _fold_scale(original: Function) -> Function:
    def process_mxfp4_w4a8_weight(
        inputs: torch.Tensor, delta_scale_offsets: torch.Tensor, **kwargs: Foreign
    ) -> Foreign:
        record = _record.get()
        if record is not None and inputs.device.type == "meta":
            record.offsets = delta_scale_offsets
        return original(inputs, delta_scale_offsets, **kwargs)

    return process_mxfp4_w4a8_weight


def _pad_tensors(original: Function) -> Function:
    def check_and_pad_tensors(config: Foreign, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        # Padding by nothing copies. The other two cases change values: scales here, the weight later in its place.
        is_plain = not (config.pad_shape_n or config.pad_shape_k or config.use_fused_e8m0_scale)
        on_host = all(tensor.device.type in ("cpu", "meta") for tensor in tensors.values())
        if not is_plain or config.use_int_weight_scale or not on_host:
            return dict(original(config, tensors))
        checked = dict(original(config, {name: tensor.to("meta") for name, tensor in tensors.items()}))
        for name, tensor in checked.items():
            given = tensors.get(name)
            if given is None or (given.shape, given.dtype) != (tensor.shape, tensor.dtype):
                return dict(original(config, tensors))
            # The small ones may become results as they are, which are not to be the caller's own memory.
            checked[name] = given if given.ndim >= 3 else given.clone()
        return checked

    return check_and_pad_tensors


def _awq_convert(original: Function) -> Function:
    def _convert_humming(self: Foreign, tensors: dict[str, torch.Tensor], *args: Foreign, **kwargs: Foreign) -> Foreign:
        if self.bits != 4 or tensors["qweight"].device.type not in ("cpu", "meta"):
            return original(self, tensors, *args, **kwargs)
        weight = _awq_weight(tensors["qweight"])
        if _weight_only.get():
            return None, {"weight": weight}
        # Humming would widen every code to 32 bits and back; it gets corners to do that with instead.
        scales, zeros = tensors["scales"], tensors.get("qzeros")
        corners = {"qweight": torch.zeros((1, 32, 4), dtype=torch.int32)}
        if scales.device.type == "cpu":
            corners["scales"] = torch.zeros((1, 1, 32), dtype=scales.dtype)
        if zeros is not None and zeros.device.type == "cpu":
            corners["qzeros"] = torch.zeros((1, 1, 4), dtype=torch.int32)
        schema, converted = original(self, {**tensors, **corners}, *args, **kwargs)
        converted = {**converted, "weight": weight}
        if "scales" in corners:
            converted["weight_scale"] = _transposed(scales.to(converted["weight_scale"].dtype))
        if zeros is not None and "qzeros" in corners and "zero_point" in converted:
            converted["zero_point"] = _transposed(native.awq_in_order(zeros.contiguous()))
        return schema, converted

    return _convert_humming


def _awq_weight(qweight: torch.Tensor) -> torch.Tensor:
    k, words = qweight.shape[-2:]
    weight = torch.empty((*qweight.shape[:-2], words * 8, k // 8), dtype=torch.int32, device=qweight.device)
    if not weight.is_meta:
        native.awq_to_packed(qweight.contiguous(), weight)
    return weight


def _transposed(tensor: torch.Tensor) -> torch.Tensor:
    """The last two axes of a CPU tensor changed, contiguous."""
    rows, columns = tensor.shape[-2:]
    out = torch.empty((*tensor.shape[:-2], columns, rows), dtype=tensor.dtype)
    native.transpose(tensor.contiguous(), out, [0])
    return out


def _int8_convert(original: Function) -> Function:
    def _convert_humming(self: Foreign, tensors: dict[str, torch.Tensor], *args: Foreign, **kwargs: Foreign) -> Foreign:
        if self.format != "int-quantized" or not tensors["weight"].is_meta:
            return original(self, tensors, *args, **kwargs)
        # Arithmetic on a meta tensor makes torch import its compiler, which takes seconds; one word has no
        # such need.
        corner = torch.zeros((1, 1, 4), dtype=torch.int8)
        schema, converted = original(self, {**tensors, "weight": corner}, *args, **kwargs)
        words = tensors["weight"].view(torch.int32)
        return schema, {**converted, "weight": torch.empty_like(words)}

    return _convert_humming


def _fit_range(original: Function) -> Function:
    def fit_fused_e8m0_scale_range(
        config: Foreign, config_kwargs: dict[str, Foreign], tensors: dict[str, torch.Tensor]
    ) -> Foreign:
        # A shadow run comes here only after it is known that no weight can change the answer, or is made
        # again.
        if tensors["weight"].device.type == "meta":
            return config
        return original(config, config_kwargs, tensors)

    return fit_fused_e8m0_scale_range


def needs_every_weight(
    modules: SimpleNamespace, config: Foreign, tensors: dict[str, torch.Tensor], num_experts: int
) -> bool:
    """Whether humming-kernels 0.1.20 looks at every weight to choose the range of fused e8m0 scales.

    It does when the scales of an expert spread further than the range that it keeps for all of them.
    """
    if not config.use_fused_e8m0_scale or not hasattr(modules.transform, "fit_fused_e8m0_scale_range"):
        return False
    if config.weight_scale_2_type.value == "channel":
        return False
    max_range = 11 if config.a_dtype == modules.dtypes.float8e4m3 else 3
    codes = tensors["weight_scale"].view(torch.uint8).reshape(num_experts, -1)
    spread = codes.amax(-1).short() - codes.amin(-1).short()
    return bool((spread > max_range).any())


def seams(modules: SimpleNamespace) -> Iterator[tuple[Foreign, str, Foreign]]:
    """(owner, attribute, replacement) of this file's seams.

    `host.target` installs them after the operators'.
    """
    transform = modules.transform
    yield transform, "transform_humming_weight", _transform_weight(transform.transform_humming_weight)
    yield transform, "check_and_pad_tensors", _pad_tensors(transform.check_and_pad_tensors)
    yield modules.ops, "process_mxfp4_w4a8_weight", _fold_scale(modules.ops.process_mxfp4_w4a8_weight)
    awq, packed = modules.schema_awq.AWQWeightSchema, modules.schema_compressed_tensors.CompressedTensorsWeightSchema
    yield awq, "_convert_humming", _awq_convert(awq._convert_humming)
    yield packed, "_convert_humming", _int8_convert(packed._convert_humming)
    if hasattr(transform, "fit_fused_e8m0_scale_range"):
        yield transform, "fit_fused_e8m0_scale_range", _fit_range(transform.fit_fused_e8m0_scale_range)
