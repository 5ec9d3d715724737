"""How a plan is cut for tensor-parallel ranks, and what cannot be cut: decided from headers alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.support.checkpoints import make_checkpoint
from tests.support.plans import plan_made, plan_of

from humming_convert.errors import UnsupportedError
from humming_convert.plan import ConversionPlan, Cut, LayerPlan, Run
from humming_convert.tensor_parallel import cut_layers, possible_sizes

EXPERTS = "model.layers.0.mlp.experts"


def cut_plan(path: Path, **options: Any) -> ConversionPlan:  # noqa: ANN401 - passed on
    """The plan of a checkpoint that `make_checkpoint` writes, for two ranks."""
    return plan_of(make_checkpoint(path / "made", **options), tp_size=2)


def cuts(layer: LayerPlan) -> dict[str, Cut | None]:
    """The cut of every tensor by sublayer and name."""
    return {f"{part.name} {one.name}": one.cut for part in layer.sublayers for one in part.tensors}


def test_gate_and_up_are_cut_each_and_down_by_columns(tmp_path: Path) -> None:
    plan = cut_plan(tmp_path, format="ct_int4_asym", group_size=32, layers=1, intermediate=192)
    (layer,) = plan.layers
    assert (layer.layer_name, layer.intermediate_size, plan.tp_size) == (EXPERTS, 192, 2)
    assert plan.packed == layer.ranks
    rank = layer.ranks[1]
    assert rank.layer_name == f"{EXPERTS}.tp1of2"
    assert rank.part is not None
    assert (rank.part.begin, rank.part.end, rank.intermediate_size) == (96, 192, 96)
    w13, w2 = rank.sublayers
    assert (w13.shape_n, w13.shape_k, w13.shape_n_stacks) == (192, 256, (96, 96))
    assert (w2.shape_n, w2.shape_k, w2.shape_n_stacks) == (256, 96, (256,))
    rows = (Run(96, 96, 96), Run(288, 96, 96))
    assert cuts(rank) == {
        "w13 weight_packed": Cut(0, 384, rows),
        "w13 weight_scale": Cut(0, 384, rows),
        "w13 weight_zero_point": Cut(0, 48, (Run(12, 12, 12), Run(36, 12, 12))),
        "w2 weight_packed": Cut(1, 24, (Run(12, 12, 12),)),
        "w2 weight_scale": Cut(1, 6, (Run(3, 3, 3),)),
        "w2 weight_zero_point": Cut(1, 6, (Run(3, 3, 3),)),
    }
    assert [tensor.shape for tensor in w13.tensors] == [(4, 192, 32), (4, 192, 8), (4, 24, 8)]
    assert [tensor.whole_shape for tensor in w13.tensors] == [(4, 384, 32), (4, 384, 8), (4, 48, 8)]
    assert sum(part.source_bytes for part in layer.ranks) == layer.source_bytes


def test_alternating_rows_are_cut_together_and_a_bias_is_added_once(tmp_path: Path) -> None:
    plan = cut_plan(tmp_path, family="gpt_oss", format="mxfp4_gpt_oss", layers=1, intermediate=160)
    first, second = plan.packed
    assert (first.intermediate_size, second.intermediate_size) == (128, 128)
    assert cuts(first)["w13 weight"] == Cut(0, 320, (Run(0, 192, 256),))
    assert cuts(second)["w13 weight"] == Cut(0, 320, (Run(192, 128, 256),))
    assert cuts(second)["w2 weight_scale"] == Cut(1, 5, (Run(3, 2, 4),))
    assert cuts(first)["w2 bias"] == Cut(0, 256, (Run(0, 256, 256),))
    assert cuts(second)["w2 bias"] == Cut(0, 256, (Run(0, 0, 256),))


def test_scales_of_rows_and_of_projections_stay_whole(tmp_path: Path) -> None:
    channel = cut_plan(tmp_path / "a", format="ct_fp8_channel", layers=1).packed[1]
    assert cuts(channel)["w2 weight_scale"] is None
    tensor = cut_plan(tmp_path / "b", format="fp8_tensor", layers=1).packed[1]
    assert cuts(tensor)["w13 weight_scale"] is None
    assert cuts(tensor)["w2 weight_scale"] is None


def test_blocks_that_do_not_come_out_even_are_made_up_with_scales_of_one(tmp_path: Path) -> None:
    last = cut_plan(tmp_path, layers=1, intermediate=384).packed[1]
    assert cuts(last)["w13 weight_scale_inv"] == Cut(0, 6, (Run(2, 1, 2), Run(5, 1, 2)), 1.0)
    assert cuts(last)["w13 weight"] == Cut(0, 768, (Run(256, 128, 256), Run(640, 128, 256)), 0.0)


def test_one_rank_is_a_whole_layer(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "made", layers=1)
    assert plan_of(path, tp_size=1) == plan_of(path)
    assert plan_of(path).packed == plan_of(path).layers


REFUSALS: list[tuple[str, int, dict[str, Any], str]] = [
    (
        "ct_int4",
        3,
        {"intermediate": 256},
        "expected an intermediate size that 3 divides, as vLLM asks, found 256; tensor-parallel sizes that work: 1, 2",
    ),
    (
        "ct_int4",
        8,
        {"intermediate": 768},
        "expected a rank's part of 768 to be a multiple of 128, as w2 weight_scale asks, found 96; "
        "tensor-parallel sizes that work: 1, 2, 3, 6",
    ),
    (
        "ct_int4_channel",
        2,
        {"intermediate": 96},
        "expected a rank's part of 96 to be a multiple of 32, found 48; tensor-parallel sizes that work: 1, 3",
    ),
    (
        "awq",
        2,
        {"intermediate": 128},
        "expected a rank's part of 128 to be a multiple of 128, as w2 scales asks, found 64; "
        "tensor-parallel sizes that work: 1",
    ),
    (
        "ct_mxfp4",
        4,
        {"intermediate": 192},
        "expected a rank's part of 192 to be a multiple of 32, found 48; tensor-parallel sizes that work: 1, 2, 3, 6",
    ),
    (
        "fp8_block",
        2,
        {"intermediate": 192},
        "expected an intermediate and a hidden size in whole blocks of 128 x 128, as vLLM asks, found 192 and 256; "
        "tensor-parallel sizes that work: 1",
    ),
    (
        "fp8_block",
        4,
        {"intermediate": 256, "block": (128, 64)},
        "expected a rank's part of 256 in whole blocks of 128 x 64, found 64; tensor-parallel sizes that work: 1, 2",
    ),
    (
        "fp8_block",
        4,
        {"intermediate": 256, "bias": True},
        "expected a rank's part of 256 in whole blocks of 128 x 128, found 64; tensor-parallel sizes that work: 1, 2",
    ),
    (
        "ct_fp8_channel",
        2,
        {"intermediate": 100},
        "expected a rank's part of 100 to be a multiple of 4, found 50; tensor-parallel sizes that work: 1, 5, 25",
    ),
]


@pytest.mark.parametrize(("format", "tp", "options", "message"), REFUSALS)
def test_refusals_name_the_sizes_that_work(
    tmp_path: Path, format: str, tp: int, options: dict[str, Any], message: str
) -> None:
    path = make_checkpoint(tmp_path / "made", format=format, **options)
    with pytest.raises(UnsupportedError) as caught:
        plan_of(path, tp_size=tp)
    assert str(caught.value) == f"{EXPERTS} and 1 more: {message}"


def test_sizes_that_work_are_those_that_a_plan_is_made_for(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "made", "gpt_oss", "mxfp4_gpt_oss", layers=1, intermediate=96)
    (layer,) = plan_of(path).layers
    # Any number of ranks that divides 96: vLLM deals whole blocks out until there are none.
    assert possible_sizes(layer) == (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48)


def test_tensors_of_unknown_form_are_not_cut(tmp_path: Path) -> None:
    (layer,) = plan_made(tmp_path, format="ct_int4", group_size=32, layers=1).layers
    w13, w2 = layer.sublayers
    odd = replace(w2, tensors=(*w2.tensors[:-1], replace(w2.tensors[-1], shape=(4, 256, 8, 1))))
    with pytest.raises(UnsupportedError, match=r"tensors that can be cut along K, found weight_scale of shape"):
        cut_layers([replace(layer, sublayers=(w13, odd))], 2)


def test_formats_that_are_shared_out_differently_are_not_cut(tmp_path: Path) -> None:
    (layer,) = plan_made(tmp_path / "a", layers=1, intermediate=384).layers
    (other,) = plan_made(tmp_path / "b", format="ct_fp8_channel", layers=1, intermediate=384).layers
    with pytest.raises(UnsupportedError, match="in formats that are shared out alike, found ct-float8 and fp8-block"):
        cut_layers([replace(layer, sublayers=(other.sublayers[0], layer.sublayers[1]))], 2)
