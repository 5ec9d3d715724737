"""One sublayer's tensors in the final layout of Humming's kernels, by Humming's own conversion code.

Humming's schema and layout code runs as it is, with this package's stand-ins at its seams (`host/`). Scales,
zero points and every decision that depends on all experts are made once, with the weight left out; the weight
then goes through its own steps slice by slice, in any order and from several threads.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from humming_convert.errors import Problem, UnsupportedError
from humming_convert.host import shadow
from humming_convert.host.foreign import Foreign
from humming_convert.host.target import emulate, humming
from humming_convert.host.weight_steps import contains_lowest, lay_out
from humming_convert.schemas import choose_input_schema, input_schema_of, param_dtype_of, weight_schema_of
from humming_convert.source_conversion import SourceConversion
from humming_convert.sublayer_inputs import (
    Facts,
    attributes,
    check_finite,
    check_given,
    checked_small,
    explained,
    weight_name,
)
from humming_convert.target import Target

PAD_N = 256  # as vLLM pads N and K
PAD_K = 128


@dataclass(frozen=True, slots=True)
class PackedSublayer:
    """The final tensors of one sublayer, Humming's LayerConfig for them, and its final schema objects."""

    config: Foreign
    schema: Foreign
    input_schema: Foreign
    tensors: dict[str, torch.Tensor]


def convert_to_humming_moe_kernel_format(
    tensors: Mapping[str, torch.Tensor],
    weight_schema: object,
    input_schema: object,
    *,
    shape_n: int,
    shape_k: int,
    shape_n_stacks: Sequence[int],
    num_experts: int,
    has_bias: bool,
    param_dtype: str | torch.dtype,
    target: Target,
) -> PackedSublayer:
    """Convert one sublayer (`[E, ...]` tensors under the schema's own names) for `target`; inputs stay as
    they are.

    Schemas are Humming's, as objects or as their configuration dictionaries; `input_schema` None means 16-bit
    activations. The result is on the tensors' device. Raises UnsupportedError when Humming cannot take the
    weights, the activation or the shape, naming what.
    """
    schema = weight_schema_of(weight_schema)
    facts = Facts(schema, shape_n, shape_k, num_experts, target)
    name = weight_name(attributes(facts, param_dtype_of(param_dtype), has_bias, len(shape_n_stacks)), facts)
    if name not in tensors:
        raise UnsupportedError([Problem(f"{facts}", f"a tensor {name}", ", ".join(sorted(tensors)))])
    converter = SublayerConverter(
        schema,
        input_schema,
        shape_n=shape_n,
        shape_k=shape_k,
        shape_n_stacks=shape_n_stacks,
        num_experts=num_experts,
        has_bias=has_bias,
        param_dtype=param_dtype,
        target=target,
        small={key: value for key, value in tensors.items() if key != name},
    )
    if converter.needs_scan:
        converter.scan(tensors[name])
    final = converter.convert(tensors[name], 0) | converter.common()
    return PackedSublayer(converter.config, converter.weight_schema, converter.input_schema, final)


