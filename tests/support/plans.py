"""Short ways to a plan, or to the text of its refusal, for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.support.checkpoints import Edit, make_checkpoint

from humming_convert.errors import ConvertError
from humming_convert.plan import ConversionPlan, LayerPlan, SublayerPlan
from humming_convert.plan_build import build_plan
from humming_convert.source import open_checkpoint

EXPERTS = "model.layers.0.mlp.experts"
W13, W2 = f"{EXPERTS} w13", f"{EXPERTS} w2"


def group_of(config: dict[str, Any]) -> dict[str, Any]:
    """The config group that `make_checkpoint` writes for compressed-tensors."""
    group: dict[str, Any] = config["quantization_config"]["config_groups"]["group_0"]
    return group


def first(text: str) -> str:
    """The first line of a refusal."""
    return text.splitlines()[0]


def shapes(part: SublayerPlan) -> dict[str, tuple[int, ...]]:
    """Stacked shapes by name."""
    return {tensor.name: tensor.shape for tensor in part.tensors}


def plan_of(path: Path, **options: Any) -> ConversionPlan:  # noqa: ANN401 - passed on
    """The plan of the checkpoint at `path`."""
    return build_plan(open_checkpoint(path), **options)


def plan_made(tmp_path: Path, *, edit: Edit | None = None, **options: Any) -> ConversionPlan:  # noqa: ANN401
    """The plan of a checkpoint that `make_checkpoint` writes."""
    return plan_of(make_checkpoint(tmp_path / "made", edit=edit, **options))


def refusal(
    tmp_path: Path,
    error: type[ConvertError],
    *,
    edit: Edit | None = None,
    **options: Any,  # noqa: ANN401 - passed on
) -> str:
    """The text of the error that the plan of a made checkpoint raises."""
    path = make_checkpoint(tmp_path / "made", edit=edit, **options)
    with pytest.raises(error) as raised:
        plan_of(path)
    assert type(raised.value) is error
    return str(raised.value)


def assert_whole(path: Path, plan: ConversionPlan) -> None:
    """Every source tensor is claimed by one part of one layer or passed through, and no byte is lost."""
    checkpoint = open_checkpoint(path)
    claimed: list[str] = list(plan.passthrough)
    for layer in plan.layers:
        own: list[str] = []
        for part in layer.sublayers:
            tensors = (*part.tensors, *part.input_tensors)
            own += [source.source for tensor in tensors for source in tensor.parts] + list(part.unused)
        assert sum(checkpoint.tensors[name].nbytes for name in own) == layer.source_bytes
        claimed += own
    assert sorted(claimed) == sorted(checkpoint.tensors)


def assert_ordered(layer: LayerPlan) -> None:
    """Parts follow each other by expert and then by stack, and their bytes fill the stacked tensor."""
    for part in layer.sublayers:
        for tensor in part.tensors:
            assert tensor.shape[0] == layer.num_experts
            keys = [(source.expert, source.stack) for source in tensor.parts]
            if keys[0][0] is not None:
                stacks = len(part.shape_n_stacks)
                assert keys == [(e, s) for e in range(layer.num_experts) for s in range(stacks)]
