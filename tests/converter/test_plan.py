"""Plans of made checkpoints: what is claimed, what passes through, what the config may decide."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.checkpoints import FAMILIES, RawTensor, Tensors, bf16, floats, make_checkpoint
from tests.support.plans import assert_ordered, assert_whole, plan_made, plan_of, refusal

from humming_convert.errors import CheckpointError, NothingToConvertError, UnsupportedError
from humming_convert.plan import Step
from humming_convert.plan_build import build_plan
from humming_convert.source import open_checkpoint

EXPERTS = "model.layers.0.mlp.experts"


def rename(tensors: Tensors, old: str, new: str) -> None:
    for name in [name for name in tensors if old in name]:
        tensors[name.replace(old, new)] = tensors.pop(name)


@pytest.mark.parametrize("shards", [1, 16])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_with_companions_in_other_shards(tmp_path: Path, family: str, shards: int) -> None:
    form = "mxfp4_gpt_oss" if family == "gpt_oss" else "fp8_block"
    path = make_checkpoint(tmp_path / "m", family=family, format=form, shards=shards, layers=3)
    plan = plan_of(path)
    assert_whole(path, plan)
    dense = 1 if family in ("deepseek_v2", "deepseek_v3", "glm4_moe") else 0
    assert [int(layer.layer_name.split(".")[2]) for layer in plan.layers] == list(range(dense, 3))
    for layer in plan.layers:
        assert_ordered(layer)
    assert "model.embed_tokens.weight" in plan.passthrough
    assert not any(".experts." in name for name in plan.passthrough)


@pytest.mark.parametrize("names", [("gate_proj", "up_proj", "down_proj"), ("wgate", "up_proj", "down_proj")])
def test_a_quantizer_may_rename_the_projections(tmp_path: Path, names: tuple[str, ...]) -> None:
    def edit(tensors: Tensors, config: dict[str, Any]) -> None:
        for old, new in zip(("w1", "w3", "w2"), names, strict=True):
            rename(tensors, f".{old}.", f".{new}.")

    plan = plan_made(tmp_path, family="mixtral", format="ct_int4", edit=edit)
    parts = plan.layers[0].sublayers[0].tensors[0].parts
    assert [part.source.split(".")[-2] for part in parts[:2]] == list(names[:2])


def test_gate_goes_before_up_whatever_the_order_in_the_file(tmp_path: Path) -> None:
    def edit(tensors: Tensors, config: dict[str, Any]) -> None:
        backwards = list(tensors.items())[::-1]
        tensors.clear()
        tensors.update(backwards)

    plan = plan_made(tmp_path, family="mixtral", format="fp8_tensor", edit=edit)
    w13, w2 = plan.layers[0].sublayers
    assert [part.source.split(".")[-2] for part in w13.tensors[0].parts] == ["w1", "w3"] * 4
    assert [part.expert for part in w2.tensors[0].parts] == [0, 1, 2, 3]


def test_layers_for_token_prediction_pass_through(tmp_path: Path) -> None:
    def edit(tensors: Tensors, config: dict[str, Any]) -> None:
        config["num_hidden_layers"] = 2

    path = make_checkpoint(tmp_path / "m", family="deepseek_v3", layers=3, edit=edit)
    plan = plan_of(path)
    assert_whole(path, plan)
    assert [layer.layer_name for layer in plan.layers] == ["model.layers.1.mlp.experts"]
    assert "model.layers.2.mlp.experts.0.gate_proj.weight" in plan.passthrough
    assert plan.notes == ("layer 2: multi-token prediction, passed through",)


def test_experts_in_other_places_pass_through_and_are_named(tmp_path: Path) -> None:
    def edit(tensors: Tensors, config: dict[str, Any]) -> None:
        tensors["mtp.layers.0.mlp.experts.gate_up_proj"] = bf16(np.zeros((4, 8, 8)))

    path = make_checkpoint(tmp_path / "m", edit=edit)
    plan = plan_of(path)
    assert_whole(path, plan)
    assert "mtp.layers.0.mlp.experts.gate_up_proj" in plan.passthrough
    assert plan.notes == ("mtp.layers.0.mlp.experts: not experts of qwen3_moe, passed through",)


def unquantize_layer_1(tensors: Tensors, config: dict[str, Any]) -> None:
    for name in [name for name in tensors if "layers.1.mlp.experts" in name]:
        tensor = tensors.pop(name)
        if name.endswith(".weight"):
            tensors[name] = bf16(np.zeros(tensor.array.shape))


def test_a_layer_whose_experts_are_not_quantized_passes_through_with_a_note(tmp_path: Path) -> None:
    # The config does not say so in any way: facts decide.
    path = make_checkpoint(tmp_path / "m", edit=unquantize_layer_1)
    plan = plan_of(path)
    assert_whole(path, plan)
    assert [layer.layer_name for layer in plan.layers] == [EXPERTS]
    assert "model.layers.1.mlp.experts.0.up_proj.weight" in plan.passthrough
    assert plan.notes == ("layer 1: experts are not quantized, passed through",)


def test_an_ignore_entry_never_hides_quantized_experts(tmp_path: Path) -> None:
    def edit(tensors: Tensors, config: dict[str, Any]) -> None:
        # The bare word is a router's; as a substring it would hit every gate_proj.
        config["quantization_config"]["modules_to_not_convert"] = ["gate", "model.layers.1"]

    assert len(plan_made(tmp_path, edit=edit).layers) == 2


def test_nothing_to_convert(tmp_path: Path) -> None:
    text = refusal(tmp_path, NothingToConvertError, format="bf16")
    assert text == "nothing to convert: made: its routed experts are stored as BF16, not quantized"


def test_nothing_to_convert_although_the_config_promises(tmp_path: Path) -> None:
    def edit(tensors: Tensors, config: dict[str, Any]) -> None:
        config["quantization_config"] = {"quant_method": "quark"}

    text = refusal(tmp_path, NothingToConvertError, format="bf16", edit=edit)
    assert text == "nothing to convert: made: its routed experts are stored as BF16, not quantized"


def test_a_dense_model_has_nothing_to_convert(tmp_path: Path) -> None:
    def edit(tensors: Tensors, config: dict[str, Any]) -> None:
        for name in [name for name in tensors if ".experts." in name]:
            del tensors[name]

    assert refusal(tmp_path, NothingToConvertError, edit=edit) == (
        "nothing to convert: made: it has no routed experts"
    )


class TestBareFile:
    def test_no_config_is_needed_where_the_tensors_say_all(self, tmp_path: Path) -> None:
        path = make_checkpoint(tmp_path / "m", family="mixtral", format="fp8_tensor")
        (path / "config.json").unlink()
        plan = plan_of(path / "model.safetensors")
        assert plan.notes == ("no config.json: taken for mixtral from the names of its tensors",)
        assert (len(plan.layers), plan.param_dtype) == (2, "bfloat16")

    @pytest.mark.parametrize("form", ["awq", "ct_mxfp4", "ct_nvfp4"])
    def test_formats_that_explain_themselves(self, tmp_path: Path, form: str) -> None:
        path = make_checkpoint(tmp_path / "m", format=form)
        with_config = plan_of(path)
        (path / "config.json").unlink()
        bare = plan_of(path / "model.safetensors")
        for mine, theirs in zip(bare.layers, with_config.layers, strict=True):
            for part, other in zip(mine.sublayers, theirs.sublayers, strict=True):
                assert (part.tensors, part.weight_schema) == (other.tensors, other.weight_schema)

    def test_a_block_size_cannot_be_guessed(self, tmp_path: Path) -> None:
        path = make_checkpoint(tmp_path / "m", format="fp8_block")
        (path / "config.json").unlink()
        with pytest.raises(CheckpointError) as error:
            plan_of(path / "model.safetensors")
        assert str(error.value).splitlines()[0] == (
            f"{EXPERTS} w13: expected a block size [rows, columns] in the quantization config, found None; "
            "give the block size with --quant-config; it cannot be told from shapes"
        )

    def test_nor_the_width_of_packed_integers(self, tmp_path: Path) -> None:
        path = make_checkpoint(tmp_path / "m", format="ct_int4")
        (path / "config.json").unlink()
        with pytest.raises(CheckpointError) as error:
            plan_of(path / "model.safetensors")
        assert str(error.value).splitlines()[0] == (
            f"{EXPERTS} w13: expected a quantization config of compressed-tensors, "
            "found no quantization config; "
            "the width of the integers cannot be told from the file: give a config with --quant-config"
        )


class TestCompleteness:
    def test_a_missing_expert(self, tmp_path: Path) -> None:
        def edit(tensors: Tensors, config: dict[str, Any]) -> None:
            for name in [name for name in tensors if f"{EXPERTS}.2." in name]:
                del tensors[name]

        assert refusal(tmp_path, CheckpointError, edit=edit) == (
            f"{EXPERTS}: expected 4 experts, found 3: expert 2 missing; fetch the missing shards"
        )

    def test_missing_last_experts_are_told_by_the_config(self, tmp_path: Path) -> None:
        def edit(tensors: Tensors, config: dict[str, Any]) -> None:
            config["num_experts"] = 6

        assert refusal(tmp_path, CheckpointError, edit=edit).splitlines()[0] == (
            f"{EXPERTS}: expected 6 experts, found 4: expert 4, 5 missing; fetch the missing shards"
        )

    def test_more_experts_than_the_config_says(self, tmp_path: Path) -> None:
        def edit(tensors: Tensors, config: dict[str, Any]) -> None:
            config["num_experts"] = 3

        assert refusal(tmp_path, CheckpointError, edit=edit).splitlines()[0] == (
            f"{EXPERTS}: expected 3 experts, as config.json says, found 4"
        )

    @pytest.mark.parametrize("parameter", ["weight", "weight_scale_inv"])
    def test_a_missing_companion(self, tmp_path: Path, parameter: str) -> None:
        name = f"{EXPERTS}.1.up_proj.{parameter}"

        def edit(tensors: Tensors, config: dict[str, Any]) -> None:
            del tensors[name]

        assert refusal(tmp_path, CheckpointError, edit=edit) == (
            f"tensor {name}: expected it, as other experts or projections have it, found none; "
            "fetch the missing shards, or quantize again"
        )

    def test_a_missing_projection_of_one_expert(self, tmp_path: Path) -> None:
        def edit(tensors: Tensors, config: dict[str, Any]) -> None:
            for name in [name for name in tensors if f"{EXPERTS}.3.down_proj." in name]:
                del tensors[name]

        lines = refusal(tmp_path, CheckpointError, edit=edit).splitlines()
        assert [line.split(":")[0] for line in lines] == [
            f"tensor {EXPERTS}.3.down_proj.weight",
            f"tensor {EXPERTS}.3.down_proj.weight_scale_inv",
        ]

    def test_a_projection_that_no_expert_has(self, tmp_path: Path) -> None:
        def edit(tensors: Tensors, config: dict[str, Any]) -> None:
            for name in [name for name in tensors if ".up_proj." in name and ".0.mlp" in name]:
                del tensors[name]

        assert refusal(tmp_path, CheckpointError, edit=edit) == (
            f"{EXPERTS} w13: expected gate and up of every expert, found no up"
        )

    def test_a_missing_layer(self, tmp_path: Path) -> None:
        def edit(tensors: Tensors, config: dict[str, Any]) -> None:
            for name in [name for name in tensors if "layers.1.mlp.experts" in name]:
                del tensors[name]

        assert refusal(tmp_path, CheckpointError, layers=3, edit=edit) == (
            "experts: expected those of layer 1, as config.json says, found none; fetch the missing shards"
        )

    def test_experts_in_a_dense_layer(self, tmp_path: Path) -> None:
        def edit(tensors: Tensors, config: dict[str, Any]) -> None:
            config["first_k_dense_replace"] = 2

        assert refusal(tmp_path, CheckpointError, family="deepseek_v3", layers=3, edit=edit) == (
            "experts: expected none in dense layers, as config.json says, found those of layer 1"
        )

    def test_an_expert_of_another_shape(self, tmp_path: Path) -> None:
        name = f"{EXPERTS}.0.gate_proj.weight"

        def edit(tensors: Tensors, config: dict[str, Any]) -> None:
            tensors[name] = RawTensor("F8_E4M3", np.zeros((128, 256), np.uint8))

        assert refusal(tmp_path, CheckpointError, edit=edit) == (
            f"tensor {name}: expected F8_E4M3 [256, 256], as most experts have it, found F8_E4M3 [128, 256]"
        )

    def test_an_expert_of_another_dtype(self, tmp_path: Path) -> None:
        name = f"{EXPERTS}.2.down_proj.weight_scale_inv"

        def edit(tensors: Tensors, config: dict[str, Any]) -> None:
            tensors[name] = bf16(np.ones((2, 2)))

        assert refusal(tmp_path, CheckpointError, edit=edit) == (
            f"tensor {name}: expected F32 [2, 2], as most experts have it, found BF16 [2, 2]"
        )

    @pytest.mark.parametrize("name", [f"{EXPERTS}.0.gate_proj.strange", f"{EXPERTS}.0.gate_proj.weight.more"])
    def test_an_unknown_companion_is_never_dropped(self, tmp_path: Path, name: str) -> None:
        def edit(tensors: Tensors, config: dict[str, Any]) -> None:
            tensors[name] = floats(np.ones(3), "F32")

        assert refusal(tmp_path, CheckpointError, edit=edit) == (
            f"tensor {name}: expected only tensors that the format knows, found F32 [3]"
        )

    def test_an_unknown_projection_is_never_dropped(self, tmp_path: Path) -> None:
        name = f"{EXPERTS}.0.side_proj.weight"

        def edit(tensors: Tensors, config: dict[str, Any]) -> None:
            tensors[name] = floats(np.ones(3), "F32")

        assert refusal(tmp_path, CheckpointError, edit=edit) == (
            f"tensor {name}: expected only tensors of experts' projections beside converted ones, "
            "found an unknown name"
        )

    def test_two_names_for_one_projection(self, tmp_path: Path) -> None:
        def edit(tensors: Tensors, config: dict[str, Any]) -> None:
            tensors[f"{EXPERTS}.0.w1.weight"] = tensors[f"{EXPERTS}.0.gate_proj.weight"]

        text = refusal(tmp_path, CheckpointError, edit=edit)
        assert text.startswith(
            f"tensor {EXPERTS}.0.w1.weight: expected one name for it, found also {EXPERTS}.0.g"
        )

    @pytest.mark.parametrize(
        ("field", "value", "expected"),
        [
            ("hidden_size", 512, f"{EXPERTS}: expected hidden_size 512, as config.json says, found 256"),
            (
                "moe_intermediate_size",
                128,
                f"{EXPERTS}: expected moe_intermediate_size 128, as config.json says, found 256",
            ),
        ],
    )
    def test_sizes_are_compared_with_the_config(
        self, tmp_path: Path, field: str, value: int, expected: str
    ) -> None:
        def edit(tensors: Tensors, config: dict[str, Any]) -> None:
            config[field] = value

        assert refusal(tmp_path, CheckpointError, edit=edit).splitlines()[0] == expected

    def test_gate_up_and_down_must_fit_each_other(self, tmp_path: Path) -> None:
        def edit(tensors: Tensors, config: dict[str, Any]) -> None:
            for name in [name for name in tensors if ".experts." in name and ".down_proj." in name]:
                if name.endswith(".weight"):
                    tensors[name] = RawTensor("F8_E4M3", np.zeros((256, 384), np.uint8))
                else:
                    tensors[name] = floats(np.ones((2, 3)), "F32")

        assert refusal(tmp_path, CheckpointError, edit=edit).splitlines()[0] == (
            f"{EXPERTS}: expected gate and up 384 x 256, as down 256 x 384 asks, found 256 and 256 x 256"
        )

    def test_all_problems_are_told_at_once(self, tmp_path: Path) -> None:
        def edit(tensors: Tensors, config: dict[str, Any]) -> None:
            del tensors[f"{EXPERTS}.1.up_proj.weight"]
            del tensors["model.layers.1.mlp.experts.0.down_proj.weight_scale_inv"]
            tensors[f"{EXPERTS}.0.gate_proj.odd"] = floats(np.ones(1), "F32")

        assert len(refusal(tmp_path, CheckpointError, edit=edit).splitlines()) == 3


class TestConfig:
    @pytest.mark.parametrize("method", ["fbgemm_fp8", "w4afp8", "moe_wna16", "experts_int8", "", None])
    def test_an_unknown_method_lists_the_known_ones(self, tmp_path: Path, method: str | None) -> None:
        def edit(tensors: Tensors, config: dict[str, Any]) -> None:
            config["quantization_config"] = {"quant_method": method, "a": 1}

        assert refusal(tmp_path, UnsupportedError, edit=edit) == (
            "config.json: quantization_config: expected a quant_method among auto-round, awq, "
            f"compressed-tensors, fp8, mxfp4, found {str(method).lower()!r}"
        )

    def test_activation_order_gptq(self, tmp_path: Path) -> None:
        def edit(tensors: Tensors, config: dict[str, Any]) -> None:
            config["quantization_config"] = {"quant_method": "gptq", "desc_act": True}

        assert refusal(tmp_path, UnsupportedError, edit=edit) == (
            "config.json: quantization_config: expected weights in the order of their columns, "
            "found GPTQ with desc_act; "
            "Humming's kernels have no g_idx, which activation order needs: use desc_act false"
        )

    def test_an_unknown_family_lists_the_known_ones(self, tmp_path: Path) -> None:
        def edit(tensors: Tensors, config: dict[str, Any]) -> None:
            config["model_type"] = "strange"

        assert refusal(tmp_path, UnsupportedError, edit=edit) == (
            "config.json: expected a model_type among mixtral, qwen2_moe, qwen3_moe, deepseek_v2, "
            "deepseek_v3, glm4_moe, gpt_oss, found 'strange'; this family is not supported yet"
        )

    @pytest.mark.parametrize(
        ("stated", "expected"),
        [
            ({"dtype": "float16"}, "float16"),
            ({"torch_dtype": "torch.float16"}, "float16"),
            ({"dtype": "bfloat16"}, "bfloat16"),
            ({"dtype": "float32"}, "bfloat16"),
            ({}, "bfloat16"),
        ],
    )
    def test_the_parameter_dtype_is_the_models(
        self, tmp_path: Path, stated: dict[str, str], expected: str
    ) -> None:
        def edit(tensors: Tensors, config: dict[str, Any]) -> None:
            del config["dtype"]
            config.update(stated)

        assert plan_made(tmp_path, edit=edit).param_dtype == expected

    def test_the_parameter_dtype_can_be_given(self, tmp_path: Path) -> None:
        path = make_checkpoint(tmp_path / "m")
        assert plan_of(path, dtype="float16").param_dtype == "float16"

    def test_half_precision_scales_in_a_bfloat16_model_are_reported(self, tmp_path: Path) -> None:
        path = make_checkpoint(tmp_path / "m", format="awq", dtype="bfloat16")
        note = "scales stored as F16 is rounded to bfloat16; --dtype float16 keeps it exact"
        assert plan_of(path).notes == (note,)
        assert plan_of(path, dtype="float16").notes == ()

    def test_a_bias_becomes_the_parameter_dtype(self, tmp_path: Path) -> None:
        def edit(tensors: Tensors, config: dict[str, Any]) -> None:
            for name in [name for name in tensors if name.endswith("_proj.bias")]:
                tensors[name] = floats(np.ones(tensors[name].array.shape), "F16")

        plan = plan_made(tmp_path, format="ct_int4", bias=True, edit=edit)
        rule = next(tensor for tensor in plan.layers[0].sublayers[0].tensors if tensor.name == "bias")
        assert (rule.dtype, rule.steps) == ("BF16", (Step("to_dtype", (("dtype", "bfloat16"),)),))

    def test_a_quant_config_file_can_mend_the_config(self, tmp_path: Path) -> None:
        path = make_checkpoint(tmp_path / "m", format="fp8_block")
        config = json.loads((path / "config.json").read_text())
        quantization = config.pop("quantization_config")
        (path / "config.json").write_text(json.dumps(config))
        with pytest.raises(CheckpointError, match="a block size"):
            plan_of(path)
        (tmp_path / "q.json").write_text(json.dumps(quantization))
        assert len(build_plan(open_checkpoint(path, tmp_path / "q.json")).layers) == 2


class TestFused:
    def test_every_fused_tensor_must_hold_as_many_experts(self, tmp_path: Path) -> None:
        def edit(tensors: Tensors, config: dict[str, Any]) -> None:
            tensors[f"{EXPERTS}.down_proj_bias"] = bf16(np.zeros((3, 256)))

        text = refusal(tmp_path, CheckpointError, family="gpt_oss", format="mxfp4_gpt_oss", edit=edit)
        assert text == f"{EXPERTS}: expected fused tensors that hold as many experts, found [3, 4]"

    def test_no_experts_at_all(self, tmp_path: Path) -> None:
        text = refusal(tmp_path, CheckpointError, family="gpt_oss", format="mxfp4_gpt_oss", experts=0)
        assert text.splitlines()[0] == f"{EXPERTS}: expected fused tensors that hold experts, found none"

    def test_a_missing_bias(self, tmp_path: Path) -> None:
        def edit(tensors: Tensors, config: dict[str, Any]) -> None:
            del tensors[f"{EXPERTS}.down_proj_scales"]

        text = refusal(tmp_path, CheckpointError, family="gpt_oss", format="mxfp4_gpt_oss", edit=edit)
        assert text == (
            f"{EXPERTS} w2: expected blocks U8 and scales U8, "
            "found blocks U8 [4, 256, 8, 16], bias BF16 [4, 256]"
        )
