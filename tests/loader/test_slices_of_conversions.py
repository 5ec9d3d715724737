"""A rank's part of a converted checkpoint against a conversion of the rank's part of the source."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.checkpoints import RawTensor, Tensors, make_checkpoint

from humming_convert.host.target import emulate
from humming_convert.options import ConvertOptions
from humming_convert.pipeline import convert_checkpoint
from humming_convert.target import Target
from humming_loader import humming_host
from humming_loader.checkpoint import read_manifest
from humming_loader.layer import moves_of
from humming_loader.load import empty_target, fill
from humming_loader.slicing import LayerSlice, slice_layer

Loaded = dict[str, torch.Tensor]

# format, family, gate/up and down axes that I lies on in a tensor of one expert (fused gpt-oss: after the expert axis)
CASES = [
    ("fp8_block", "qwen3_moe", {}),
    ("ct_fp8_channel", "qwen3_moe", {}),
    ("ct_int4", "qwen3_moe", {"group_size": 32}),
    ("ct_int4", "qwen3_moe", {"group_size": 128}),
    ("ct_int4_asym", "qwen3_moe", {"group_size": 32}),
    ("ct_int8", "qwen3_moe", {"group_size": 128}),
    ("ct_nvfp4", "qwen3_moe", {}),
    ("ct_mxfp4", "qwen3_moe", {}),
    ("awq", "mixtral", {"group_size": 64}),
    ("mxfp4_gpt_oss", "gpt_oss", {"bias": True}),
]


def keep_rank(format: str, rank: int, tp: int, tensors: Tensors) -> None:
    """Leave of every expert's tensor what tensor-parallel rank `rank` of `tp` has."""
    for name, tensor in list(tensors.items()):
        if ".experts." not in name or tensor.array.ndim == 0 or name.endswith("weight_shape"):
            continue
        is_down = any(part in name for part in ("down_proj", ".w2."))
        axis = cut_axis(format, name, is_down)
        if axis is None or tensor.array.shape[axis] == 1:
            continue
        size = tensor.array.shape[axis] // tp
        cut = np.take(tensor.array, range(rank * size, (rank + 1) * size), axis=axis)
        tensors[name] = RawTensor(tensor.dtype, np.ascontiguousarray(cut))
    for name in [name for name in tensors if name.endswith("weight_shape")]:
        shape = tensors[name].array.copy()
        shape[1 if "down_proj" in name else 0] //= tp
        tensors[name] = RawTensor(tensors[name].dtype, shape)
    if rank and format == "mxfp4_gpt_oss":
        for name in [name for name in tensors if "down_proj_bias" in name]:
            tensors[name] = RawTensor(tensors[name].dtype, np.zeros_like(tensors[name].array))


def cut_axis(format: str, name: str, is_down: bool) -> int | None:
    """The axis of I in a source tensor; None where it has none."""
    if format == "mxfp4_gpt_oss":
        if name.endswith("_bias"):
            return None if is_down else 1
        return 2 if is_down else 1
    if name.rsplit(".", 1)[-1] in ("weight_global_scale", "input_global_scale", "input_scale"):
        return None
    if format == "awq":
        return 0 if is_down else 1
    return 1 if is_down else 0


def convert(source: Path, out: Path, sm: int = 90) -> Path:
    """Convert and return `out`."""
    convert_checkpoint(ConvertOptions(source=source, out=out, target=Target(sm), hash_source=False))
    return out


def load(root: Path, part: LayerSlice) -> Loaded:
    """The part's tensors on the CPU by `sublayer_tensor`."""
    tensors = {
        name: {key: empty_target(piece, "cpu") for key, piece in sublayer.tensors.items()}
        for name, sublayer in part.sublayers.items()
    }
    fill(root, moves_of(part, tensors), verify=False)
    return {f"{name}_{key}": value for name, group in tensors.items() for key, value in group.items()}


