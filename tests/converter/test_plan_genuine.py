"""Every genuine checkpoint gets the right plan or the right refusal."""

from __future__ import annotations

import re

import pytest
from tests.support.genuine import genuine
from tests.support.plans import assert_ordered, assert_whole, plan_of

from humming_convert.errors import NothingToConvertError, UnsupportedError
from humming_convert.formats import METHODS

INT4_G128 = "ct-pack-quantized"

# name: layers, experts, hidden, intermediate, family, format of every sublayer
CONVERTED: dict[str, tuple[list[int], int, int, int, str, str]] = {
    "hub-layout--gpt_oss-mxfp4": ([0, 1], 4, 64, 96, "gpt_oss", "mxfp4-gpt-oss"),
    "hub-layout--mixtral-fp8-per-tensor": ([0, 1], 4, 64, 96, "mixtral", "fp8-tensor"),
    "llmcompressor--deepseek_v3-W4A16": ([1], 4, 256, 256, "deepseek_v3", INT4_G128),
    "llmcompressor--glm4_moe-W4A16": ([1], 4, 256, 256, "glm4_moe", INT4_G128),
    "llmcompressor--mixtral-W4A16": ([0, 1], 4, 256, 384, "mixtral", INT4_G128),
    "llmcompressor--gpt_oss-NVFP4A16": ([0, 1], 4, 256, 96, "gpt_oss", "ct-nvfp4"),
    "llmcompressor--ernie4_5_moe-W4A16": ([1], 4, 256, 256, "ernie4_5_moe", INT4_G128),
    "llmcompressor--granitemoe-W4A16": ([0, 1], 4, 256, 384, "granitemoe", INT4_G128),
    "llmcompressor--jamba-W4A16": ([1], 4, 256, 384, "jamba", INT4_G128),
    "llmcompressor--lfm2_moe-W4A16": ([1], 4, 256, 256, "lfm2_moe", INT4_G128),
    "llmcompressor--minimax_m2-W4A16": ([0, 1], 4, 256, 384, "minimax_m2", INT4_G128),
    "llmcompressor--nemotron_h-W4A16": ([0], 4, 256, 256, "nemotron_h", INT4_G128),
    "llmcompressor--qwen3_moe-FP8_BLOCK": ([0, 1], 4, 256, 256, "qwen3_moe", "ct-float8"),
    "llmcompressor--qwen3_moe-FP8_DYNAMIC": ([0, 1], 4, 256, 256, "qwen3_moe", "ct-float8"),
    "llmcompressor--qwen3_moe-MXFP4": ([0, 1], 4, 256, 256, "qwen3_moe", "ct-mxfp4"),
    "llmcompressor--qwen3_moe-NVFP4": ([0, 1], 8, 256, 256, "qwen3_moe", "ct-nvfp4"),
    "llmcompressor--qwen3_moe-W3A16": ([0, 1], 4, 256, 256, "qwen3_moe", INT4_G128),
    "llmcompressor--qwen3_moe-W4A16": ([0, 1], 4, 256, 256, "qwen3_moe", INT4_G128),
    "llmcompressor--qwen3_moe-W4A16_ASYM": ([0, 1], 4, 256, 256, "qwen3_moe", INT4_G128),
    "llmcompressor--qwen3_moe-W8A16": ([0, 1], 4, 256, 256, "qwen3_moe", INT4_G128),
    "llmcompressor--qwen3_moe-W8A8": ([0, 1], 4, 256, 256, "qwen3_moe", "ct-int8"),
    "autoround--qwen3_moe-W4A16-auto_awq": ([0, 1], 8, 256, 256, "qwen3_moe", "awq"),
    "autoround--qwen3_moe-W4A16-auto_awq-asym": ([0, 1], 8, 256, 256, "qwen3_moe", "awq"),
    "llmcompressor--qwen3_moe-W4A8": ([0, 1], 4, 256, 256, "qwen3_moe", "ct-int8"),
    "autoround--mixtral-W4A16-auto_round": ([0, 1], 4, 256, 384, "mixtral", "gptq"),
    "autoround--qwen3_moe-W4A16-auto_gptq": ([0, 1], 8, 256, 256, "qwen3_moe", "gptq"),
    "autoround--qwen3_moe-W4A16-auto_gptq-asym": ([0, 1], 8, 256, 256, "qwen3_moe", "gptq"),
    "autoround--qwen3_moe-W4A16-auto_round_gptqmodel-asym": ([0, 1], 8, 256, 256, "qwen3_moe", "gptq"),
    "gptqmodel--gptq_sym": ([0, 1], 8, 256, 256, "qwen3_moe", "gptq"),
    "gptqmodel--gptq_asym_v1": ([0, 1], 8, 256, 256, "qwen3_moe", "gptq"),
    # Whether columns are in order is told by values, which are read while converting: see test_formats_gptq.
    "gptqmodel--gptq_desc": ([0, 1], 8, 256, 256, "qwen3_moe", "gptq"),
    "autoround--qwen3_moe-FP8_BLOCK-auto_round": ([0, 1], 8, 256, 256, "qwen3_moe", "fp8-block"),
    "autoround--qwen3_moe-MXFP4-auto_round": ([0, 1], 8, 256, 256, "qwen3_moe", "ct-mxfp4"),
}

