"""What `convert --tp` packs for a rank is what converting a checkpoint of that rank's part gives, bit for bit."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.checkpoints import make_checkpoint
from tests.support.rank_slices import Share, keep_share

from humming_convert.host.target import emulate
from humming_convert.options import ConvertOptions
from humming_convert.pipeline import convert_checkpoint
from humming_convert.target import Target
from humming_convert.verify import verify
from humming_loader.checkpoint import read_manifest
from humming_loader.entries import LayerEntry, SublayerEntry, TensorParallelEntry
from humming_loader.layer import HummingExpertsTensors, load_layer
from humming_loader.parts import layer_names, part_name

HIDDEN = 256


def even(whole: int, tp: int) -> list[Share]:
    """The same number of values for every rank."""
    size = whole // tp
    return [Share(whole, rank * size, (rank + 1) * size, size) for rank in range(tp)]


def shares(whole: int, width: int, *bounds: int) -> list[Share]:
    """Ranks that have what lies between `bounds`, each made up to `width`."""
    return [Share(whole, begin, end, width) for begin, end in pairwise(bounds)]


Case = tuple[str, str, dict[str, Any], str, list[Share]]

# format, family, options, activation, the ranks' shares as vLLM 0.33.0 deals them out
CASES: list[Case] = [
    ("fp8_block", "qwen3_moe", {}, "a16", even(256, 2)),
    ("fp8_block", "qwen3_moe", {}, "a16", even(512, 4)),
    ("fp8_block", "qwen3_moe", {"scale_dtype": "BF16"}, "a16", shares(384, 256, 0, 256, 384)),
    ("fp8_block", "qwen3_moe", {}, "a16", shares(384, 128, 0, 128, 256, 384, 384)),
    ("fp8_block", "qwen3_moe", {"block": (64, 64), "scale_dtype": "F8_E8M0"}, "a16", even(128, 2)),
    ("ct_fp8_block", "qwen3_moe", {}, "a16", even(256, 2)),
    ("ct_fp8_channel", "qwen3_moe", {}, "a16", even(96, 2)),
    ("ct_fp8_channel", "qwen3_moe", {}, "fp8", even(320, 4)),
    ("ct_fp8_tensor", "qwen3_moe", {}, "a16", even(128, 4)),
    ("fp8_tensor", "mixtral", {"static": True}, "checkpoint", even(192, 2)),
    ("ct_mxfp4", "qwen3_moe", {}, "a16", even(192, 2)),
    ("ct_mxfp4", "qwen3_moe", {"bias": True}, "a16", even(128, 4)),
    ("mxfp4_gpt_oss", "gpt_oss", {}, "a16", even(256, 2)),
    ("mxfp4_gpt_oss", "gpt_oss", {}, "a16", shares(160, 128, 0, 96, 160)),
    ("mxfp4_gpt_oss", "gpt_oss", {}, "a16", shares(288, 128, 0, 96, 192, 288)),
    ("mxfp4_gpt_oss", "gpt_oss", {}, "a16", shares(192, 64, 0, 64, 128, 192, 192)),
    ("awq", "mixtral", {"group_size": 32}, "a16", even(192, 2)),
    ("awq", "mixtral", {"group_size": 64}, "int8", even(256, 4)),
    ("awq_sym", "mixtral", {"group_size": 64}, "a16", even(128, 2)),
    ("ct_int4", "qwen3_moe", {"group_size": 32}, "a16", even(192, 2)),
    ("ct_int4", "qwen3_moe", {"group_size": 128}, "fp8", even(512, 4)),
    ("ct_int4_asym", "qwen3_moe", {"group_size": 32}, "a16", even(128, 4)),
    ("ct_int4_channel", "qwen3_moe", {}, "a16", even(192, 2)),
    ("ct_int4_asym_channel", "qwen3_moe", {}, "a16", even(192, 2)),
    ("ct_int3", "qwen3_moe", {"group_size": 32}, "a16", even(192, 2)),
    ("ct_int8", "qwen3_moe", {"group_size": 32}, "int8", even(128, 4)),
    ("ct_w8a8", "qwen3_moe", {}, "int8", even(192, 2)),
    ("ct_w8a8_asym", "qwen3_moe", {}, "a16", even(128, 4)),
    ("ct_nvfp4", "qwen3_moe", {}, "a16", even(192, 2)),
    ("ct_nvfp4", "qwen3_moe", {}, "a16", even(128, 4)),
    # Scales fused into the weights, chosen over what a rank has.
    ("ct_mxfp4", "qwen3_moe", {}, "fp8", even(192, 2)),
    ("ct_mxfp4", "qwen3_moe", {}, "int8", even(384, 4)),
    ("ct_mxfp4", "qwen3_moe", {}, "fp8-block", even(192, 2)),
    ("mxfp4_gpt_oss", "gpt_oss", {}, "fp8", shares(192, 64, 0, 64, 128, 192, 192)),
    ("mxfp4_gpt_oss", "gpt_oss", {}, "int8", shares(160, 128, 0, 96, 160)),
]


def convert(source: Path, out: Path, **options: Any) -> Path:  # noqa: ANN401 - fields of ConvertOptions
    """Convert and return `out`."""
    given: dict[str, Any] = {"source": source, "out": out, "target": Target(90), "workers": 2}
    convert_checkpoint(ConvertOptions(**given | options))
    return out


def facts_of(layer: LayerEntry) -> LayerEntry:
    """The entry without what names the rank: everything else, checksums included, must be equal."""

    def plain(entry: SublayerEntry) -> SublayerEntry:
        return replace(entry, tensors={key: replace(one, file="", name="") for key, one in entry.tensors.items()})

    return replace(layer, sublayers={key: plain(one) for key, one in layer.sublayers.items()}, tensor_parallel=None)


def assert_same(found: HummingExpertsTensors, expected: HummingExpertsTensors) -> None:
    """Names, dtypes, shapes, bytes and configs."""
    for one, other in ((found.w13, expected.w13), (found.w2, expected.w2)):
        assert one.config.to_str() == other.config.to_str()
        assert one.tensors.keys() == other.tensors.keys()
        for key, tensor in other.tensors.items():
            assert (one.tensors[key].dtype, one.tensors[key].shape) == (tensor.dtype, tensor.shape), key
            assert torch.equal(one.tensors[key].view(torch.uint8), tensor.view(torch.uint8)), key


@pytest.mark.parametrize(("format", "family", "options", "activation", "ranks"), CASES)
def test_a_rank_s_part_is_the_conversion_of_its_part_of_the_source(
    tmp_path: Path, format: str, family: str, options: dict[str, Any], activation: str, ranks: list[Share]
) -> None:
    tp = len(ranks)
    sizes: dict[str, Any] = {"layers": 1, "experts": 3, "hidden": HIDDEN, "intermediate": ranks[0].whole}
    source = make_checkpoint(tmp_path / "src", family, format, **sizes, **options)
    out = convert(source, tmp_path / "out", activation=activation, tp_size=tp)
    manifest = read_manifest(out)
    (name,) = layer_names(manifest.layers)
    assert list(manifest.layers) == [part_name(name, rank, tp) for rank in range(tp)]
    for rank, share in enumerate(ranks):
        entry = manifest.layers[part_name(name, rank, tp)]
        assert entry.tensor_parallel == TensorParallelEntry(
            layer=name, rank=rank, size=tp, intermediate_size=share.whole, begin=share.begin, end=share.end
        )
        edit = keep_share(format, share)
        cut = make_checkpoint(tmp_path / f"src{rank}", family, format, edit=edit, **sizes, **options)
        expected = convert(cut, tmp_path / f"out{rank}", activation=activation)
        assert facts_of(entry) == facts_of(read_manifest(expected).layers[name])
        with emulate(Target(90)):
            part = load_layer(out, name, "cpu", tp_rank=rank, tp_size=tp)
            assert_same(part, load_layer(expected, name, "cpu"))
        assert (part.part.intermediate_size, part.part.is_exact) == (share.width, True)
    report = verify(out, source)
    assert report.source is not None
    assert report.layers == 1


@pytest.mark.parametrize("sm", [80, 100, 120])
@pytest.mark.parametrize(
    ("format", "activation"), [("ct_mxfp4", "mxfp8"), ("ct_w8a8", "int8"), ("ct_nvfp4", "a16"), ("ct_mxfp4", "fp8")]
)
def test_other_layouts(tmp_path: Path, format: str, activation: str, sm: int) -> None:
    if (sm, activation) in ((80, "mxfp8"), (80, "fp8")):
        pytest.skip("Humming has no such kernel")
    sizes: dict[str, Any] = {"layers": 1, "experts": 2, "hidden": HIDDEN, "intermediate": 192}
    source = make_checkpoint(tmp_path / "src", "qwen3_moe", format, **sizes)
    given: dict[str, Any] = {"activation": activation, "target": Target(sm)}
    out = convert(source, tmp_path / "out", tp_size=2, **given)
    (name,) = layer_names(read_manifest(out).layers)
    edit = keep_share(format, Share(192, 96, 192, 96))
    cut = make_checkpoint(tmp_path / "cut", "qwen3_moe", format, edit=edit, **sizes)
    expected = read_manifest(convert(cut, tmp_path / "cut.out", **given)).layers[name]
    assert facts_of(read_manifest(out).layers[part_name(name, 1, 2)]) == facts_of(expected)
    verify(out, source)


def test_shards_and_workers_do_not_change_the_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def digests(out: Path) -> list[LayerEntry]:
        return list(read_manifest(out).layers.values())

    sizes: dict[str, Any] = {"layers": 2, "experts": 5, "hidden": HIDDEN, "intermediate": 256}
    whole = make_checkpoint(tmp_path / "whole", **sizes)
    split = make_checkpoint(tmp_path / "split", shards=7, **sizes)
    first = convert(whole, tmp_path / "a", tp_size=2)
    second = convert(split, tmp_path / "b", tp_size=2, workers=16)
    assert digests(first) == digests(second)
    monkeypatch.setattr("humming_convert.convert.CPU_CHUNK_BYTES", 1)
    assert digests(convert(whole, tmp_path / "c", tp_size=2)) == digests(first)


def test_every_rank_of_every_layer_has_a_file_of_its_own(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "src", intermediate=256)
    out = convert(source, tmp_path / "out", tp_size=2)
    files = sorted(path.name for path in (out / "humming").glob("*.safetensors"))
    assert files == [f"experts-0000{layer}-of-00002.tp{rank}of2.safetensors" for layer in (1, 2) for rank in (0, 1)]
    assert read_manifest(out).experts_files() == tuple(f"humming/{name}" for name in files)
    for name, entry in read_manifest(out).layers.items():
        tensors = [tensor for one in entry.sublayers.values() for tensor in one.tensors.values()]
        assert len({tensor.file for tensor in tensors}) == 1
        assert all(tensor.name.startswith(f"{name}.") for tensor in tensors)


def test_passed_through_tensors_and_config_are_those_of_any_conversion(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "src", intermediate=256)
    plain, cut = convert(source, tmp_path / "plain"), convert(source, tmp_path / "cut", tp_size=2)
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        assert (plain / name).read_bytes() == (cut / name).read_bytes()
    assert "| tensor parallelism | 2, and no other |\n" in (cut / "README.md").read_text()
    assert "tensor parallelism" not in (plain / "README.md").read_text()
