"""The plan's tensors are exactly those that Humming's own schemas ask for, in name, shape and dtype."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from humming.schema import BaseInputSchema, BaseWeightSchema
from tests.converter.test_plan_genuine import CONVERTED
from tests.support.checkpoints import make_checkpoint
from tests.support.genuine import genuine
from tests.support.plans import plan_of

from humming_convert.plan import Step, SublayerPlan
from humming_loader.dtypes import SAFETENSORS_DTYPES

INTEGERS = [
    f"ct_int{bits}{suffix}" for bits in range(2, 9) for suffix in ("", "_asym", "_channel", "_asym_channel")
]
MADE = [
    "fp8_tensor",
    "fp8_block",
    "ct_mxfp4",
    "ct_nvfp4",
    "awq",
    "awq_sym",
    "ct_w8a8",
    "ct_w8a8_asym",
    "ct_fp8_tensor",
    "ct_fp8_channel",
    "ct_fp8_block",
    *INTEGERS,
]
PLAIN_FLOATS = {torch.float16, torch.bfloat16, torch.float32}


def check(part: SublayerPlan, experts: int, param_dtype: torch.dtype) -> None:
    schema = BaseWeightSchema.from_config(part.weight_schema)
    wanted = schema.get_tensors_attrs(
        part.shape_n,
        part.shape_k,
        param_dtype,
        num_experts=experts,
        has_bias=part.has_bias,
        stack_size=len(part.shape_n_stacks),
    )
    # Humming lists it, and never reads it.
    wanted.pop("weight_shape", None)
    assert {tensor.name for tensor in part.tensors} == set(wanted)
    for tensor in part.tensors:
        if tensor.steps == (Step("awq_rows"),):  # in the packed form that the schema's own conversion would give
            assert tensor.is_weight
            wanted[tensor.name] |= {"shape": (experts, part.shape_n, part.shape_k // 8)}
        assert tensor.shape == tuple(wanted[tensor.name]["shape"])
        dtype = getattr(torch, str(SAFETENSORS_DTYPES[tensor.dtype].torch_name))
        expected = wanted[tensor.name]["dtype"]
        # Scales may stay in the float type of the file: the schema rounds them itself.
        assert dtype == expected or {dtype, expected} <= PLAIN_FLOATS, tensor.name
        assert tensor.name != "bias" or dtype == expected
    assert sum(tensor.is_weight for tensor in part.tensors) == 1


@pytest.mark.parametrize("name", [*CONVERTED, "llmcompressor--mixed"])
def test_genuine(name: str) -> None:
    plan = plan_of(genuine(name))
    for layer in plan.layers:
        for part in layer.sublayers:
            check(part, layer.num_experts, getattr(torch, plan.param_dtype))


@pytest.mark.parametrize("form", MADE)
def test_made(tmp_path: Path, form: str) -> None:
    path = make_checkpoint(tmp_path / "m", format=form, bias=form == "ct_int4", intermediate=384)
    plan = plan_of(path)
    for layer in plan.layers:
        for part in layer.sublayers:
            check(part, layer.num_experts, getattr(torch, plan.param_dtype))


def test_input_schemas_are_humming_s(tmp_path: Path) -> None:
    expected = {"ct_fp8_tensor": "input_scale", "ct_nvfp4": "input_global_scale", "fp8_tensor": "input_scale"}
    for form, name in expected.items():
        path = make_checkpoint(tmp_path / form, format=form, static=True)
        for part in plan_of(path, activation="checkpoint").layers[0].sublayers:
            assert part.input_schema is not None
            schema = BaseInputSchema.from_config(part.input_schema)
            stacks = len(part.shape_n_stacks)
            wanted = schema.get_tensors_attrs(part.shape_k, torch.bfloat16, num_experts=4, stack_size=stacks)
            assert set(wanted) == {name} == {tensor.name for tensor in part.input_tensors}
            assert part.input_tensors[0].shape == tuple(wanted[name]["shape"])


@pytest.mark.parametrize("form", ["ct_w8a8", "ct_fp8_channel", "ct_fp8_block", "fp8_block"])
def test_dynamic_input_schemas_need_no_tensor(tmp_path: Path, form: str) -> None:
    plan = plan_of(make_checkpoint(tmp_path / "m", format=form), activation="checkpoint")
    for part in plan.layers[0].sublayers:
        assert part.input_schema is not None
        schema = BaseInputSchema.from_config(part.input_schema)
        assert schema.get_tensors_attrs(part.shape_k, torch.bfloat16, num_experts=4, stack_size=2) == {}
        assert part.input_tensors == ()
