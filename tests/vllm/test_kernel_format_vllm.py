"""vLLM 0.33's own conversion of a MoE layer, run on a stand-in layer on a CPU, gives the bytes that ours
gives."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.support.sublayers import INT4, MXFP4, NVFP4, W8A8, raw, sources

from humming_convert.activation import ACTIVATIONS
from humming_convert.errors import UnsupportedError
from humming_convert.host.target import emulate, humming
from humming_convert.kernel_format import PackedSublayer, convert_to_humming_moe_kernel_format
from humming_convert.target import SUPPORTED_SMS, Target

pytestmark = pytest.mark.vllm

UTILS = "vllm.model_executor.layers.quantization.utils.humming"
EXPERTS, HIDDEN, INTERMEDIATE = 2, 256, 384  # w2's K of 384 and w13's N of 768 need no padding; w2's N is 256
SHAPES = {"w13": (2 * INTERMEDIATE, HIDDEN), "w2": (HIDDEN, INTERMEDIATE)}
SCHEMAS: dict[str, dict[str, Any]] = {
    "fp8_tensor": {"quant_method": "fp8"},
    "fp8_block": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "gpt_oss": {"quant_method": "gpt_oss_mxfp4"},
    "mxfp4": MXFP4,
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True},
    "nvfp4": NVFP4,
    "w8a8": W8A8,
    "fp8_channel": {**W8A8, "format": "float-quantized", "type": "float"},
    "fp8_ct_block": {
        **W8A8,
        "format": "float-quantized",
        "type": "float",
        "strategy": "block",
        "block_structure": [128, 128],
    },
    "ct_mxfp4": {**NVFP4, "format": "mxfp4-pack-quantized", "strategy": "group", "group_size": 32},
    "int4_asym": {**INT4, "symmetric": False},
    "int4_channel": {**INT4, "strategy": "channel", "group_size": None},
}
SCHEMAS |= {f"int{bits}": {**INT4, "num_bits": bits} for bits in range(2, 9)}
STATIC_FP8 = {"quant_method": "fp8", "activation_scheme": "static"}


@pytest.fixture(scope="module")
def vllm() -> SimpleNamespace:
    """vLLM's two modules; the group is skipped, with the reason, where they do not import.

    HUMMING_EXPECT_VLLM names the version that must be there: then nothing is skipped.
    """
    expected = os.environ.get("HUMMING_EXPECT_VLLM")
    if expected is not None and importlib.metadata.version("vllm") != expected:
        pytest.fail(f"expected vLLM {expected}, found {importlib.metadata.version('vllm')}")
    try:
        return SimpleNamespace(
            moe=importlib.import_module(f"{UTILS}.moe"), schema=importlib.import_module(f"{UTILS}.schema")
        )
    except ImportError as error:
        if expected is not None:
            raise
        pytest.skip(f"vLLM 0.33's Python files do not import here: {error}")


def layer_of(tensors: dict[str, dict[str, torch.Tensor]], has_bias: bool) -> torch.nn.Module:
    """As much of vLLM's RoutedExperts as its conversion looks at."""
    layer = torch.nn.Module()
    for sublayer, named in tensors.items():
        for name, tensor in named.items():
            setattr(layer, f"{sublayer}_{name}", torch.nn.Parameter(tensor.clone(), requires_grad=False))
    layer.moe_config = SimpleNamespace(  # type: ignore[assignment]
        has_bias=has_bias,
        num_local_experts=EXPERTS,
        hidden_dim=HIDDEN,
        intermediate_size_per_partition=INTERMEDIATE,
        activation=SimpleNamespace(is_gated=True),
    )
    layer.params_dtype = torch.bfloat16  # type: ignore[assignment]
    layer.layer_name = "model.layers.0.mlp.experts"  # type: ignore[assignment]
    return layer


def source_layer(
    schema: dict[str, Any], activation: dict[str, Any] | None, has_bias: bool
) -> dict[str, dict[str, torch.Tensor]]:
    tensors = {}
    for seed, (name, (n, k)) in enumerate(SHAPES.items()):
        stacks = 2 if name == "w13" else 1
        tensors[name] = sources(schema, n=n, k=k, experts=EXPERTS, seed=seed, bias=has_bias, stacks=stacks)
        if activation == STATIC_FP8:
            tensors[name]["input_scale"] = torch.rand(EXPERTS, stacks) + 0.5
    return tensors


