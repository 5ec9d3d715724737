"""From a checkpoint to a verified output: every format, every family, sharded, resharded, interrupted."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from humming_convert import passthrough
from humming_convert.errors import CheckpointError, ConvertError, OutputError, UnsupportedError
from humming_convert.options import ConvertOptions
from humming_convert.pipeline import convert_checkpoint
from humming_convert.target import Target
from humming_convert.verify import VerifyReport, verify
from humming_convert.verify_output import read_manifest
from humming_convert.writer import ExpertsFileWriter
from humming_loader.entries import Manifest, Passthrough
from tests.support.checkpoints import FAMILIES, Tensors, make_checkpoint
from tests.support.genuine import genuine

FORMATS = (
    "fp8_tensor", "fp8_block", "ct_mxfp4", "awq", "awq_sym", "ct_int2", "ct_int3", "ct_int4", "ct_int5", "ct_int6",
    "ct_int7", "ct_int8", "ct_int4_asym", "ct_int8_asym", "ct_int4_channel", "ct_int8_channel", "ct_w8a8",
    "ct_w8a8_asym", "ct_fp8_tensor", "ct_fp8_channel", "ct_fp8_block", "ct_nvfp4",
)  # fmt: skip

# Format and activation that Humming has no kernel for on sm90 (its own is_humming_schema_compatible says so).
REFUSED = {
    ("ct_int4", "mxfp8"),
    ("ct_w8a8", "fp8"),
    ("ct_w8a8", "fp8-block"),
    ("ct_w8a8", "mxfp8"),
    ("fp8_block", "int8"),
    ("fp8_block", "mxfp8"),
}

GENUINE = (
    "hub-layout--gpt_oss-mxfp4",
    "hub-layout--mixtral-fp8-per-tensor",
    "llmcompressor--mixtral-W4A16",
    "llmcompressor--deepseek_v3-W4A16",
    "llmcompressor--glm4_moe-W4A16",
    "llmcompressor--mixed",
    *(f"llmcompressor--qwen3_moe-{scheme}" for scheme in (
        "FP8_BLOCK", "FP8_DYNAMIC", "MXFP4", "NVFP4", "W3A16", "W4A16", "W4A16_ASYM", "W8A16", "W8A8")),
    "autoround--qwen3_moe-W4A16-auto_awq",
    "autoround--qwen3_moe-W4A16-auto_awq-asym",
    "autoround--qwen3_moe-FP8_BLOCK-auto_round",
)  # fmt: skip


def options(source: Path, out: Path, sm: int = 90) -> ConvertOptions:
    """A conversion with the defaults of the command line, two slices at once."""
    return ConvertOptions(source=source, out=out, target=Target(sm), workers=2)


def converted(given: ConvertOptions) -> tuple[Manifest, VerifyReport]:
    """Convert and verify against the source; what was written and what was found."""
    convert_checkpoint(given)
    return read_manifest(given.out), verify(given.out, given.source)


def packed_digests(manifest: Manifest) -> dict[str, str]:
    """The checksum of every packed tensor by stored name."""
    return {
        tensor.name: tensor.sha256
        for layer in manifest.layers.values()
        for sublayer in layer.sublayers.values()
        for tensor in sublayer.tensors.values()
    }


@pytest.mark.parametrize("name", GENUINE)
def test_genuine_checkpoint_converts_and_verifies(name: str, tmp_path: Path) -> None:
    manifest, report = converted(options(genuine(name), tmp_path / "out"))
    weights = sum(
        layer.num_experts * sublayer.shape_n * sublayer.shape_k
        for layer in manifest.layers.values()
        for sublayer in layer.sublayers.values()
    )
    assert report.source is not None
    assert report.source.weights == weights > 0


@pytest.mark.parametrize("sm", [80, 100, 120])
@pytest.mark.parametrize("name", ["hub-layout--gpt_oss-mxfp4", "llmcompressor--mixed"])
def test_genuine_checkpoint_for_other_architectures(name: str, sm: int, tmp_path: Path) -> None:
    manifest, _ = converted(options(genuine(name), tmp_path / "out", sm))
    assert manifest.target.sm == sm


@pytest.mark.parametrize("checkpoint_format", FORMATS)
def test_every_format(checkpoint_format: str, tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source", format=checkpoint_format, shards=3, layers=1)
    manifest, report = converted(options(source, tmp_path / "out"))
    assert len(manifest.layers) == 1
    assert report.source is not None


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(family: str, tmp_path: Path) -> None:
    checkpoint_format = "mxfp4_gpt_oss" if family == "gpt_oss" else "ct_int4"
    source = make_checkpoint(tmp_path / "source", family, checkpoint_format)
    manifest, _ = converted(options(source, tmp_path / "out"))
    assert {entry.family for entry in manifest.layers.values()} == {family}


@pytest.mark.parametrize("activation", ["fp8", "fp8-block", "int8", "mxfp8", "checkpoint"])
@pytest.mark.parametrize("checkpoint_format", ["ct_int4", "ct_mxfp4", "ct_w8a8", "fp8_block"])
def test_activations_convert_or_are_refused(checkpoint_format: str, activation: str, tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source", format=checkpoint_format, layers=1)
    given = replace(options(source, tmp_path / "out"), activation=activation)
    if (checkpoint_format, activation) in REFUSED:
        with pytest.raises(UnsupportedError, match="sm90"):
            convert_checkpoint(given)
        assert not given.out.exists()
    else:
        manifest, _ = converted(given)
        assert manifest.activation == activation


def test_shards_workers_and_reruns_give_the_same_bytes(tmp_path: Path) -> None:
    whole = make_checkpoint(tmp_path / "whole", experts=5)
    split = make_checkpoint(tmp_path / "split", experts=5, shards=7)
    first, _ = converted(options(whole, tmp_path / "a"))
    second, _ = converted(replace(options(split, tmp_path / "b"), workers=16))
    assert packed_digests(first) == packed_digests(second)
    converted(options(whole, tmp_path / "c"))
    for name in sorted(path.relative_to(tmp_path / "a") for path in (tmp_path / "a").rglob("*") if path.is_file()):
        if name.name != "manifest.json":
            assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "c" / name).read_bytes(), name


def test_output_is_what_the_design_says(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source")
    manifest, _ = converted(options(source, tmp_path / "out"))
    files = sorted(str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*") if path.is_file())
    assert files == [
        "README.md", "config.json", "generation_config.json", "humming/experts-00001-of-00002.safetensors",
        "humming/experts-00002-of-00002.safetensors", "humming/manifest.json", "model.safetensors",
        "model.safetensors.index.json", "tokenizer.json",
    ]  # fmt: skip
    before = json.loads((source / "config.json").read_text())
    after = json.loads((tmp_path / "out" / "config.json").read_text())
    assert after.pop("quantization_config") == {
        "quant_method": "humming_prepacked", "format_version": 1, "source": before.pop("quantization_config"),
    }  # fmt: skip
    assert after == before
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as passed:
        assert not [name for name in passed.keys() if ".experts." in name]  # noqa: SIM118 - not a dict
    stored = set()
    for file in (tmp_path / "out" / "humming").glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            stored |= set(opened.keys())
    assert stored == set(packed_digests(manifest))


def test_source_files_are_hashed_when_asked(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source", shards=2)
    plain, _ = converted(options(source, tmp_path / "plain"))
    hashed, _ = converted(replace(options(source, tmp_path / "hashed"), hash_source=True))
    assert {file.sha256 for file in plain.source.files} == {None}
    expected = {path.name: sha256(path.read_bytes()).hexdigest() for path in source.glob("*.safetensors")}
    assert {file.name: file.sha256 for file in hashed.source.files} == expected


def test_bare_file_gives_the_packed_experts(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source")
    (source / "config.json").rename(tmp_path / "quant.json")
    given = replace(options(source / "model.safetensors", tmp_path / "out"), quant_config=tmp_path / "quant.json")
    manifest, _ = convert_checkpoint(given), verify(given.out)
    assert not (tmp_path / "out" / "config.json").exists()
    assert read_manifest(given.out).layers
    assert manifest.layers == 2


def test_existing_output_is_kept_unless_told(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source")
    given = options(source, tmp_path / "out")
    converted(given)
    with pytest.raises(OutputError, match="exists already"):
        convert_checkpoint(given)
    convert_checkpoint(replace(given, overwrite=True))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    with pytest.raises(OutputError, match="did not write"):
        convert_checkpoint(replace(given, out=tmp_path / "mine", overwrite=True))
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "years of work"


def no_trace(folder: Path, source: Path) -> bool:
    """Whether nothing but the source is in `folder`."""
    return [path for path in folder.iterdir() if path != source] == []


def test_nan_scale_found_in_the_payload_leaves_nothing(tmp_path: Path) -> None:
    def spoil(tensors: Tensors, _: dict[str, object]) -> None:
        name = "model.layers.1.mlp.experts.2.up_proj.weight_scale_inv"
        tensors[name].array.flat[1] = float("nan")

    source = make_checkpoint(tmp_path / "source", edit=spoil)
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.experts\.2\.up_proj\.weight_scale_inv.*finite|nan"):
        convert_checkpoint(options(source, tmp_path / "out"))
    assert no_trace(tmp_path, source)


@pytest.mark.parametrize("call", ["pwrite", "fsync", "rename"])
def test_failing_disk_leaves_nothing(call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = make_checkpoint(tmp_path / "source")

    def fail(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        if call == "rename":
            patch.setattr(Path, "rename", fail)
        else:
            patch.setattr(os, call, fail)
        with pytest.raises(ConvertError, match="No space left on device"):
            convert_checkpoint(options(source, tmp_path / "out"))
    assert no_trace(tmp_path, source)


def test_interrupt_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = make_checkpoint(tmp_path / "source")

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("humming_convert.experts_file.ExpertsFileWriter.finish", interrupt)
    with pytest.raises(KeyboardInterrupt):
        convert_checkpoint(options(source, tmp_path / "out"))
    assert no_trace(tmp_path, source)


@pytest.mark.parametrize("hash_source", [True, False])
def test_source_that_disappears_meanwhile_is_named(
    hash_source: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make_checkpoint(tmp_path / "source")
    original = passthrough.write_passthrough

    def copy_and_remove(*arguments: Any, **named: Any) -> Passthrough:  # noqa: ANN401 - handed on
        copied = original(*arguments, **named)
        (source / "model.safetensors").unlink()
        return copied

    monkeypatch.setattr("humming_convert.pipeline.write_passthrough", copy_and_remove)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: expected the file whose header was read"):
        convert_checkpoint(replace(options(source, tmp_path / "out"), hash_source=hash_source))
    assert no_trace(tmp_path, source)


def test_a_failing_sublayer_stops_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = make_checkpoint(tmp_path / "source", layers=1, experts=64)
    placed: list[str] = []
    original = ExpertsFileWriter.place

    def fail_for_w2(self: ExpertsFileWriter, name: str, start: int, data: memoryview) -> None:
        placed.append(name)
        if ".w2_" in name:
            raise OutputError("no more")
        time.sleep(0.05)
        original(self, name, start, data)

    monkeypatch.setattr(ExpertsFileWriter, "place", fail_for_w2)
    monkeypatch.setattr("humming_convert.convert.CPU_CHUNK_BYTES", 1)
    with pytest.raises(OutputError, match=r"^no more$"):
        convert_checkpoint(options(source, tmp_path / "out"))
    assert placed.count("model.layers.0.mlp.experts.w13_weight") < 64
    assert no_trace(tmp_path, source)


def test_source_that_changes_meanwhile_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = make_checkpoint(tmp_path / "source")
    finish = "humming_convert.experts_file.ExpertsFileWriter.finish"
    original = ExpertsFileWriter.finish

    def touch_and_finish(self: ExpertsFileWriter, metadata: dict[str, str]) -> dict[str, str]:
        os.utime(source / "model.safetensors", ns=(1, 1))
        return original(self, metadata)

    monkeypatch.setattr(finish, touch_and_finish)
    with pytest.raises(CheckpointError, match="changed file"):
        convert_checkpoint(options(source, tmp_path / "out"))
    assert no_trace(tmp_path, source)