class SublayerConverter:
    """Converts one sublayer by slices of experts, bit for bit as the whole at once.

    `small` holds every tensor but the weight for all experts. Call `scan` with every slice first when
    `needs_scan` (it may stop once it returns True); pass all experts to `convert` at once when `whole`.
    With `weight_is_packed` the weight comes as int32 `[e, N, K * bits / 32]` instead of in the schema's own form.
    `config` (Humming's LayerConfig), `weight_schema` and `input_schema` are final once scanning is done.
    Methods may be called from several threads.
    """

    def __init__(
        self,
        weight_schema: object,
        input_schema: object,
        *,
        shape_n: int,
        shape_k: int,
        shape_n_stacks: Sequence[int],
        num_experts: int,
        has_bias: bool,
        param_dtype: str | torch.dtype,
        target: Target,
        small: Mapping[str, torch.Tensor],
        weight_is_packed: bool = False,
    ) -> None:
        """Decide what depends on all experts.

        Raises UnsupportedError naming schema, activation, shape and target.
        """
        self.target = target
        self.param_dtype = param_dtype_of(param_dtype)
        self.num_experts = num_experts
        self.has_bias = has_bias
        self._n, self._k, stacks = shape_n, shape_k, list(shape_n_stacks)
        schema = weight_schema_of(weight_schema)
        self._source_input, self._allow_fallback = input_schema_of(input_schema)
        self._device = next((tensor.device for tensor in small.values()), torch.device("cpu"))
        self._facts = Facts(schema, shape_n, shape_k, num_experts, target)
        self._lock = threading.Lock()
        self._scanned, self._seen = 0, False
        attrs = attributes(self._facts, self.param_dtype, has_bias, len(stacks))
        weight_key = weight_name(attrs, self._facts)
        check_given(small, attrs, stacks, self._facts)
        self._source = SourceConversion(
            schema=schema,
            stacks=stacks,
            k=shape_k,
            param_dtype=self.param_dtype,
            num_experts=num_experts,
            weight_key=weight_key,
            weight_attr=attrs[weight_key],
            small=checked_small(small, attrs, weight_key, self._facts),
            weight_is_packed=weight_is_packed,
        )
        with self._humming():
            self._schema, self._tensors = self._source.whole()
            self._source_input_final, self._inputs = self._source_input.convert_humming(
                tensors=dict(small),
                shape_n_stacks=stacks,
                shape_k_stacks=[shape_k],
                param_dtype=self.param_dtype,
                num_experts=num_experts,
            )
            self.needs_scan: bool = self._symmetric(has_lowest_code=False)[0].b_dtype != self._schema.b_dtype
        self.whole = False
        self._record: shadow.Record | None = None
        if not self.needs_scan:
            self.decide(has_lowest_code=True)

    def scan(self, weight: torch.Tensor) -> bool:
        """Look for the lowest code in a slice of the weight; True once it was seen.

        Give it every expert once.
        """
        if self._record is not None:
            return self._seen
        with self._humming():
            packed = self._source.packed(weight, None)
            found = contains_lowest(packed, self._schema.b_dtype.num_bits)
        with self._lock:
            self._scanned += weight.shape[0]
            self._seen |= found
            # Counted together: whoever completes the count also knows what every other thread saw.
            seen, complete = self._seen, self._scanned >= self.num_experts
        if seen or complete:
            self.decide(has_lowest_code=seen)
        return seen

    def convert(self, weight: torch.Tensor, first_expert: int) -> dict[str, torch.Tensor]:
        """The final per-expert tensors of `weight`'s experts, which start at `first_expert`.

        Contiguous, `[e, ...]`. Raises ValueError for experts that there are not, for a part when `whole`, and before
        a scan that `needs_scan` asks for; UnsupportedError for a weight of another shape or dtype.
        """
        rows = self._rows(weight, first_expert)
        if self.whole:
            with self._humming():
                return self._convert_whole(weight)
        packed = self.convert_weight(weight, first_expert)
        return {"weight": packed, **{name: tensor[rows].contiguous() for name, tensor in self.small().items()}}

    def convert_weight(self, weight: torch.Tensor, first_expert: int) -> torch.Tensor:
        """The final weight alone of these experts, int32, contiguous, `[e, ...]`. Raises what `convert` raises."""
        rows = self._rows(weight, first_expert)
        with self._humming():
            if self.whole:
                return self._convert_whole(weight)["weight"]
            source = self._source.packed(weight, rows)
            return lay_out(source, rows, schema=self._schema, config=self.config, record=self._decided())

    def small(self) -> dict[str, torch.Tensor]:
        """The final per-expert tensors beside the weight, `[num_experts, ...]`, contiguous; not to be written to.

        Empty when `whole`: then they come of the weights, and only `convert` has them. Raises ValueError before a
        scan that `needs_scan` asks for.
        """
        self._decided()
        return {} if self.whole else dict(self._final)

    def _decided(self) -> shadow.Record:
        if self._record is None:
            raise ValueError(
                f"expected a scan of all {self.num_experts} experts before converting, found {self._scanned}"
            )
        return self._record

    def _rows(self, weight: torch.Tensor, first_expert: int) -> slice:
        """The experts that a slice of the weight holds."""
        self._decided()
        count = weight.shape[0]
        if first_expert < 0 or first_expert + count > self.num_experts or (self.whole and count != self.num_experts):
            raise ValueError(
                f"expected {'all' if self.whole else 'some'} of {self.num_experts} experts, "
                f"found {first_expert} to {first_expert + count - 1}"
            )
        return slice(first_expert, first_expert + count)

    def common(self) -> dict[str, torch.Tensor]:
        """The final tensors that have no expert axis: a static input scale, if the activation has one."""
        name = self.input_schema.static_tensor_scale_name
        return {key: value for key, value in self._inputs.items() if key == name}

    def decide(self, *, has_lowest_code: bool) -> None:
        """Fix everything but the weight itself; `scan` calls it when it knows the answer."""
        with self._lock, self._humming():
            if self._record is not None:
                return
            self.weight_schema, tensors = self._symmetric(has_lowest_code=has_lowest_code)
            self.input_schema = choose_input_schema(
                self.weight_schema,
                self._source_input_final,
                self.param_dtype,
                self.target,
                allow_fallback=self._allow_fallback,
            )
            with shadow.recording() as record:
                config, final = self._prepare({**tensors, "weight": self._tensors["weight"]})
            self.whole = shadow.needs_every_weight(humming(), config, tensors, self.num_experts)
            del final["weight"]
            check_finite(tensors | final | self._inputs, self._facts)
            self._final = {name: tensor.contiguous() for name, tensor in final.items()}
            self.config, self._record = config, record

    @contextlib.contextmanager
    def _humming(self) -> Iterator[None]:
        with explained(self._facts), emulate(self.target, self._device):
            yield

    # --- Humming's steps
    # -------------------------------------------------------------------------------------

    def _symmetric(self, *, has_lowest_code: bool) -> tuple[Foreign, dict[str, torch.Tensor]]:
        """Humming's choice between offset and sign-magnitude codes, asked with a stand-in for the weight."""
        fill = 0 if has_lowest_code else -1
        weight = torch.full((1, 32), fill, dtype=torch.int32, device=self._device)
        if self._schema.b_dtype.is_integer_type:
            weight = weight[:, : self._schema.b_dtype.num_bits].contiguous()
        schema, tensors = self._schema.convert_symmetric_integer_weight({**self._tensors, "weight": weight})
        return schema, {name: tensor for name, tensor in tensors.items() if name != "weight"}

    def _prepare(self, tensors: dict[str, torch.Tensor]) -> tuple[Foreign, dict[str, torch.Tensor]]:
        config, final = humming().transform.prepare_and_transform_humming_tensors(
            tensors=tensors,
            shape_n=self._n,
            shape_k=self._k,
            weight_schema=self.weight_schema,
            input_schema=self.input_schema,
            num_experts=self.num_experts,
            pad_n_to_multiple=PAD_N,
            pad_k_to_multiple=PAD_K,
            has_bias=self.has_bias,
            torch_dtype=self.param_dtype,
            device=self._device,
        )
        return config, final

    def _convert_whole(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        packed = self._source.packed(weight, slice(0, self.num_experts))
        tensors = {name: tensor for name, tensor in self._tensors.items() if name != "weight"}
        self.config, final = self._prepare({**tensors, "weight": packed})
        check_finite(final, self._facts)
        return final
