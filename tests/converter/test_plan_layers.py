"""Which layers a plan takes, and when the checkpoint contradicts itself about them or their number of experts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.checkpoints import Edit, RawTensor, Tensors, bf16, make_checkpoint
from tests.support.plans import plan_made, plan_of, refusal

from humming_convert.errors import CheckpointError, NothingToConvertError, UnsupportedError
from humming_convert.source import open_checkpoint

EXPERTS = "model.layers.0.mlp.experts"
SECOND = "model.layers.1.mlp.experts"
FETCH = "fetch the missing shards"


def drop(tensors: Tensors, *heads: str) -> None:
    for name in [name for name in tensors if name.startswith(heads)]:
        del tensors[name]


def keep(tensors: Tensors, names: list[str]) -> None:
    for name in [name for name in tensors if name not in names]:
        del tensors[name]


def renamed(change: Callable[[str], str]) -> Edit:
    def edit(tensors: Tensors, config: dict[str, Any]) -> None:
        items = [(change(name), tensor) for name, tensor in tensors.items()]
        tensors.clear()
        tensors.update(items)

    return edit


def stated(**fields: Any) -> Edit:  # noqa: ANN401 - JSON values
    return lambda tensors, config: config.update(fields)


class TestNumberOfExperts:
    def test_the_router_tells_where_the_config_is_silent(self, tmp_path: Path) -> None:
        def edit(tensors: Tensors, config: dict[str, Any]) -> None:
            drop(tensors, f"{EXPERTS}.3.", f"{SECOND}.3.")
            del config["num_experts"]

        assert refusal(tmp_path, CheckpointError, edit=edit).splitlines() == [
            f"{layer}.experts: expected 4 experts, as {layer}.gate.weight [4, 256] has rows, found 3; {FETCH}"
            for layer in ("model.layers.0.mlp", "model.layers.1.mlp")
        ]

    @pytest.mark.parametrize(
        ("family", "form", "router"),
        [
            ("mixtral", "fp8_tensor", "model.layers.0.block_sparse_moe.gate.weight"),
            ("gpt_oss", "mxfp4_gpt_oss", "model.layers.0.mlp.router.weight"),
            ("deepseek_v3", "fp8_block", "model.layers.1.mlp.gate.weight"),
        ],
    )
    def test_routers_of_other_families(self, tmp_path: Path, family: str, form: str, router: str) -> None:
        def edit(tensors: Tensors, config: dict[str, Any]) -> None:
            tensors[router] = bf16(np.zeros((5, 256)))

        text = refusal(tmp_path, CheckpointError, family=family, format=form, edit=edit)
        assert f": expected 5 experts, as {router} [5, 256] has rows, found 4; {FETCH}" in text

    def test_a_correction_bias_tells_too(self, tmp_path: Path) -> None:
        def edit(tensors: Tensors, config: dict[str, Any]) -> None:
            drop(tensors, "model.layers.1.mlp.gate.weight")
            tensors["model.layers.1.mlp.gate.e_score_correction_bias"] = RawTensor("F32", np.zeros(6, np.float32))

        text = refusal(tmp_path, CheckpointError, family="deepseek_v3", edit=edit)
        assert "expected 6 experts, as model.layers.1.mlp.gate.e_score_correction_bias [6] has rows, found 4" in text

    def test_layers_without_routers_are_compared_with_each_other(self, tmp_path: Path) -> None:
        def edit(tensors: Tensors, config: dict[str, Any]) -> None:
            drop(tensors, f"{SECOND}.3.", "model.layers.0.mlp.gate", "model.layers.1.mlp.gate")
            del config["num_experts"]

        text = refusal(tmp_path, CheckpointError, edit=edit)
        router = "expected the router of converted experts, found none"
        assert text.splitlines() == [
            *(f"tensor model.layers.{layer}.mlp.gate.weight: {router}; {FETCH}" for layer in (0, 1)),
            f"{SECOND}: expected 4 experts, as {EXPERTS} has, found 3; {FETCH}",
        ]

    def test_a_bare_file_is_no_exception(self, tmp_path: Path) -> None:
        path = make_checkpoint(tmp_path / "m", format="fp8_tensor", edit=lambda t, c: drop(t, f"{SECOND}.3."))
        (path / "config.json").unlink()
        with pytest.raises(CheckpointError, match=f"{SECOND}: expected 4 experts, as model.layers.1.mlp.gate"):
            plan_of(path / "model.safetensors")


class TestNumbers:
    @pytest.mark.parametrize(
        ("old", "new", "number"),
        [
            (f"{EXPERTS}.0.", f"{EXPERTS}.000.", "'000'"),
            (f"{EXPERTS}.1.", f"{EXPERTS}.\u0661.", r"'\u0661'"),
            ("model.layers.1.", "model.layers.01.", "'01'"),
        ],
    )
    def test_a_number_in_another_form(self, tmp_path: Path, old: str, new: str, number: str) -> None:
        text = refusal(tmp_path, CheckpointError, edit=renamed(lambda name: name.replace(old, new)))
        expected = "expected numbers of layers and experts in digits 0 to 9, without leading zeros"
        first = text.splitlines()[0]
        assert first.startswith(f"tensor {new}")
        assert first.endswith(f" more: {expected}, found {number}")

    def test_a_second_copy_under_leading_zeros(self, tmp_path: Path) -> None:
        def edit(tensors: Tensors, config: dict[str, Any]) -> None:
            tensors |= {name.replace("layers.0.", "layers.00."): tensor for name, tensor in tensors.items()}

        assert refusal(tmp_path, CheckpointError, edit=edit).splitlines() == [
            "tensor model.layers.00.mlp.experts.0.gate_proj.weight and 23 more: expected numbers of layers and experts "
            "in digits 0 to 9, without leading zeros, found '00'"
        ]

    def test_two_layers_of_one_number(self, tmp_path: Path) -> None:
        def edit(tensors: Tensors, config: dict[str, Any]) -> None:
            tensors |= {name.removeprefix("model."): held for name, held in tensors.items() if "layers.0" in name}

        text = refusal(tmp_path, CheckpointError, edit=edit)
        assert text.splitlines()[0] == (
            "model.layers.0.mlp.experts: expected one MoE layer of number 0, found also layers.0.mlp.experts"
        )

    def test_ten_and_more(self, tmp_path: Path) -> None:
        layer = plan_made(tmp_path, layers=1, experts=12, hidden=128, intermediate=128).layers[0]
        assert layer.num_experts == 12


class TestPlaces:
    def test_an_unknown_prefix_is_no_missing_shard(self, tmp_path: Path) -> None:
        text = refusal(tmp_path, UnsupportedError, edit=renamed(lambda name: f"other.{name}"))
        assert text == (
            f"other.{EXPERTS} and 1 more: expected experts of qwen3_moe under layers.N.mlp.experts after model., "
            "nothing, model.language_model., language_model.model., language_model., thinker.model., language.model., "
            "llm.model., found them under another name; this place is not known here"
        )

    def test_quantized_experts_in_an_unknown_place_are_not_passed_over(self, tmp_path: Path) -> None:
        def edit(tensors: Tensors, config: dict[str, Any]) -> None:
            tensors |= {f"other.{name}": held for name, held in tensors.items() if name.startswith(EXPERTS)}

        text = refusal(tmp_path, UnsupportedError, edit=edit)
        assert text.startswith(f"other.{EXPERTS}: expected experts of qwen3_moe under layers.N.mlp.experts after ")

    def test_too_few_layers_in_the_config_of_a_family_without_token_prediction(self, tmp_path: Path) -> None:
        assert refusal(tmp_path, CheckpointError, edit=stated(num_hidden_layers=1)) == (
            f"{SECOND}: expected layers below 1, as config.json says, found layer 1"
        )

    @pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
    def test_more_layers_than_token_prediction_has(self, tmp_path: Path, family: str) -> None:
        edit = stated(num_hidden_layers=2, num_nextn_predict_layers=1)
        path = make_checkpoint(tmp_path / "a", family=family, layers=3, edit=edit)
        assert plan_of(path).notes == ("layer 2: multi-token prediction, passed through",)
        text = refusal(tmp_path, CheckpointError, family=family, layers=4, edit=edit)
        assert text == "model.layers.3.mlp.experts: expected layers below 3, as config.json says, found layer 3"

    def test_folders_that_stay_behind_are_noted(self, tmp_path: Path) -> None:
        path = make_checkpoint(tmp_path / "m")
        (path / "original").mkdir()
        (path / "model.gguf").write_bytes(b"x")
        assert plan_of(path).notes == ("model.gguf, original/: not copied",)

    def test_one_shard_of_several(self, tmp_path: Path) -> None:
        path = make_checkpoint(tmp_path / "m", shards=3)
        with pytest.raises(CheckpointError) as error:
            plan_of(path / "model-00002-of-00003.safetensors")
        assert str(error.value) == (
            "model-00002-of-00003.safetensors: expected a whole checkpoint, "
            "found one of the files that model.safetensors.index.json names; give the folder"
        )

    def test_one_shard_that_looks_like_another_format(self, tmp_path: Path) -> None:
        path = make_checkpoint(tmp_path / "m", layers=1, experts=1)
        names = list(open_checkpoint(path).tensors)
        only = [name for name in names if name.endswith("_proj.weight") and ".experts." in name]
        path = make_checkpoint(tmp_path / "n", layers=1, experts=1, edit=lambda t, c: keep(t, only))
        index = {"weight_map": dict.fromkeys(only, "model.safetensors") | {"x": "other.safetensors"}}
        (path / "model.safetensors.index.json").write_text(json.dumps(index))
        with pytest.raises(CheckpointError, match=r"names; give the folder$"):
            plan_of(path / "model.safetensors")

    def test_one_shard_without_experts(self, tmp_path: Path) -> None:
        path = make_checkpoint(tmp_path / "m", layers=1, edit=lambda t, c: keep(t, ["lm_head.weight"]))
        index = {"weight_map": {"lm_head.weight": "model.safetensors", "x": "other.safetensors"}}
        (path / "model.safetensors.index.json").write_text(json.dumps(index))
        with pytest.raises(NothingToConvertError) as error:
            plan_of(path / "model.safetensors")
        assert str(error.value) == (
            "nothing to convert: model.safetensors: it has no routed experts; "
            "it is one of the files that model.safetensors.index.json names: give the folder"
        )


class TestFields:
    @pytest.mark.parametrize(
        ("field", "value", "found"),
        [
            ("mlp_only_layers", 5, "a list of whole numbers, found '5'"),
            ("mlp_only_layers", "0", "a list of whole numbers, found '0'"),
            ("mlp_only_layers", {"0": 1}, "a list of whole numbers, found \"{'0': 1}\""),
            ("mlp_only_layers", [True], "a list of whole numbers, found '[True]'"),
            ("decoder_sparse_step", "2", "a whole number, found '2'"),
            ("decoder_sparse_step", [1], "a whole number, found '[1]'"),
            ("num_experts", 4.0, "a whole number, found '4.0'"),
            ("num_experts", "4", "a whole number, found '4'"),
            ("moe_intermediate_size", True, "a whole number, found 'True'"),
            ("hidden_size", -1, "a whole number, found '-1'"),
            ("num_hidden_layers", "2", "a whole number, found '2'"),
            ("num_hidden_layers", 10**30, "at most 10000, found 1e+30"),
        ],
    )
    def test_a_field_of_another_form(self, tmp_path: Path, field: str, value: object, found: str) -> None:
        text = refusal(tmp_path, CheckpointError, edit=stated(**{field: value}))
        assert text == f"config.json: {field}: expected {found}"

    def test_fields_that_are_null_are_silent(self, tmp_path: Path) -> None:
        edit = stated(mlp_only_layers=None, decoder_sparse_step=None, num_local_experts=None)
        assert len(plan_made(tmp_path, edit=edit).layers) == 2

    @pytest.mark.parametrize("value", ["int4", "auto", ["bfloat16"], 16])
    @pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
    def test_a_dtype_that_is_none(self, tmp_path: Path, key: str, value: object) -> None:
        def edit(tensors: Tensors, config: dict[str, Any]) -> None:
            del config["dtype"]
            config[key] = value

        path = make_checkpoint(tmp_path / "m", edit=edit)
        with pytest.raises(CheckpointError) as error:
            plan_of(path)
        assert str(error.value) == (
            f"config.json: {key}: expected bfloat16, float16 or float32, found {str(value)!r}; choose one with --dtype"
        )
        assert plan_of(path, dtype="float16").param_dtype == "float16"

    def test_float32_is_noted(self, tmp_path: Path) -> None:
        path = make_checkpoint(tmp_path / "m", dtype="float32")
        plan = plan_of(path)
        assert (plan.param_dtype, plan.notes) == (
            "bfloat16",
            ("config.json says float32: bfloat16 is used instead; --dtype chooses",),
        )
        assert plan_of(path, dtype="bfloat16").notes == ()
