from __future__ import annotations

import hashlib
import json
import os
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
    options = ConvertOptions(source=SOURCE, out=out, target=Target(90), activation="checkpoint", hash_source=True)
    convert_checkpoint(options)
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

    found, digest = problems_of(made, edited_source(tmp_path, edit))
    assert found == Problem("model.safetensors: tensor model.norm.weight", "the source's bytes", "another at 3")
    assert digest.where == "source model.safetensors"
    assert digest.expected.startswith("sha256 ")


def test_another_weight_in_the_source(made: Path, tmp_path: Path) -> None:
    name = "model.layers.0.block_sparse_moe.experts.1.w3.weight"

    def edit(raw: bytearray, begin: int, header: dict[str, Any]) -> None:
        columns = header[name]["shape"][1]
        raw[begin + header[name]["data_offsets"][0] + 2 * columns + 5] ^= 1

    found = problems_of(made, edited_source(tmp_path, edit))
    assert [problem.where.split()[-1] for problem in found] == ["codes", "model.safetensors"]
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


def tell_otherwise(out: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the first layer's entry, in the manifest and in the experts file alike."""
    manifest = manifest_of(out)
    name, layer = first_layer(manifest)
    change(layer)
    path = out / layer["sublayers"]["w13"]["tensors"]["weight"]["file"]
    begin, header = header_of(path)
    payload = path.read_bytes()[begin:]
    header["__metadata__"]["humming_layers"] = json.dumps({name: layer})
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + payload)
    (out / "humming" / "manifest.json").write_text(json.dumps(manifest))


def change_config(layer: dict[str, Any]) -> None:
    w13 = layer["sublayers"]["w13"]
    w13["layer_config"] = json.dumps(json.loads(w13["layer_config"]) | {"use_batch_invariant": "perhaps"})


def change_flag(layer: dict[str, Any]) -> None:
    flags = layer["sublayers"]["w13"]["fingerprint"]["flags"]
    flags["use_native_dequant"] = not flags["use_native_dequant"]


FACTS: dict[str, Callable[[dict[str, Any]], None]] = {
    "family": lambda layer: layer.update(family="qwen3_moe"),
    "hidden_size": lambda layer: layer.update(hidden_size=9),
    "intermediate_size": lambda layer: layer.update(intermediate_size=9),
    "activation_function": lambda layer: layer.update(activation_function="gelu"),
    "is_gated": lambda layer: layer.update(is_gated=False),
    "gate_up": lambda layer: layer.update(gate_up="interleaved"),
    "format": lambda layer: layer.update(format="awq"),
    "source_schema": lambda layer: layer["sublayers"]["w13"]["source_schema"].update(bits=3),
    "source_input_schema": lambda layer: layer["sublayers"]["w2"].update(source_input_schema=None),
    "weight_schema": lambda layer: layer["sublayers"]["w13"]["weight_schema"].update(b_dtype="float8e5m2"),
    "input_schema": lambda layer: layer["sublayers"]["w2"].update(input_schema=None),
    "layer_config": change_config,
    "fingerprint flags": change_flag,
    "fingerprint probe": lambda layer: layer["sublayers"]["w2"]["fingerprint"].update(probe="0" * 64),
    "slicing": lambda layer: layer["sublayers"]["w2"]["slicing"].update(multiple=1),
}


@pytest.mark.parametrize("fact", FACTS)
def test_every_fact_of_a_layer_is_held_against_the_source(fact: str, out: Path) -> None:
    tell_otherwise(out, FACTS[fact])
    with pytest.raises(VerificationError) as caught:
        verify(out, SOURCE)
    assert any(problem.where.endswith(f": {fact}") for problem in caught.value.problems), caught.value


def test_another_version_of_humming_leaves_the_layout_unasked_and_says_so(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tell_otherwise(out, FACTS["fingerprint probe"])
    monkeypatch.setattr("humming_convert.verify_source.installed_humming", lambda: "9.9")
    made_with = manifest_of(out)["humming_version"]
    assert verify(out, SOURCE).text().splitlines()[-1] == (
        "note: the layout's probe, flags and schemas were not recomputed: "
        f"made with humming-kernels {made_with}, 9.9 is installed"
    )


@pytest.mark.parametrize(("field", "value"), [("sm", 75), ("param_dtype", "float16")])
def test_target_and_dtype_are_those_of_the_layout(field: str, value: object, out: Path) -> None:
    manifest = manifest_of(out)
    (manifest["target"] if field == "sm" else manifest)[field] = value
    (out / "humming" / "manifest.json").write_text(json.dumps(manifest))
    found = problems_of(out)
    assert {problem.expected.split(",")[1] for problem in found} == {" as the manifest says"}
    assert found[0].found == "sm90 and bfloat16 in layer_config"


def test_an_experts_file_that_does_not_tell_its_layer(out: Path) -> None:
    manifest = manifest_of(out)
    name, layer = first_layer(manifest)
    path = out / layer["sublayers"]["w13"]["tensors"]["weight"]["file"]
    begin, header = header_of(path)
    header["__metadata__"]["humming_layers"] = "{}"
    with path.open("r+b") as opened:
        opened.seek(8)
        opened.write(json.dumps(header).encode().ljust(begin - 8))
    where = f"{path.relative_to(out)}: {name}"
    assert problems_of(out) == [Problem(where, "the manifest's entry for it", "none in the file")]


def spoil_side_file(source: Path) -> None:
    (source / "tokenizer.json").write_text("{}")


def add_side_file(source: Path) -> None:
    (source / "vocab.json").write_text("{}")


def change_source_config(source: Path) -> None:
    document = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(document | {"rope_theta": 5}))


@pytest.mark.parametrize(
    ("change", "where", "found"),
    [
        (spoil_side_file, "tokenizer.json", "sha256"),
        (add_side_file, "vocab.json", "it only in the source"),
        (change_source_config, "config.json", "others for rope_theta"),
    ],
)
def test_other_files_of_the_source_are_compared(
    change: Callable[[Path], None], where: str, found: str, tmp_path: Path
) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    shutil.copytree(SOURCE, source)
    (source / "tokenizer.json").write_text('{"version": "1.0"}')
    convert_checkpoint(ConvertOptions(source=source, out=out, target=Target(90)))
    assert verify(out, source).source is not None
    change(source)
    (problem,) = problems_of(out, source)
    assert (problem.where, found in problem.found) == (where, True)


def damage_with_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "humming/experts-*", "README.md"])
def test_a_fifo_in_place_of_a_file_is_found_at_once(name: str, out: Path) -> None:
    path = next(out.glob(name))
    damage_with_fifo(path)
    assert any("regular file" in problem.found or "regular file" in problem.expected for problem in problems_of(out))


def test_a_fifo_beside_the_experts_files_is_found(out: Path) -> None:
    os.mkfifo(out / "humming" / "pipe")
    assert [problem.where for problem in problems_of(out)] == ["humming/pipe"]
