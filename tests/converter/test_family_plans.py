"""A tiny checkpoint of every family gets the plan that its own definition asks for."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.family_case import Case
from tests.support.family_cases import CASES
from tests.support.family_checkpoints import expert_tensors, make_family, make_values, other_tensors
from tests.support.plans import assert_ordered, assert_whole, plan_of

from humming_convert.families import BY_MODEL_TYPE, FAMILIES

IDS = [f"{number}-{case.model_type}" for number, case in enumerate(CASES)]


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_plan_of_each_family(case: Case, tmp_path: Path) -> None:
    format = "fp8_block" if case.stacked else "ct_fp8_channel"
    path = make_family(tmp_path / "m", case, format)
    plan = plan_of(path)
    assert_whole(path, plan)
    assert [layer.layer_name for layer in plan.layers] == [case.vllm.format(layer) for layer in case.layers]
    for index, layer in enumerate(plan.layers):
        assert_ordered(layer)
        assert layer.family == BY_MODEL_TYPE[case.model_type].name
        assert (layer.num_experts, layer.hidden_size, layer.intermediate_size) == (
            case.experts,
            case.hidden,
            case.intermediate,
        )
        activation = case.activations[index] if case.activations else case.activation
        assert (layer.activation_function, layer.is_gated, layer.is_interleaved) == (activation, case.gated, False)
        assert not layer.has_bias
        w13, w2 = layer.sublayers
        stacks = 2 if case.gated else 1
        assert w13.shape_n_stacks == (case.intermediate,) * stacks
        assert (w13.shape_n, w13.shape_k) == (stacks * case.intermediate, case.hidden)
        assert (w2.shape_n, w2.shape_k, w2.shape_n_stacks) == (case.hidden, case.intermediate, (case.hidden,))
        weight = next(tensor for tensor in w13.tensors if tensor.is_weight)
        names = [name for name in case.names[:2] if name is not None]
        # Gate first, then up.
        assert [part.source.split(".")[-2] for part in weight.parts[:stacks]] == names
    values, _ = make_values(case, format)
    assert set(plan.passthrough) == set(other_tensors(case))
    assert not set(plan.passthrough) & set(expert_tensors(case, values))
    assert any("has no model of" in note for note in plan.notes) is not case.served


def test_every_row_has_a_case() -> None:
    own = {"gpt_oss", "ernie4_5_vl_moe"}  # made elsewhere: fused, and two kinds of experts
    assert {BY_MODEL_TYPE[case.model_type].name for case in CASES} | own == {row.name for row in FAMILIES}
