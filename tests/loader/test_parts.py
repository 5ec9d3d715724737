"""The manifest of layers packed for tensor-parallel ranks: strict, and who may read what of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from tests.loader.test_manifest import LAYER, example

from humming_loader.entries import LayerEntry, Manifest, SublayerEntry, TensorParallelEntry
from humming_loader.errors import ManifestError, ParallelismError, PreshardedError, RankError, TensorError
from humming_loader.host_layout import Host, mend
from humming_loader.manifest import from_json, layer_metadata, parse_layer_metadata, stored_name, to_json
from humming_loader.parts import find_part, layer_names, part_name, tp_size_of, whole_intermediate_size
from humming_loader.slicing import local_intermediate_size, slice_layer


def part_of(layer: LayerEntry, rank: int, size: int, name: str = LAYER) -> LayerEntry:
    """`layer` as the entry of one rank, named so."""
    key = part_name(name, rank, size)

    def named(sub: str, entry: SublayerEntry) -> SublayerEntry:
        tensors = {one: replace(tensor, name=stored_name(key, sub, one)) for one, tensor in entry.tensors.items()}
        return replace(entry, tensors=tensors)

    whole = layer.intermediate_size * size
    begin = layer.intermediate_size * rank
    held = TensorParallelEntry(
        layer=name,
        rank=rank,
        size=size,
        intermediate_size=whole,
        begin=begin,
        end=begin + layer.intermediate_size,
    )
    sublayers = {sub: named(sub, entry) for sub, entry in layer.sublayers.items()}
    return replace(layer, sublayers=sublayers, tensor_parallel=held)


def cut_manifest(size: int = 2) -> Manifest:
    """A manifest with one layer, packed for `size` ranks."""
    manifest = example()
    layer = manifest.layers[LAYER]
    return replace(manifest, layers={part_name(LAYER, rank, size): part_of(layer, rank, size) for rank in range(size)})


def test_round_trip() -> None:
    manifest = cut_manifest()
    assert from_json(to_json(manifest)) == manifest
    assert tp_size_of(manifest.layers) == 2
    assert layer_names(manifest.layers) == (LAYER,)
    assert parse_layer_metadata(layer_metadata(manifest.layers, "0")) == manifest.layers


def test_whole_layers_say_so() -> None:
    manifest = example()
    assert json.loads(to_json(manifest))["layers"][LAYER]["tensor_parallel"] is None
    assert tp_size_of(manifest.layers) == 1
    assert layer_names(manifest.layers) == (LAYER,)
    assert whole_intermediate_size(manifest.layers[LAYER]) == 64


FIRST, SECOND = part_name(LAYER, 0, 2), part_name(LAYER, 1, 2)
PARTS = f"layers: parts of {LAYER}"
Edit = Callable[[dict[str, Any]], object]


def held(document: dict[str, Any], name: str) -> dict[str, Any]:
    """What an entry says of its rank."""
    found: dict[str, Any] = document["layers"][name]["tensor_parallel"]
    return found


REFUSALS: dict[str, tuple[Edit, str]] = {
    "unknown key": (
        lambda d: held(d, FIRST).update(extra=1),
        f"layers[{FIRST!r}].tensor_parallel: expected no other keys, found extra",
    ),
    "missing key": (
        lambda d: held(d, FIRST).pop("begin"),
        f"layers[{FIRST!r}].tensor_parallel.begin: expected a value, found nothing",
    ),
    "not said": (
        lambda d: d["layers"][FIRST].pop("tensor_parallel"),
        f"layers[{FIRST!r}].tensor_parallel: expected a value, found nothing",
    ),
    "size of one": (
        lambda d: held(d, FIRST).update(size=1),
        f"layers[{FIRST!r}].tensor_parallel.size: expected an integer of at least 2, found 1",
    ),
    "another rank than its name": (
        lambda d: held(d, FIRST).update(rank=1),
        f"layers[{FIRST!r}].tensor_parallel: expected that of {FIRST}, found rank 1 of 2 of {LAYER}",
    ),
    "rank missing": (lambda d: d["layers"].pop(SECOND), f"{PARTS}: expected the ranks 0 to 1 in order, found 0"),
    "whole layer among parts": (
        lambda d: d["layers"].update({LAYER: json.loads(to_json(example()))["layers"][LAYER]}),
        f"layers[{LAYER!r}].tensor_parallel: expected a size of 2, as others have, found 1",
    ),
    "ranks of different layers": (
        lambda d: d["layers"][SECOND].update(hidden_size=129),
        f"{PARTS}: expected the same layer in all of them, found different ones",
    ),
    "ranks of different widths": (
        lambda d: d["layers"][SECOND].update(intermediate_size=65),
        f"{PARTS}: expected the same layer in all of them, found different ones",
    ),
    "gap": (
        lambda d: held(d, SECOND).update(begin=65),
        f"{PARTS}: rank 1: expected at most 64 values of the intermediate size from 64 on, found 65 to 128",
    ),
    "more than it has room for": (
        lambda d: held(d, FIRST).update(end=65),
        f"{PARTS}: rank 0: expected at most 64 values of the intermediate size from 0 on, found 0 to 65",
    ),
    "backwards": (
        lambda d: held(d, SECOND).update(end=63),
        f"{PARTS}: rank 1: expected at most 64 values of the intermediate size from 64 on, found 64 to 63",
    ),
    "not all": (
        lambda d: held(d, SECOND).update(end=127),
        f"{PARTS}: expected all 128 values of the intermediate size, found 127",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refusals_name_field_expected_and_found(case: str) -> None:
    edit, message = REFUSALS[case]
    document = json.loads(to_json(cut_manifest()))
    edit(document)
    with pytest.raises(ManifestError) as caught:
        from_json(json.dumps(document))
    assert str(caught.value) == message


def test_a_rank_finds_its_own_part() -> None:
    manifest = cut_manifest()
    assert find_part(manifest, LAYER, 1, 2) is manifest.layers[SECOND]
    assert whole_intermediate_size(manifest.layers[SECOND]) == 128
    assert local_intermediate_size(LAYER, manifest.layers[SECOND], 2) == 64
    whole = example()
    assert find_part(whole, LAYER, 3, 4) is whole.layers[LAYER]


def test_other_sizes_are_refused_with_the_call_that_makes_them() -> None:
    with pytest.raises(PreshardedError) as caught:
        find_part(cut_manifest(), LAYER, 0, 4)
    assert str(caught.value) == (
        f"{LAYER}: expected a tensor-parallel size of 2, which its experts were cut for before they were packed, "
        "found 4. Convert again for this size: humming-convert org/model OUT --target sm90 --cuda 13.0 "
        "--activation a16 --dtype bfloat16 --tp 4 (with humming-kernels 0.1.19)"
    )
    with pytest.raises(PreshardedError) as caught:
        find_part(cut_manifest(), LAYER, 0, 1)
    assert "found 1 (one GPU, or expert parallelism). Convert" in str(caught.value)
    assert "--tp" not in caught.value.mend


def test_unknown_layers_and_ranks_out_of_range() -> None:
    with pytest.raises(TensorError, match=f"expected one of {LAYER}, found no such layer"):
        find_part(cut_manifest(), SECOND, 0, 2)
    with pytest.raises(RankError, match="expected a tensor-parallel rank below 2, found 2"):
        find_part(cut_manifest(), LAYER, 2, 2)


def test_a_part_is_its_own_rank_s_alone() -> None:
    part = cut_manifest().layers[FIRST]
    with pytest.raises(PreshardedError, match="Convert again for this size: humming-convert SRC OUT --tp 4"):
        local_intermediate_size(LAYER, part, 4)
    with pytest.raises(PreshardedError):
        local_intermediate_size(LAYER, part, 1)
    config: dict[str, object] = {"shape_n": 128, "shape_k": 128, "pad_shape_n": 0, "pad_shape_k": 0, "num_experts": 4}
    config |= {"a_dtype": "bfloat16", "b_dtype": "uint4", "c_dtype": "bfloat16"}
    text = json.dumps(config)
    part = replace(part, sublayers={key: replace(one, layer_config=text) for key, one in part.sublayers.items()})
    with pytest.raises(RankError, match="expected rank 0, whose part this is, found 1"):
        slice_layer(LAYER, part, tp_rank=1, tp_size=2)
    found = slice_layer(LAYER, part, tp_rank=0, tp_size=2, experts=(3, 1))
    assert (found.experts, found.intermediate_size, found.is_exact) == ((3, 1), 64, True)
    assert found.sublayers["w2"].tensors["weight"].is_whole


def test_the_call_that_mends_a_host_keeps_the_ranks() -> None:
    host = Host(100, "0.1.20", (13, 1))
    assert mend(cut_manifest(), host) == (
        "humming-convert org/model OUT --target sm100 --cuda 13.1 --activation a16 --dtype bfloat16 --tp 2 "
        "(with humming-kernels 0.1.20)"
    )


def test_sizes_that_vllm_itself_refuses_get_no_advice() -> None:
    assert "--tp 4" in str(ParallelismError(LAYER, 4, "reason", (1, 2), can_convert=True))
    assert "--tp" not in str(ParallelismError(LAYER, 4, "reason", (1, 2)))
