"""Which config group of compressed-tensors experts belong to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.support.checkpoints import Tensors
from tests.support.plans import EXPERTS, W13, first, group_of, plan_made, refusal

from humming_convert.errors import CheckpointError, ConvertError, UnsupportedError


class TestConfigGroups:
    def split(self, targets: list[list[str]], ignore: list[str] | None = None) -> Any:  # noqa: ANN401
        def edit(tensors: Tensors, config: dict[str, Any]) -> None:
            section = config["quantization_config"]
            group = group_of(config)
            section["format"] = "mixed-precision"
            section["ignore"] = ignore or []
            other = group | {"weights": group["weights"] | {"num_bits": 8}}
            section["config_groups"] = {
                "other": other | {"targets": ["re:.*self_attn.*"]},
                **{f"group_{i}": group | {"targets": given} for i, given in enumerate(targets)},
            }

        return edit

    @pytest.mark.parametrize(
        "targets",
        [
            ["Linear"],
            ["re:.*mlp\\.experts\\..*"],
            ["re:.*experts.*_proj$"],
            ["SomethingElse", "re:.*layers\\.[01]\\..*"],
        ],
    )
    def test_targets(self, tmp_path: Path, targets: list[str]) -> None:
        assert len(plan_made(tmp_path, format="ct_int4", edit=self.split([targets])).layers) == 2

    def test_a_pattern_goes_before_the_class(self, tmp_path: Path) -> None:
        def edit(tensors: Tensors, config: dict[str, Any]) -> None:
            self.split([["re:.*experts.*"]])(tensors, config)
            config["quantization_config"]["config_groups"]["other"]["targets"] = ["Linear"]

        part = plan_made(tmp_path, format="ct_int4", edit=edit).layers[0].sublayers[0]
        assert part.weight_schema["num_bits"] == 4

    @pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
    def test_patterns_may_use_the_names_that_transformers_has(self, tmp_path: Path, family: str) -> None:
        edit = self.split([["re:model\\.layers\\.\\d+\\.mlp\\.experts\\.\\d+\\.(gate|up|down)_proj$"]])
        assert len(plan_made(tmp_path, family=family, format="ct_int4", edit=edit).layers) == 2

    def test_no_group_at_all(self, tmp_path: Path) -> None:
        text = refusal(tmp_path, CheckpointError, format="ct_int4", edit=self.split([["re:nothing"]]))
        assert first(text) == (
            f"{W13}: expected a config group for {EXPERTS}.0.gate_proj, "
            "found only the targets re:.*self_attn.*, re:nothing"
        )

    def test_experts_of_one_layer_in_two_groups_that_say_the_same(self, tmp_path: Path) -> None:
        edit = self.split([["re:.*gate_proj"], ["re:.*experts.*_proj$"]])
        assert len(plan_made(tmp_path, format="ct_int4", edit=edit).layers) == 2

    def test_experts_of_one_layer_in_two_groups(self, tmp_path: Path) -> None:
        def edit(tensors: Tensors, config: dict[str, Any]) -> None:
            self.split([["re:.*experts\\.0\\..*"], ["re:.*experts\\.[123]\\..*"]])(tensors, config)
            groups = config["quantization_config"]["config_groups"]
            groups["group_1"] = {**groups["group_1"], "weights": {**groups["group_1"]["weights"], "num_bits": 8}}

        text = refusal(tmp_path, UnsupportedError, format="ct_int4", edit=edit)
        assert first(text) == (
            f"{W13}: expected one config group for all experts of a layer, "
            f"found {EXPERTS}.0.gate_proj in group_0, {EXPERTS}.1.gate_proj in group_1"
        )

    def test_a_pattern_that_is_no_pattern(self, tmp_path: Path) -> None:
        text = refusal(tmp_path, CheckpointError, format="ct_int4", edit=self.split([["re:(("]]))
        assert "found only the targets re:((, re:.*self_attn.*" in first(text)

    def test_shared_experts_ignore_lists_and_typos_do_not_matter(self, tmp_path: Path) -> None:
        ignore = ["re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*", "lm_head\0x"]
        edit = self.split([["Linear"]], ignore)
        assert len(plan_made(tmp_path, format="ct_int4", edit=edit).layers) == 2

    @pytest.mark.parametrize("text", ["mixed-precision", "marlin-24", "dense", "mxfp6-pack-quantized", ""])
    def test_a_format_that_humming_does_not_have(self, tmp_path: Path, text: str) -> None:
        def edit(tensors: Tensors, config: dict[str, Any]) -> None:
            group_of(config)["format"] = text
            config["quantization_config"]["format"] = text

        found = refusal(tmp_path, UnsupportedError, format="ct_int4", edit=edit)
        assert found == (
            f"{W13} and 3 more: expected a compressed-tensors format among pack-quantized, int-quantized, "
            f"float-quantized, naive-quantized, nvfp4-pack-quantized, mxfp4-pack-quantized, found {text!r}"
        )

    @pytest.mark.parametrize(
        ("change", "error"),
        [
            ({"config_groups": {}}, CheckpointError),
            ({"config_groups": None}, CheckpointError),
            ({"config_groups": {"g": {"targets": ["Linear"]}}}, CheckpointError),
            (
                {"config_groups": {"g": {"targets": ["Linear"], "weights": {"num_bits": "4"}}}},
                CheckpointError,
            ),
            ({"config_groups": {"g": None}}, CheckpointError),
        ],
    )
    def test_a_damaged_config(self, tmp_path: Path, change: dict[str, Any], error: type[ConvertError]) -> None:
        def edit(tensors: Tensors, config: dict[str, Any]) -> None:
            config["quantization_config"] |= change

        assert first(refusal(tmp_path, error, format="ct_int4", edit=edit)).startswith(f"{W13}: expected ")

    @pytest.mark.parametrize("form", ["ct_fp8_channel", "ct_w8a8", "ct_mxfp4", "ct_nvfp4", "ct_int4"])
    def test_tensors_that_are_not_what_the_config_says(self, tmp_path: Path, form: str) -> None:
        other = "float-quantized" if form == "ct_w8a8" else "int-quantized"

        def edit(tensors: Tensors, config: dict[str, Any]) -> None:
            group_of(config)["format"] = other

        text = first(refusal(tmp_path, CheckpointError, format=form, edit=edit))
        assert text.startswith(f"{W13}: expected {other} ")
        assert ", as the quantization config says, found " in text
