"""Which bytes a rank needs: worked examples on small layers, and refusals with the sizes that work."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import pytest

from humming_loader.entries import LayerEntry, SublayerEntry, TensorEntry
from humming_loader.errors import ManifestError, ParallelismError, RankError
from humming_loader.fingerprint import FLAGS, Fingerprint
from humming_loader.slicing import Segment, cut_unit, slice_layer, valid_tp_sizes

NAME = "model.layers.0.mlp.experts"
EXPERTS = 3
DIGEST = "0" * 64


def round_up(value: int, multiple: int) -> int:
    """The least multiple that is not below `value`."""
    return (value + multiple - 1) // multiple * multiple


def sublayer(
    name: str, n: int, k: int, tensors: dict[str, tuple[str, tuple[int, ...]]], flags: set[str], **config: object
) -> SublayerEntry:
    """An entry whose LayerConfig pads N to 256 and K to 128."""
    values: dict[str, object] = {
        "sm_version": 90,
        "shape_n": round_up(n, 256),
        "shape_k": round_up(k, 128),
        "pad_shape_n": round_up(n, 256) - n,
        "pad_shape_k": round_up(k, 128) - k,
        "num_experts": EXPERTS,
        "a_dtype": "bfloat16",
        "b_dtype": "uint4",
        "c_dtype": "bfloat16",
        "bs_dtype": "bfloat16",
        "weight_scale_group_size": 128,
        "weight_scale_group_size_n": 0,
        "weight_scale_type": "group",
    }
    values |= config
    return SublayerEntry(
        tensors={
            key: TensorEntry("humming/a.safetensors", f"{NAME}.{name}_{key}", dtype, (EXPERTS, *shape), DIGEST)
            for key, (dtype, shape) in tensors.items()
        },
        shape_n=n,
        shape_k=k,
        shape_n_stacks=(n,),
        source_schema={},
        source_input_schema=None,
        weight_schema={},
        input_schema=None,
        layer_config=json.dumps(values),
        fingerprint=Fingerprint({flag: flag in flags for flag in FLAGS}, DIGEST),
        slicing={},
    )


def int4_layer(
    intermediate: int = 512, hidden: int = 256, group: int = 128, flags: set[str] | None = None, gate_up: str = "split"
) -> LayerEntry:
    """A gated layer of 4-bit codes with a scale for every `group` values of K, repacked in rows of 16."""
    shapes = {"w13": (2 * intermediate, hidden), "w2": (hidden, intermediate)}
    sublayers = {}
    for name, (n, k) in shapes.items():
        padded_n, padded_k = round_up(n, 256), round_up(k, 128)
        tensors = {
            "weight": ("I32", (padded_k // 16, padded_n * 2)),
            "weight_scale": ("BF16", (padded_k // group, padded_n)),
            "bias": ("BF16", (padded_n,)),
        }
        sublayers[name] = sublayer(name, n, k, tensors, flags or set(), weight_scale_group_size=group)
    return LayerEntry(
        family="qwen3_moe",
        num_experts=EXPERTS,
        hidden_size=hidden,
        intermediate_size=intermediate,
        activation_function="silu",
        is_gated=True,
        gate_up=gate_up,
        has_bias=True,
        format="int4",
        sublayers=sublayers,
    )


def test_one_rank_takes_every_byte() -> None:
    part = slice_layer(NAME, int4_layer())
    assert part.experts == (0, 1, 2)
    assert part.intermediate_size == 512
    assert all(piece.is_whole for sub in part.sublayers.values() for piece in sub.tensors.values())
    assert part.sublayers["w13"].tensors["weight"].shape == (3, 16, 2048)


def test_second_of_two_ranks() -> None:
    part = slice_layer(NAME, int4_layer(), tp_rank=1, tp_size=2)
    assert (part.intermediate_size, part.is_exact) == (256, True)
    weight = part.sublayers["w13"].tensors["weight"]
    # 64 columns of 16 values of 4 bits are 512 bytes; gate rows 256..511 and up rows 768..1023 of 1024
    assert (weight.rows, weight.source_tiles, weight.target_tiles, weight.tile_bytes) == (16, 16, 8, 512)
    assert weight.segments == (Segment(4, 0, 4), Segment(12, 4, 4))
    assert weight.shape == (3, 16, 1024)
    bias = part.sublayers["w13"].tensors["bias"]
    assert bias.segments == (Segment(8, 0, 8), Segment(24, 8, 8))
    down = part.sublayers["w2"].tensors
    assert down["weight"].segments == (Segment(16, 0, 16),)
    assert (down["weight"].tile_bytes, down["weight"].shape) == (256 * 2 * 4, (3, 16, 512))
    assert down["weight_scale"].segments == (Segment(2, 0, 2),)
    assert down["bias"].is_zero
    assert (part.sublayers["w2"].shape_k, part.sublayers["w2"].pad_k) == (256, 0)


def test_bias_of_the_output_is_the_first_rank_s() -> None:
    part = slice_layer(NAME, int4_layer(), tp_rank=0, tp_size=2)
    assert not part.sublayers["w2"].tensors["bias"].is_zero


def test_alternating_rows_are_cut_together() -> None:
    part = slice_layer(NAME, int4_layer(gate_up="interleaved", group=32), tp_rank=1, tp_size=2)
    assert part.sublayers["w13"].tensors["weight"].segments == (Segment(8, 0, 8),)


def test_ranks_that_do_not_come_out_even_are_padded() -> None:
    layer = int4_layer(intermediate=192, group=32, gate_up="interleaved")
    assert cut_unit(layer) == 32
    parts = [slice_layer(NAME, layer, tp_rank=rank, tp_size=4) for rank in range(4)]
    # 6 units for 4 ranks: 2, 2, 2 and none
    assert [part.intermediate_size for part in parts] == [64] * 4
    counts = [sum(segment.count for segment in part.sublayers["w2"].tensors["weight"].segments) for part in parts]
    assert counts == [4, 4, 4, 0]
    w13 = parts[0].sublayers["w13"]
    assert (w13.shape_n, w13.pad_n) == (128, 128)
    assert w13.tensors["weight"].target_tiles == 4


def test_padding_of_one_scales_where_zero_is_not_a_scale() -> None:
    layer = int4_layer(intermediate=192, group=32, gate_up="interleaved")
    w13 = layer.sublayers["w13"]
    config = json.loads(w13.layer_config) | {"b_dtype": "float4e2m1", "bs_dtype": "float8e8m0"}
    tensors = dict(w13.tensors) | {"weight_scale": replace(w13.tensors["weight_scale"], dtype="F8_E8M0")}
    changed = replace(w13, layer_config=json.dumps(config), tensors=tensors)
    layer = replace(layer, sublayers=dict(layer.sublayers) | {"w13": changed})
    scale = slice_layer(NAME, layer, tp_rank=0, tp_size=2).sublayers["w13"].tensors["weight_scale"]
    assert scale.fill == 127


def test_experts_are_taken_in_the_order_given() -> None:
    part = slice_layer(NAME, int4_layer(), experts=(2, 0, 2))
    assert part.experts == (2, 0, 2)
    assert part.sublayers["w2"].tensors["weight"].shape == (3, 32, 512)
    assert slice_layer(NAME, int4_layer(), experts=()).sublayers["w2"].tensors["weight"].shape == (0, 32, 512)


def test_flat_weights_are_cut_in_their_physical_order() -> None:
    layer = int4_layer(group=32)
    w2 = layer.sublayers["w2"]
    config = json.loads(w2.layer_config) | {"a_dtype": "int8", "b_dtype": "int8"}
    tensors = dict(w2.tensors) | {"weight": replace(w2.tensors["weight"], shape=(EXPERTS, 256, 128))}
    flags = Fingerprint(dict(w2.fingerprint.flags) | {"use_flat_weight": True}, DIGEST)
    flat = replace(w2, layer_config=json.dumps(config), tensors=tensors, fingerprint=flags)
    layer = replace(layer, sublayers=dict(layer.sublayers) | {"w2": flat})
    weight = slice_layer(NAME, layer, tp_rank=1, tp_size=2).sublayers["w2"].tensors["weight"]
    assert (weight.shape, weight.tile_bytes) == ((3, 256, 64), 256 * 16)
    assert weight.segments == (Segment(16, 0, 16),)


def test_sizes_that_work() -> None:
    assert valid_tp_sizes(int4_layer(intermediate=768), largest=16) == (1, 2, 3, 4, 6, 8, 12, 16)
    fixed = int4_layer(intermediate=768, flags={"use_fused_e8m0_scale"})
    assert valid_tp_sizes(fixed, largest=16) == (1, 2, 3, 6)


def test_refusal_names_the_sizes_that_work() -> None:
    layer = int4_layer(intermediate=768, flags={"use_fused_e8m0_scale"})
    with pytest.raises(ParallelismError) as caught:
        slice_layer(NAME, layer, tp_rank=0, tp_size=4)
    assert str(caught.value) == (
        "model.layers.0.mlp.experts: cannot be cut for tensor parallelism of 4: a rank's part of 768 must be a "
        "multiple of 128: this layout cannot be padded; sizes that work: 1, 2, 3, 6 (expert parallelism works at "
        "every size); for 4, humming-convert SRC OUT --tp 4 cuts before it packs"
    )
    assert caught.value.valid == (1, 2, 3, 6)


def test_gate_and_up_that_meet_inside_a_tile() -> None:
    with pytest.raises(ParallelismError, match="gate and up rows meet at 160, not a multiple of 64"):
        slice_layer(NAME, int4_layer(intermediate=160, group=32), tp_rank=0, tp_size=2)


def test_ranks_and_experts_out_of_range() -> None:
    with pytest.raises(RankError, match="expected a tensor-parallel rank below 2, found 2"):
        slice_layer(NAME, int4_layer(), tp_rank=2, tp_size=2)
    with pytest.raises(RankError, match="expected experts below 3, found 3"):
        slice_layer(NAME, int4_layer(), experts=(0, 3))


def test_layer_config_that_contradicts_its_entry() -> None:
    layer = int4_layer()
    w2 = replace(layer.sublayers["w2"], shape_k=256)
    with pytest.raises(ManifestError, match="expected a shape of 256 x 256, found 256 x 512"):
        slice_layer(NAME, replace(layer, sublayers=dict(layer.sublayers) | {"w2": w2}))


def test_choices_over_the_whole_layer_make_slices_inexact() -> None:
    layer = int4_layer(flags={"use_int_weight_scale"})
    assert not slice_layer(NAME, layer, tp_rank=0, tp_size=2).is_exact
    assert slice_layer(NAME, layer).is_exact


def test_the_loader_is_light() -> None:
    code = (
        "import sys, humming_loader, humming_loader.slicing, humming_loader.host_layout, humming_loader.plugin;"
        "print([name for name in ('torch', 'vllm', 'humming', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
