"""Plans of made checkpoints: what is claimed and what passes through."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.checkpoints import FAMILIES, Tensors, bf16, make_checkpoint
from tests.support.plans import EXPERTS, assert_ordered, assert_whole, plan_made, plan_of, refusal

from humming_convert.errors import CheckpointError, NothingToConvertError


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
    assert plan.notes == ("mtp.layers.0.mlp.experts: outside of the language model's layers, passed through",)


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

    assert refusal(tmp_path, NothingToConvertError, edit=edit) == ("nothing to convert: made: it has no routed experts")


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
