"""What a plan takes from config files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.checkpoints import Tensors, floats, make_checkpoint
from tests.support.plans import plan_made, plan_of, refusal

from humming_convert.errors import CheckpointError, UnsupportedError
from humming_convert.formats import METHODS
from humming_convert.plan import Step
from humming_convert.plan_build import build_plan
from humming_convert.source import open_checkpoint


class TestConfig:
    @pytest.mark.parametrize("method", ["fbgemm_fp8", "w4afp8", "moe_wna16", "experts_int8", "", None])
    def test_an_unknown_method_lists_the_known_ones(self, tmp_path: Path, method: str | None) -> None:
        def edit(tensors: Tensors, config: dict[str, Any]) -> None:
            config["quantization_config"] = {"quant_method": method, "a": 1}

        assert refusal(tmp_path, UnsupportedError, edit=edit) == (
            "config.json: quantization_config: expected a quant_method among "
            f"{', '.join(sorted(set(METHODS.values())))}, found {str(method).lower()!r}"
        )

    def test_an_unknown_family_lists_the_known_ones(self, tmp_path: Path) -> None:
        def edit(tensors: Tensors, config: dict[str, Any]) -> None:
            config["model_type"] = "strange"

        text = refusal(tmp_path, UnsupportedError, edit=edit)
        assert text.startswith("config.json: expected a model_type among mixtral, phimoe, minimax_m2, granitemoe, ")
        assert text.endswith(", found 'strange'; this family is not supported yet")

    def test_a_known_family_that_cannot_be_says_why(self, tmp_path: Path) -> None:
        def edit(tensors: Tensors, config: dict[str, Any]) -> None:
            config["model_type"] = "dbrx"

        text = refusal(tmp_path, UnsupportedError, edit=edit)
        assert text.startswith("config.json: expected each expert's rows in tensors or modules of their own, found ")

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
    def test_the_parameter_dtype_is_the_models(self, tmp_path: Path, stated: dict[str, str], expected: str) -> None:
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