def assert_same(found: Loaded, expected: Loaded) -> None:
    """Names, dtypes, shapes and bytes."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8)), name


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize(("format", "family", "options"), CASES)
def test_tensor_parallel_parts_are_conversions_of_parts(
    tmp_path: Path, format: str, family: str, options: dict[str, Any], tp: int
) -> None:
    sizes: dict[str, Any] = {"layers": 1, "experts": 3, "hidden": 256, "intermediate": 128 * tp}
    whole = convert(make_checkpoint(tmp_path / "src", family, format, **sizes, **options), tmp_path / "out")
    manifest = read_manifest(whole)
    ((name, layer),) = manifest.layers.items()
    for rank in (0, tp - 1):

        def edit(tensors: Tensors, config: dict[str, object], rank: int = rank) -> None:
            keep_rank(format, rank, tp, tensors)
            for field in ("moe_intermediate_size", "intermediate_size"):
                if config.get(field) == 128 * tp:
                    config[field] = 128

        source = make_checkpoint(tmp_path / f"src{rank}", family, format, edit=edit, **sizes, **options)
        expected_root = convert(source, tmp_path / f"out{rank}")
        expected_layer = read_manifest(expected_root).layers[name]
        part = slice_layer(name, layer, tp_rank=rank, tp_size=tp)
        assert part.is_exact
        assert part.intermediate_size == 128
        assert_same(load(whole, part), load(expected_root, slice_layer(name, expected_layer)))


PADDED = [
    ("ct_fp8_channel", "qwen3_moe", {}),
    ("ct_int4", "qwen3_moe", {"group_size": 32}),
    ("ct_int4_asym", "qwen3_moe", {"group_size": 64}),
    ("ct_nvfp4", "qwen3_moe", {}),
    ("ct_mxfp4", "qwen3_moe", {}),
    ("awq", "mixtral", {"group_size": 64}),
    ("mxfp4_gpt_oss", "gpt_oss", {"bias": True}),
]


@pytest.mark.parametrize(("format", "family", "options"), PADDED)
def test_parts_that_need_padding_are_padded_as_conversions_are(
    tmp_path: Path, format: str, family: str, options: dict[str, Any]
) -> None:
    sizes: dict[str, Any] = {"layers": 1, "experts": 2, "hidden": 128, "intermediate": 128}
    whole = convert(make_checkpoint(tmp_path / "src", family, format, **sizes, **options), tmp_path / "out")
    ((name, layer),) = read_manifest(whole).layers.items()
    for rank in (0, 1):

        def edit(tensors: Tensors, config: dict[str, object], rank: int = rank) -> None:
            keep_rank(format, rank, 2, tensors)
            for field in ("moe_intermediate_size", "intermediate_size"):
                if config.get(field) == 128:
                    config[field] = 64

        source = make_checkpoint(tmp_path / f"src{rank}", family, format, edit=edit, **sizes, **options)
        expected_root = convert(source, tmp_path / f"out{rank}")
        part = slice_layer(name, layer, tp_rank=rank, tp_size=2)
        assert (part.intermediate_size, part.sublayers["w2"].pad_k) == (64, 64)
        expected = load(expected_root, slice_layer(name, read_manifest(expected_root).layers[name]))
        assert_same(load(whole, part), expected)


LAYOUTS = [(80, "int8"), (90, "fp8-block")]
LAYOUTS += [(sm, activation) for sm in (90, 100, 120) for activation in ("fp8", "int8", "mxfp8")]


@pytest.mark.parametrize(("sm", "activation"), LAYOUTS)
def test_other_layouts(tmp_path: Path, sm: int, activation: str) -> None:
    format, family = "ct_w8a8" if activation == "int8" else "ct_mxfp4", "qwen3_moe"
    sizes: dict[str, Any] = {"layers": 1, "experts": 2, "hidden": 256, "intermediate": 256}
    target = Target(sm)
    source = make_checkpoint(tmp_path / "src", family, format, **sizes)
    convert_checkpoint(ConvertOptions(source=source, out=tmp_path / "out", target=target, activation=activation))
    ((name, layer),) = read_manifest(tmp_path / "out").layers.items()

    def edit(tensors: Tensors, config: dict[str, object]) -> None:
        keep_rank(format, 1, 2, tensors)
        config["moe_intermediate_size"] = 128

    cut = make_checkpoint(tmp_path / "cut", family, format, edit=edit, **sizes)
    convert_checkpoint(ConvertOptions(source=cut, out=tmp_path / "cut.out", target=target, activation=activation))
    part = slice_layer(name, layer, tp_rank=1, tp_size=2)
    expected_layer = read_manifest(tmp_path / "cut.out").layers[name]
    found, expected = load(tmp_path / "out", part), load(tmp_path / "cut.out", slice_layer(name, expected_layer))
    if part.is_exact:
        assert_same(found, expected)
    assert {key: value.shape for key, value in found.items()} == {key: value.shape for key, value in expected.items()}
    with emulate(target):
        for key, sublayer in part.sublayers.items():
            config = humming_host.local_config(layer.sublayers[key].layer_config, sublayer, 2)
            assert config.to_str() == expected_layer.sublayers[key].layer_config
            flags = humming_host.resolve_flags(layer.sublayers[key].layer_config, sm)
            assert flags == dict(layer.sublayers[key].fingerprint.flags)
