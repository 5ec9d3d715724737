"""Fingerprints and probe digests: what tells one layout from another, and what a pair can be refused for early."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.parity import load_cases
from tests.support.sublayers import FP8, INT4, INT8, MXFP4, NVFP4, sources

from humming_convert.activation import ACTIVATIONS, CHECKPOINT, NAMES, input_schema_for
from humming_convert.errors import UnsupportedError
from humming_convert.kernel_format import SublayerConverter
from humming_convert.layout_probe import check_compatible, fingerprint, probe_digest, probe_digest_of
from humming_convert.schemas import input_schema_of, schema_to_dict, weight_schema_of
from humming_convert.target import Target
from humming_loader.fingerprint import FLAGS

LATE = ("ct_int4_chan/mxfp4/sm120", "ct_int4_chan/nvfp4/sm100", "ct_int4_chan/nvfp4/sm120")
SEEN: dict[str, dict[str, Any]] = {}
for recorded in load_cases():
    SEEN.setdefault("/".join(recorded["id"].split("/")[:3]), recorded)


def converter(
    schema: dict[str, Any], activation: dict[str, Any] | None, sm: int, seed: int = 1, *, lowest: bool = True
) -> SublayerConverter:
    tensors = sources(schema, n=256, k=512, experts=2, seed=seed)
    weight = next(name for name in ("weight", "weight_packed", "qweight") if name in tensors)
    if not lowest:
        tensors[weight].fill_(0x11111111)
    made = SublayerConverter(
        schema,
        activation,
        shape_n=256,
        shape_k=512,
        shape_n_stacks=[256],
        num_experts=2,
        has_bias=False,
        param_dtype="bfloat16",
        target=Target(sm),
        small={name: tensor for name, tensor in tensors.items() if name != weight},
    )
    if made.needs_scan:
        made.scan(tensors[weight])
    return made


@pytest.mark.parametrize("case", SEEN.values(), ids=SEEN)
def test_flags_and_early_refusals_are_those_recorded(case: dict[str, Any]) -> None:
    target = Target(case["sm"])
    expected = case["expect"]
    if expected == "incompatible":
        if "/".join(case["id"].split("/")[:3]) in LATE:
            # Weights without the lowest code would become float4e0m3, which these GPUs take.
            check_compatible(case["weight"], case["input"], case["dtype"], target)
            return
        with pytest.raises(UnsupportedError):
            check_compatible(case["weight"], case["input"], case["dtype"], target)
        return
    check_compatible(case["weight"], case["input"], case["dtype"], target)
    flags = next(entry["flags"] for entry in expected.values() if entry != "same")
    if case["dtype"] == "bfloat16" and not case["bias"]:
        got = fingerprint(converter(case["weight"], case["input"], case["sm"]).config, target)
        assert tuple(got) == FLAGS
        assert {name: got[name] for name in flags if name in got} == {
            name: flag for name, flag in flags.items() if name in got
        }


def test_the_probe_is_one_for_each_layout() -> None:
    same_layout = [
        [converter(INT4, None, 90), converter(INT4, None, 90, seed=2), converter(INT4, None, 90, lowest=False)],
        [converter(INT4, FP8, 90)],
        [converter(INT4, FP8, 89)],
        [converter(INT4, INT8, 90), converter(INT4, INT8, 80)],
        [converter(MXFP4, None, 90), converter(MXFP4, None, 120)],
        [converter(MXFP4, FP8, 90)],
        [converter(NVFP4, None, 90)],
    ]
    digests = [{probe_digest(made) for made in group} for group in same_layout]
    assert [len(group) for group in digests] == [1] * len(same_layout)
    assert len(set.union(*digests)) == len(same_layout)


@pytest.mark.parametrize(("schema", "activation"), [(INT4, FP8), (MXFP4, None), (NVFP4, None)])
def test_a_manifest_is_enough_for_the_probe(schema: dict[str, Any], activation: dict[str, Any] | None) -> None:
    made = converter(schema, activation, 90)
    weight, inputs = schema_to_dict(made.weight_schema), schema_to_dict(made.input_schema)
    assert weight_schema_of(weight) == made.weight_schema
    assert input_schema_of(inputs) == (made.input_schema, False)
    again = probe_digest_of(weight, inputs, param_dtype="bfloat16", has_bias=False, target=Target(90))
    assert again == probe_digest(made)


def test_the_probe_covers_a_bias() -> None:
    made = converter(INT4, None, 90)
    digest = probe_digest_of(made.weight_schema, None, param_dtype=torch.bfloat16, has_bias=True, target=Target(90))
    assert digest != probe_digest(made)


def test_activation_names() -> None:
    assert (*ACTIVATIONS, "checkpoint") == NAMES
    assert input_schema_for("a16", INT8) is None
    assert input_schema_for("int8", None) == {"quant_method": "humming", "dtype": "int8"}
    assert input_schema_for(CHECKPOINT, None) is None
    assert input_schema_for(CHECKPOINT, FP8) == {**FP8, "allow_fallback": True}
    with pytest.raises(UnsupportedError) as caught:
        input_schema_for("fp16", None)
    assert str(caught.value) == (
        "--activation: expected one of a16, fp8, fp8-block, mxfp8, int8, nvfp4, mxfp4, checkpoint, found 'fp16'"
    )


def test_an_activation_that_does_not_fit_is_replaced_only_when_allowed() -> None:
    with pytest.raises(UnsupportedError, match="found activation float8e4m3"):
        check_compatible(MXFP4, FP8, "bfloat16", Target(80))
    made = converter(MXFP4, {**FP8, "allow_fallback": True}, 80)
    assert str(made.config.a_dtype) in ("int8", "bfloat16")
