from __future__ import annotations

import hashlib
import json
import shutil
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from humming_convert.errors import CheckpointError, Problem, VerificationError
from humming_convert.options import ConvertOptions
from humming_convert.pipeline import convert_checkpoint
from humming_convert.target import Target
from humming_convert.verify import VerifyReport, verify

SOURCE = Path(__file__).parent.parent / "data" / "checkpoints" / "hub-layout--mixtral-fp8-per-tensor"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("verify") / "out"
    convert_checkpoint(ConvertOptions(source=SOURCE, out=out, target=Target(90), activation="checkpoint"))
    return out


@pytest.fixture
def out(made: Path, tmp_path: Path) -> Path:
    copy = tmp_path / "out"
    shutil.copytree(made, copy)
    return copy


def problems_of(out: Path, source: Path | None = None) -> list[Problem]:
    with pytest.raises(VerificationError) as caught:
        verify(out, source)
    return list(caught.value.problems)


def manifest_of(out: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((out / "humming" / "manifest.json").read_text())
    return document


def header_of(path: Path) -> tuple[int, dict[str, Any]]:
    raw = path.read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    document: dict[str, Any] = json.loads(raw[8 : 8 + length])
    return 8 + length, document


def first_layer(manifest: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    name = next(iter(manifest["layers"]))
    return name, manifest["layers"][name]


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as opened:
        opened.seek(offset)
        byte = opened.read(1)[0]
        opened.seek(offset)
        opened.write(bytes([byte ^ 0x01]))


def damage_consistently(out: Path, key: str, at: int) -> str:
    """Flip one bit of w13's tensor `key` and make every checksum agree with it; the layer's name."""
    manifest = manifest_of(out)
    layer_name, layer = first_layer(manifest)
    entry = layer["sublayers"]["w13"]["tensors"][key]
    path = out / entry["file"]
    begin, header = header_of(path)
    first, last = header[entry["name"]]["data_offsets"]
    flip(path, begin + first + at)
    payload = path.read_bytes()[begin + first : begin + last]
    entry["sha256"] = hashlib.sha256(payload).hexdigest()
    header["__metadata__"]["humming_layers"] = json.dumps({layer_name: layer}, separators=(",", ":"))
    text = json.dumps(header, separators=(",", ":")).encode()
    with path.open("r+b") as opened:
        opened.seek(8)
        opened.write(text.ljust(begin - 8))
    (out / "humming" / "manifest.json").write_text(json.dumps(manifest))
    return layer_name


def test_sound_output(made: Path) -> None:
    report = verify(made)
    assert report.source is None
    assert report.layers == len(manifest_of(made)["layers"]) > 0
    assert "all as the manifest says" in report.text()


def test_sound_output_against_its_source(made: Path) -> None:
    report = verify(made, SOURCE)
    assert isinstance(report, VerifyReport)
    assert report.source is not None
    files = [path for path in SOURCE.iterdir() if path.suffix == ".safetensors"]
    payload = sum(path.stat().st_size - header_of(path)[0] for path in files)
    assert report.source.total == payload
    assert report.source.claimed > 0
    assert report.source.passed == manifest_of(made)["passthrough"]["bytes"]


def test_progress_reaches_its_total(made: Path) -> None:
    class Counter:
        def __init__(self) -> None:
            self.wanted = self.done = 0

        def total(self, count: int) -> None:
            self.wanted = count

        def advance(self, count: int) -> None:
            self.done += count

        def label(self, text: str) -> None:
            pass

    for source in (None, SOURCE):
        counter = Counter()
        verify(made, source, progress=counter)
        assert counter.done == counter.wanted > 0


def test_no_manifest(out: Path) -> None:
    (out / "humming" / "manifest.json").unlink()
    assert problems_of(out) == [
        Problem(
            f"{out}/humming/manifest.json",
            "a manifest",
            "No such file or directory",
            "the conversion did not finish, or this is no output of humming-convert",
        )
    ]


def test_manifest_that_is_not_strict(out: Path) -> None:
    manifest = manifest_of(out)
    manifest["extra"] = 1
    (out / "humming" / "manifest.json").write_text(json.dumps(manifest))
    assert problems_of(out) == [Problem(f"{out}/humming/manifest.json: manifest", "no other keys", "extra")]


def damage_weight(out: Path) -> None:
    entry = first_layer(manifest_of(out))[1]["sublayers"]["w2"]["tensors"]["weight"]
    begin, header = header_of(out / entry["file"])
    flip(out / entry["file"], begin + header[entry["name"]]["data_offsets"][1] - 1)


def truncate_experts(out: Path) -> None:
    path = next((out / "humming").glob("experts-*"))
    path.write_bytes(path.read_bytes()[:-1])


def drop_experts(out: Path) -> None:
    next((out / "humming").glob("experts-*")).unlink()


def add_file(out: Path) -> None:
    (out / "humming" / "experts-99999.safetensors").write_bytes(b"")


def add_weights(out: Path) -> None:
    (out / "more.safetensors").write_bytes(b"")


def damage_passthrough(out: Path) -> None:
    path = out / "model.safetensors"
    flip(path, path.stat().st_size - 1)


def damage_config(out: Path) -> None:
    (out / "config.json").write_text((out / "config.json").read_text().replace("{", "{ ", 1))


def change_entry(out: Path) -> None:
    manifest = manifest_of(out)
    first_layer(manifest)[1]["hidden_size"] += 1
    (out / "humming" / "manifest.json").write_text(json.dumps(manifest))


def forget_scale(out: Path) -> None:
    manifest = manifest_of(out)
    del first_layer(manifest)[1]["sublayers"]["w13"]["tensors"]["weight_scale"]
    (out / "humming" / "manifest.json").write_text(json.dumps(manifest))


def count_passthrough_wrong(out: Path) -> None:
    manifest = manifest_of(out)
    manifest["passthrough"]["tensors"] += 1
    (out / "humming" / "manifest.json").write_text(json.dumps(manifest))


DAMAGE: dict[Callable[[Path], None], tuple[str, str]] = {
    damage_weight: ("w2_weight", "sha256"),
    truncate_experts: ("humming/experts-", "a sound file"),
    drop_experts: ("humming/experts-", "a sound file"),
    add_file: ("humming/experts-99999.safetensors", "only files that the manifest lists"),
    add_weights: ("more.safetensors", "only files that the manifest lists"),
    damage_passthrough: ("model.safetensors", "sha256"),
    damage_config: ("config.json", "bytes"),
    change_entry: ("experts", "the manifest's entry for it"),
    forget_scale: ("w13", "weight, weight_scale"),
    count_passthrough_wrong: ("passthrough", "tensors of"),
}


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda damage: damage.__name__)
def test_every_kind_of_damage_is_found(damage: Callable[[Path], None], out: Path) -> None:
    damage(out)
    where, expected = DAMAGE[damage]
    found = problems_of(out)
    assert any(where in problem.where and expected in problem.expected for problem in found), found


def test_a_changed_weight_with_good_checksums_is_found_by_value(out: Path) -> None:
    layer_name = damage_consistently(out, "weight", 0)
    verify(out)
    found = problems_of(out, SOURCE)
    assert [problem.where for problem in found] == [f"{layer_name} w13 codes"]
    # The first byte of the packed tile is row 0, column 0 of expert 0.
    assert found[0].found.startswith("1 that differ, the first at [0, 0, 0]: ")


def test_a_changed_scale_with_good_checksums_is_found_by_value(out: Path) -> None:
    layer_name = damage_consistently(out, "weight_scale", 0)
    verify(out)
    found = problems_of(out, SOURCE)
    assert [(problem.where, problem.expected) for problem in found] == [
        (f"{layer_name} w13 scale", "the source's values")
    ]


def test_a_changed_input_scale_with_good_checksums_is_found_by_value(out: Path) -> None:
    layer_name = damage_consistently(out, "input_scale", 0)
    verify(out)
    found = problems_of(out, SOURCE)
    assert [problem.where for problem in found] == [f"{layer_name} w13 input_scale"]


def edited_source(tmp_path: Path, edit: Callable[[bytearray, int, dict[str, Any]], None]) -> Path:
    source = tmp_path / "source"
    shutil.copytree(SOURCE, source)
    path = source / "model.safetensors"
    begin, header = header_of(path)
    raw = bytearray(path.read_bytes())
    edit(raw, begin, header)
    path.write_bytes(raw)
    return source


def test_another_passed_through_tensor_in_the_source(made: Path, tmp_path: Path) -> None:
    def edit(raw: bytearray, begin: int, header: dict[str, Any]) -> None:
        raw[begin + header["model.norm.weight"]["data_offsets"][0] + 3] ^= 1

    found = problems_of(made, edited_source(tmp_path, edit))
    assert found == [Problem("model.safetensors: tensor model.norm.weight", "the source's bytes", "another at 3")]


def test_another_weight_in_the_source(made: Path, tmp_path: Path) -> None:
    name = "model.layers.0.block_sparse_moe.experts.1.w3.weight"

    def edit(raw: bytearray, begin: int, header: dict[str, Any]) -> None:
        columns = header[name]["shape"][1]
        raw[begin + header[name]["data_offsets"][0] + 2 * columns + 5] ^= 1

    found = problems_of(made, edited_source(tmp_path, edit))
    assert len(found) == 1
    rows = header_of(SOURCE / "model.safetensors")[1][name]["shape"][0]
    # w3 is "up", which follows gate's rows.
    assert found[0].found.startswith(f"1 that differ, the first at [1, {rows + 2}, 5]: ")


def test_a_source_that_is_no_whole_checkpoint(made: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(SOURCE, source)
    path = source / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError):
        verify(made, source)


def test_another_model_as_source(made: Path) -> None:
    other = SOURCE.parent / "hub-layout--gpt_oss-mxfp4"
    with pytest.raises((VerificationError, CheckpointError)):
        verify(made, other)


def test_the_comparison_does_not_depend_on_how_experts_are_sliced(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from humming_convert import verify_sublayer

    whole = verify(made, SOURCE)
    monkeypatch.setattr(verify_sublayer, "CHUNK_CODES", 1)
    assert verify(made, SOURCE) == replace(whole)