def theirs(
    vllm: SimpleNamespace,
    tensors: dict[str, dict[str, torch.Tensor]],
    schema: dict[str, Any],
    activation: dict[str, Any] | None,
    *,
    target: Target,
    has_bias: bool,
    allow_fallback: bool,
) -> dict[str, tuple[str, dict[str, torch.Tensor]]] | None:
    """LayerConfig and tensors of each sublayer; None when vLLM refuses the activation."""
    bases, layer = humming().schema, layer_of(tensors, has_bias)
    with emulate(target):
        try:
            configs = vllm.moe.convert_to_humming_moe_kernel_format(
                layer,
                weight_schema=bases.BaseWeightSchema.from_config(schema),
                input_schema=bases.BaseInputSchema.from_config(activation or {"quant_method": "humming"}),
                allow_input_schema_fallback=allow_fallback,
            )
        except ValueError as error:
            if "No compatible Humming input schema" in str(error):
                return None
            raise
    state = layer.state_dict()
    return {
        name: (
            config.to_str(),
            {key.removeprefix(f"{name}_"): state[key] for key in state if key.startswith(f"{name}_")},
        )
        for name, config in configs.items()
    }


def ours(
    tensors: dict[str, torch.Tensor],
    name: str,
    schema: dict[str, Any],
    activation: dict[str, Any] | None,
    *,
    target: Target,
    has_bias: bool,
) -> PackedSublayer:
    n, k = SHAPES[name]
    return convert_to_humming_moe_kernel_format(
        tensors,
        schema,
        activation,
        shape_n=n,
        shape_k=k,
        shape_n_stacks=[n // 2] * 2 if name == "w13" else [n],
        num_experts=EXPERTS,
        has_bias=has_bias,
        param_dtype="bfloat16",
        target=target,
    )


def compare(
    vllm: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
    schema: dict[str, Any],
    activation: dict[str, Any] | None,
    *,
    sm: int,
    has_bias: bool = False,
    allow_fallback: bool = False,
) -> bool:
    """Convert one layer both ways and compare every byte; False when both refuse it."""
    capability = SimpleNamespace(to_int=lambda: sm)
    platform = SimpleNamespace(get_device_capability=lambda: capability)
    monkeypatch.setattr(vllm.schema, "current_platform", platform)
    target = Target(sm)
    tensors = source_layer(schema, activation, has_bias)
    expected = theirs(
        vllm, tensors, schema, activation, target=target, has_bias=has_bias, allow_fallback=allow_fallback
    )
    wanted = activation if not allow_fallback or activation is None else {**activation, "allow_fallback": True}
    if expected is None:
        for name in SHAPES:
            with pytest.raises(UnsupportedError, match=f"sm{sm}"):
                ours(tensors[name], name, schema, wanted, target=target, has_bias=has_bias)
        return False
    for name, (config, packed) in expected.items():
        got = ours(tensors[name], name, schema, wanted, target=target, has_bias=has_bias)
        assert got.config.to_str() == config
        assert {key: (value.dtype, value.shape, raw(value)) for key, value in got.tensors.items()} == {
            key: (value.dtype, value.shape, raw(value)) for key, value in packed.items()
        }
    return True


@pytest.mark.parametrize("sm", [80, 90, 100, 120])
@pytest.mark.parametrize("schema", SCHEMAS.values(), ids=SCHEMAS)
def test_same_bytes_for_every_activation(
    vllm: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, schema: dict[str, Any], sm: int
) -> None:
    converted = [compare(vllm, monkeypatch, schema, item, sm=sm) for item in ACTIVATIONS.values()]
    assert converted[0]  # 16-bit activations always convert


@pytest.mark.parametrize("schema", SCHEMAS.values(), ids=SCHEMAS)
def test_same_bytes_with_bias(vllm: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, schema: dict[str, Any]) -> None:
    assert compare(vllm, monkeypatch, schema, None, sm=90, has_bias=True)


@pytest.mark.parametrize("sm", SUPPORTED_SMS[1:])
@pytest.mark.parametrize("name", ["fp8_tensor", "fp8_channel", "w8a8", "mxfp4", "nvfp4", "int4", "int4_asym"])
def test_same_choice_when_another_activation_may_take_its_place(
    vllm: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, name: str, sm: int
) -> None:
    for activation in (*ACTIVATIONS.values(), {"quant_method": "humming", "dtype": "float8e5m2"}):
        assert compare(vllm, monkeypatch, SCHEMAS[name], activation, sm=sm, allow_fallback=True)


@pytest.mark.parametrize("allow_fallback", [False, True])
def test_static_input_scales_are_kept(
    vllm: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, allow_fallback: bool
) -> None:
    fp8 = {"quant_method": "fp8"}
    assert compare(vllm, monkeypatch, fp8, STATIC_FP8, sm=90, allow_fallback=allow_fallback)