# Where vLLM has a family's experts, if not in mlp.
PARENTS = {
    "mixtral": "block_sparse_moe",
    "granitemoe": "block_sparse_moe",
    "jamba": "feed_forward",
    "lfm2_moe": "feed_forward",
    "nemotron_h": "mixer",
}
METHOD = f"expected a quant_method among {', '.join(sorted(set(METHODS.values())))}, found"
LATER = "this method is not supported yet"
FORMAT = "expected a supported checkpoint format, found"
# name: what the message must say
REFUSED: dict[str, str] = {
    "llmcompressor--qwen3_moe-MXFP8": f"{FORMAT} MXFP8 (F8_E4M3 with exponent bytes); this format is not",
    "modelopt--gpt_oss-NVFP4_DEFAULT_CFG": f"{METHOD} 'modelopt'; {LATER}",
    "modelopt--kv": f"{METHOD} 'modelopt'; {LATER}",
    "modelopt--llama4_text-NVFP4_DEFAULT_CFG": f"{METHOD} 'modelopt'; {LATER}",
    "modelopt--qwen3_moe-FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG": f"{METHOD} 'modelopt'; {LATER}",
    "modelopt--qwen3_moe-FP8_DEFAULT_CFG": f"{METHOD} 'modelopt'; {LATER}",
    "modelopt--qwen3_moe-FP8_PER_CHANNEL_PER_TOKEN_CFG": f"{METHOD} 'modelopt'; {LATER}",
    "modelopt--qwen3_moe-MXFP8_DEFAULT_CFG": f"{METHOD} 'modelopt'; {LATER}",
    "modelopt--qwen3_moe-NVFP4_DEFAULT_CFG": f"{METHOD} 'modelopt'; {LATER}",
    "quark--qwen3_moe-fp8": f"{FORMAT} input_scale BF16 [], weight_scale BF16 [], weight F8_E4M3 [256, 256];",
    "quark--qwen3_moe-mxfp4": f"{FORMAT} weight U8 [256, 128], weight_scale U8 [256, 8];",
    "transformers-fp8--qwen3_moe": "expected each expert's tensors, or fused ones, found both",
}


@pytest.mark.parametrize("name", CONVERTED)
def test_plan(name: str) -> None:
    layers, experts, hidden, intermediate, family, form = CONVERTED[name]
    path = genuine(name)
    plan = plan_of(path)
    assert_whole(path, plan)
    parent, stacks = PARENTS.get(family, "mlp"), 1 if family == "nemotron_h" else 2
    assert [layer.layer_name for layer in plan.layers] == [
        f"model.layers.{n}.{parent}.experts" for n in layers
    ]
    for layer in plan.layers:
        assert_ordered(layer)
        assert (layer.num_experts, layer.hidden_size, layer.intermediate_size) == (
            experts,
            hidden,
            intermediate,
        )
        assert (layer.family, layer.is_gated) == (family, stacks == 2)
        w13, w2 = layer.sublayers
        assert (w13.format, w2.format) == (form, form)
        assert (w13.shape_n, w13.shape_k, w13.shape_n_stacks) == (
            stacks * intermediate,
            hidden,
            (intermediate,) * stacks,
        )
        assert (w2.shape_n, w2.shape_k, w2.shape_n_stacks) == (hidden, intermediate, (hidden,))


@pytest.mark.parametrize("name", REFUSED)
def test_refusal(name: str) -> None:
    with pytest.raises(UnsupportedError, match=re.escape(REFUSED[name])) as raised:
        plan_of(genuine(name))
    # The same reason is given once, not once per layer.
    assert len(raised.value.problems) <= 2


@pytest.mark.parametrize("name", ["transformers-bf16--gpt_oss", "transformers-bf16--mixtral"])
def test_nothing_to_convert(name: str) -> None:
    with pytest.raises(NothingToConvertError) as raised:
        plan_of(genuine(name))
    expected = f"nothing to convert: {name}: its routed experts are stored as BF16, not quantized"
    assert str(raised.value) == expected


def test_three_groups_give_each_layer_its_own_format() -> None:
    path = genuine("llmcompressor--mixed")
    plan = plan_of(path)
    assert_whole(path, plan)
    assert [layer.sublayers[0].format for layer in plan.layers] == ["ct-nvfp4", "ct-pack-quantized"]
    assert [layer.sublayers[1].format for layer in plan.layers] == ["ct-nvfp4", "ct-pack-quantized"]


def test_gpt_oss_keeps_its_alternating_rows_and_its_linear_twin_gets_them() -> None:
    fused = plan_of(genuine("hub-layout--gpt_oss-mxfp4")).layers[0]
    twin = plan_of(genuine("llmcompressor--gpt_oss-NVFP4A16")).layers[0]
    assert (fused.is_interleaved, fused.has_bias, fused.activation_function) == (True, True, "swigluoai")
    assert (twin.is_interleaved, twin.has_bias, twin.activation_function) == (True, True, "swigluoai")
    weight = next(tensor for tensor in twin.sublayers[0].tensors if tensor.is_weight)
    assert weight.is_interleaved


def test_static_input_scales_are_read_only_when_the_checkpoints_activations_are_wanted() -> None:
    path = genuine("hub-layout--mixtral-fp8-per-tensor")
    weight_only, as_told = plan_of(path), plan_of(path, activation="checkpoint")
    assert_whole(path, as_told)
    w13 = weight_only.layers[0].sublayers[0]
    assert (w13.input_tensors, len(w13.unused)) == ((), 8)
    assert w13.input_schema == {"quant_method": "fp8", "activation_scheme": "static"}
    w13 = as_told.layers[0].sublayers[0]
    assert [(tensor.name, tensor.dtype, tensor.shape) for tensor in w13.input_tensors] == [
        ("input_scale", "F32", (4, 2))
    ]
    assert w13.unused == ()
