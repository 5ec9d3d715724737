from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.checkpoints import RawTensor, Tensors, make_checkpoint, write_safetensors
from tests.support.genuine import genuine

from humming_convert import source as source_module
from humming_convert.errors import CheckpointError
from humming_convert.source import Checkpoint, Payload, open_checkpoint


def small_tensors() -> Tensors:
    return {
        "a": RawTensor("I32", np.arange(6, dtype=np.int32).reshape(2, 3)),
        "b": RawTensor("F16", np.arange(4, dtype=np.float16)),
        "empty": RawTensor("U8", np.zeros((0, 4), dtype=np.uint8)),
    }


def read(checkpoint: Checkpoint, name: str) -> bytes:
    raw = bytearray(checkpoint.tensors[name].nbytes)
    with Payload(checkpoint) as payload:
        payload.read_into(name, memoryview(raw))
    return bytes(raw)


def text_of(error: pytest.ExceptionInfo[CheckpointError]) -> str:
    return str(error.value)


def test_every_tensor_of_a_sharded_folder_reads_back(tmp_path: Path) -> None:
    kept: Tensors = {}
    path = make_checkpoint(tmp_path / "m", shards=3, edit=lambda tensors, config: kept.update(tensors))
    checkpoint = open_checkpoint(path)
    assert set(checkpoint.tensors) == set(kept)
    assert len(checkpoint.files) == 3
    for name, tensor in kept.items():
        assert checkpoint.tensors[name].dtype == tensor.dtype
        assert checkpoint.tensors[name].shape == tensor.array.shape
        assert read(checkpoint, name) == tensor.array.tobytes()


def test_a_folder_with_one_file_needs_no_index(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(make_checkpoint(tmp_path / "m"))
    assert [file.name for file in checkpoint.files] == ["model.safetensors"]
    assert not checkpoint.is_single_file
    assert checkpoint.side_files == ("generation_config.json", "tokenizer.json")


def test_a_bare_file_takes_the_config_beside_it(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "in.safetensors", small_tensors())
    bare = open_checkpoint(tmp_path / "in.safetensors")
    assert (bare.is_single_file, bare.config, bare.side_files) == (True, None, ())
    (tmp_path / "config.json").write_text('{"model_type": "mixtral"}')
    assert open_checkpoint(tmp_path / "in.safetensors").config == {"model_type": "mixtral"}


def test_metadata_is_kept_by_file(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "in.safetensors", small_tensors(), {"format": "pt", "who": "me"})
    assert open_checkpoint(tmp_path / "in.safetensors").metadata == {"in.safetensors": {"format": "pt", "who": "me"}}


def test_links_to_files_are_followed_as_in_the_hub_cache(tmp_path: Path) -> None:
    real = make_checkpoint(tmp_path / "blobs")
    (tmp_path / "snapshot").mkdir()
    for name in ("model.safetensors", "config.json"):
        (tmp_path / "snapshot" / name).symlink_to(real / name)
    checkpoint = open_checkpoint(tmp_path / "snapshot")
    assert read(checkpoint, "lm_head.weight") == read(open_checkpoint(real), "lm_head.weight")


@pytest.mark.parametrize(
    ("files", "expected", "origin"),
    [
        (
            {"config.json": {"quantization_config": {"quant_method": "fp8"}}},
            "fp8",
            "config.json: quantization_config",
        ),
        (
            {"config.json": {"text_config": {"quantization_config": {"quant_method": "fp8"}}}},
            "fp8",
            "config.json: text_config.quantization_config",
        ),
        (
            {"config.json": {"compression_config": {"quant_method": "x"}}},
            "x",
            "config.json: compression_config",
        ),
        (
            {"hf_quant_config.json": {"quantization": {"quant_algo": "NVFP4"}}},
            "modelopt",
            "hf_quant_config.json",
        ),
        ({"quantize_config.json": {"bits": 4}}, "gptq", "quantize_config.json"),
        ({"quant_config.json": {"w_bit": 4}}, "awq", "quant_config.json"),
        (
            {"quantization_config.json": {"quant_method": "auto-round"}},
            "auto-round",
            "quantization_config.json",
        ),
        (
            {
                "config.json": {"quantization_config": {"quant_method": "fp8"}},
                "quant_config.json": {"w_bit": 4},
            },
            "fp8",
            "config.json: quantization_config",
        ),
    ],
)
def test_quantization_is_found_where_its_writers_put_it(
    tmp_path: Path, files: dict[str, object], expected: str, origin: str
) -> None:
    write_safetensors(tmp_path / "model.safetensors", small_tensors())
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    checkpoint = open_checkpoint(tmp_path)
    assert (checkpoint.quantization or {})["quant_method"] == expected
    assert checkpoint.quantization_origin == origin


def test_a_given_quant_config_replaces_the_checkpoints_own(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "m")
    given = tmp_path / "other.json"
    given.write_text('{"quantization_config": {"quant_method": "awq"}}')
    checkpoint = open_checkpoint(path, given)
    assert checkpoint.quantization == {"quant_method": "awq"}
    assert checkpoint.quantization_origin == str(given)


def test_an_index_may_write_its_names_with_a_dot(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "m", shards=2)
    file = path / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    index["weight_map"] = {name: f"./{shard}" for name, shard in index["weight_map"].items()}
    file.write_text(json.dumps(index))
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    assert [file.name for file in open_checkpoint(path).files] == names


def test_what_stays_behind_is_told(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "m")
    for name in ("original", ".cache"):
        (path / name).mkdir()
        (path / name / "params.json").write_text("{}")
    (path / "pytorch_model.bin").write_bytes(b"x")
    (path / "vocab.json").symlink_to(tmp_path / "gone")
    os.mkfifo(path / "pipe")
    checkpoint = open_checkpoint(path)
    assert checkpoint.left_out == ("original/", "pipe", "pytorch_model.bin", "vocab.json")
    assert checkpoint.side_files == ("generation_config.json", "tokenizer.json")


def test_a_folder_of_shards_is_not_left_out(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "m", shards=2)
    (path / "sub").mkdir()
    for shard in path.glob("model-*.safetensors"):
        shard.rename(path / "sub" / shard.name)
    file = path / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    index["weight_map"] = {name: f"sub/{shard}" for name, shard in index["weight_map"].items()}
    file.write_text(json.dumps(index))
    assert open_checkpoint(path).left_out == ()


def test_a_bare_file_knows_the_index_that_it_is_part_of(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "m", shards=2)
    shard = path / "model-00001-of-00002.safetensors"
    assert open_checkpoint(shard).index == "model.safetensors.index.json"
    assert open_checkpoint(path).index == ""
    (path / "model.safetensors.index.json").write_text("{")
    assert open_checkpoint(shard).index == ""


def test_genuine_shards_agree_with_their_index() -> None:
    checkpoint = open_checkpoint(genuine("llmcompressor--mixed"))
    assert len(checkpoint.files) == 16
    assert len(checkpoint.tensors) == 177


class TestRefusals:
    def test_nothing_there(self, tmp_path: Path) -> None:
        with pytest.raises(CheckpointError) as error:
            open_checkpoint(tmp_path / "none")
        assert text_of(error) == f"{tmp_path}/none: expected a .safetensors file or a model folder, found nothing there"

    def test_another_kind_of_file(self, tmp_path: Path) -> None:
        (tmp_path / "model.bin").write_bytes(b"x")
        with pytest.raises(CheckpointError) as error:
            open_checkpoint(tmp_path / "model.bin")
        assert text_of(error).endswith("expected a .safetensors file or a model folder, found model.bin")

    def test_a_folder_without_weights(self, tmp_path: Path) -> None:
        with pytest.raises(CheckpointError, match=r"found 0 \.safetensors files and no index; this is no safetensors"):
            open_checkpoint(tmp_path)

    def test_several_files_without_an_index(self, tmp_path: Path) -> None:
        for name in ("a", "b"):
            write_safetensors(tmp_path / f"{name}.safetensors", small_tensors())
        with pytest.raises(CheckpointError) as error:
            open_checkpoint(tmp_path)
        assert text_of(error) == (
            f"{tmp_path}: expected one .safetensors file, or several with a model.safetensors.index.json, "
            "found 2 .safetensors files and no index; fetch the index too"
        )

    def test_a_missing_shard(self, tmp_path: Path) -> None:
        path = make_checkpoint(tmp_path / "m", shards=3)
        (path / "model-00002-of-00003.safetensors").unlink()
        with pytest.raises(CheckpointError) as error:
            open_checkpoint(path)
        assert text_of(error) == (
            "model-00002-of-00003.safetensors: expected a file, found none; fetch the missing shard"
        )

    def test_a_shard_that_the_index_does_not_name(self, tmp_path: Path) -> None:
        path = make_checkpoint(tmp_path / "m", shards=2)
        write_safetensors(path / "extra.safetensors", small_tensors())
        with pytest.raises(CheckpointError) as error:
            open_checkpoint(path)
        assert text_of(error) == (
            "extra.safetensors: expected to be named by model.safetensors.index.json, found no entry; "
            "move away what is not part of the model, "
            "or fetch the model.safetensors.index.json that belongs to it"
        )

    def test_index_and_shards_disagree_in_both_directions(self, tmp_path: Path) -> None:
        path = make_checkpoint(tmp_path / "m", shards=2)
        file = path / "model.safetensors.index.json"
        index = json.loads(file.read_text())
        moved, dropped = "model.norm.weight", "lm_head.weight"
        other = {"model-00001-of-00002.safetensors": "2", "model-00002-of-00002.safetensors": "1"}
        held = index["weight_map"][moved]
        index["weight_map"][moved] = f"model-0000{other[held]}-of-00002.safetensors"
        holder = index["weight_map"].pop(dropped)
        index["weight_map"]["ghost"] = "model-00001-of-00002.safetensors"
        file.write_text(json.dumps(index))
        with pytest.raises(CheckpointError) as error:
            open_checkpoint(path)
        assert text_of(error).splitlines() == [
            f"tensor {moved}: expected it in {index['weight_map'][moved]}, as the index says, found it in {held}",
            "tensor ghost: expected it in model-00001-of-00002.safetensors, as the index says, found it nowhere",
            f"tensor {dropped}: expected an entry of the index, found none, but it is in {holder}",
        ]

    def test_the_same_name_in_two_shards_is_never_last_wins(self, tmp_path: Path) -> None:
        path = make_checkpoint(tmp_path / "m", shards=2)
        file = path / "model-00002-of-00002.safetensors"
        write_safetensors(file, {"model.embed_tokens.weight": small_tensors()["a"]})
        with pytest.raises(CheckpointError) as error:
            open_checkpoint(path)
        assert text_of(error).splitlines()[0] == (
            "tensor model.embed_tokens.weight: expected it in one file, "
            "found it in model-00001-of-00002.safetensors and in model-00002-of-00002.safetensors; "
            "they belong to different checkpoints, or each holds a slice of it, which cannot be told"
        )

    @pytest.mark.parametrize("entry", ["../out.safetensors", "/abs.safetensors", "a/../../b.safetensors", "x.bin"])
    def test_an_index_entry_that_leaves_the_folder(self, tmp_path: Path, entry: str) -> None:
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": entry}}))
        with pytest.raises(CheckpointError) as error:
            open_checkpoint(tmp_path)
        assert text_of(error) == (
            f"model.safetensors.index.json: expected names of .safetensors files inside the folder, found {entry!r}"
        )

    @pytest.mark.parametrize(
        ("content", "found"),
        [
            ("[1]", "config.json: expected a JSON object, found a list"),
            (
                '{"a": 1, "a": 2}',
                "config.json: expected JSON, found text that cannot be read (key 'a' occurs twice)",
            ),
            ('{"a": ' + "[" * 100_000, "config.json: expected JSON, found JSON nested too deeply to read"),
        ],
    )
    def test_a_damaged_config(self, tmp_path: Path, content: str, found: str) -> None:
        path = make_checkpoint(tmp_path / "m")
        (path / "config.json").write_text(content)
        with pytest.raises(CheckpointError) as error:
            open_checkpoint(path)
        assert text_of(error) == found

    @pytest.mark.parametrize(
        ("entry", "found"),
        [
            ({"a": "x\0y.safetensors"}, r"'x\x00y.safetensors'"),
            ({"a": "\ud800.safetensors"}, r"'\ud800.safetensors'"),
            ({"a": 5}, "'5'"),
            ({"a": ["x.safetensors"]}, "\"['x.safetensors']\""),
        ],
    )
    def test_an_index_entry_that_is_no_name(self, tmp_path: Path, entry: dict[str, Any], found: str) -> None:
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": entry}))
        with pytest.raises(CheckpointError) as error:
            open_checkpoint(tmp_path)
        assert text_of(error) == (
            f"model.safetensors.index.json: expected names of .safetensors files inside the folder, found {found}"
        )

    def test_an_index_key_that_cannot_be_written_down(self, tmp_path: Path) -> None:
        entry = {"weight_map": {"a\ud800": "model.safetensors"}}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(entry))
        with pytest.raises(CheckpointError) as error:
            open_checkpoint(tmp_path)
        assert text_of(error) == r"model.safetensors.index.json: expected names of tensors, found 'a\ud800'"

    @pytest.mark.parametrize(
        "name", ["config.json", "quantize_config.json", "hf_quant_config.json", "quant_config.json"]
    )
    @pytest.mark.parametrize(
        ("kind", "found"), [("folder", "a folder"), ("pipe", "a named pipe"), ("link", "a link to nothing")]
    )
    def test_a_config_that_is_no_regular_file(self, tmp_path: Path, name: str, kind: str, found: str) -> None:
        write_safetensors(tmp_path / "model.safetensors", small_tensors())
        file = tmp_path / name
        if kind == "folder":
            file.mkdir()
        elif kind == "pipe":
            os.mkfifo(file)
        else:
            file.symlink_to(tmp_path / "gone")
        with pytest.raises(CheckpointError) as error:
            open_checkpoint(tmp_path)
        assert text_of(error) == f"{name}: expected a regular file, found {found}"

    @pytest.mark.parametrize("section", [[1], "fp8", 5, False])
    @pytest.mark.parametrize("key", ["quantization_config", "compression_config"])
    def test_a_quantization_section_that_is_no_object(self, tmp_path: Path, key: str, section: object) -> None:
        def edit(tensors: Tensors, config: dict[str, Any]) -> None:
            del config["quantization_config"]
            config[key] = section

        path = make_checkpoint(tmp_path / "m", edit=edit)
        with pytest.raises(CheckpointError) as error:
            open_checkpoint(path)
        assert text_of(error) == f"config.json: {key}: expected a JSON object, found {str(section)!r}"

    @pytest.mark.parametrize(
        ("content", "found"),
        [
            (None, "expected a file, found none"),
            ("[1]", "expected a JSON object, found a list"),
            ("{", "expected JSON, found text that cannot be read (Expecting property"),
        ],
    )
    def test_a_given_quant_config_is_named_as_it_was_given(
        self, tmp_path: Path, content: str | None, found: str
    ) -> None:
        path = make_checkpoint(tmp_path / "m")
        given = tmp_path / "other.json"
        if content is not None:
            given.write_text(content)
        with pytest.raises(CheckpointError) as error:
            open_checkpoint(path, given)
        assert text_of(error).startswith(f"{given}: {found}")

    @pytest.mark.parametrize("kind", ["pipe", "folder"])
    def test_a_shard_that_is_no_regular_file(self, tmp_path: Path, kind: str) -> None:
        path = make_checkpoint(tmp_path / "m", shards=2)
        shard = path / "model-00002-of-00002.safetensors"
        shard.unlink()
        if kind == "pipe":
            os.mkfifo(shard)
        else:
            shard.mkdir()
        with pytest.raises(CheckpointError) as error:
            open_checkpoint(path)
        name = "named pipe" if kind == "pipe" else "folder"
        assert text_of(error) == f"{shard.name}: expected a regular file, found a {name}"

    def test_every_damaged_shard_is_reported_at_once(self, tmp_path: Path) -> None:
        path = make_checkpoint(tmp_path / "m", shards=3)
        for number in (1, 3):
            (path / f"model-0000{number}-of-00003.safetensors").write_bytes(b"")
        with pytest.raises(CheckpointError) as error:
            open_checkpoint(path)
        assert len(error.value.problems) == 2


class TestPayload:
    def test_reads_any_range(self, tmp_path: Path) -> None:
        write_safetensors(tmp_path / "in.safetensors", small_tensors())
        checkpoint = open_checkpoint(tmp_path / "in.safetensors")
        whole = small_tensors()["a"].array.tobytes()
        with Payload(checkpoint) as payload:
            for start in range(24):
                for end in range(start, 25):
                    raw = bytearray(end - start)
                    payload.read_into("a", memoryview(raw), start)
                    assert bytes(raw) == whole[start:end]

    @pytest.mark.parametrize(("start", "length"), [(-1, 4), (0, 25), (24, 1)])
    def test_a_range_outside_the_tensor_is_refused(self, tmp_path: Path, start: int, length: int) -> None:
        write_safetensors(tmp_path / "in.safetensors", small_tensors())
        with (
            Payload(open_checkpoint(tmp_path / "in.safetensors")) as payload,
            pytest.raises(ValueError, match="of 24"),
        ):
            payload.read_into("a", memoryview(bytearray(length)), start)

    def test_a_file_that_changed_is_noticed(self, tmp_path: Path) -> None:
        file = tmp_path / "in.safetensors"
        write_safetensors(file, small_tensors())
        checkpoint = open_checkpoint(file)
        with Payload(checkpoint) as payload:
            payload.read_into("a", memoryview(bytearray(24)))
            os.truncate(file, file.stat().st_size - 4)
            with pytest.raises(CheckpointError) as error:
                payload.read_into("a", memoryview(bytearray(24)))
        size = checkpoint.files[0].size
        assert str(error.value) == (
            f"in.safetensors: tensor a: expected the file of {size} bytes whose header was read, "
            f"found a changed file of {size - 4} bytes; start again once nothing writes to the source"
        )

    def test_a_change_whose_time_was_set_back_is_noticed(self, tmp_path: Path) -> None:
        file = tmp_path / "in.safetensors"
        write_safetensors(file, small_tensors())
        known, before = open_checkpoint(file).files[0], file.stat()
        assert source_module.is_unchanged(known, before)
        with file.open("r+b") as opened:
            opened.seek(-1, os.SEEK_END)
            opened.write(b"!")
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
        after = file.stat()
        assert (after.st_size, after.st_mtime_ns) == (before.st_size, before.st_mtime_ns)
        assert not source_module.is_unchanged(known, after)

    def test_a_file_that_vanished_is_named(self, tmp_path: Path) -> None:
        file = tmp_path / "in.safetensors"
        write_safetensors(file, small_tensors())
        checkpoint = open_checkpoint(file)
        file.unlink()
        with (
            Payload(checkpoint) as payload,
            pytest.raises(CheckpointError, match=r"tensor a: .*No such file"),
        ):
            payload.read_into("a", memoryview(bytearray(24)))

    def test_many_shards_and_threads_with_few_open_files(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(source_module, "_MAX_OPEN_FILES", 3)
        kept: Tensors = {}
        path = make_checkpoint(tmp_path / "m", shards=20, edit=lambda tensors, config: kept.update(tensors))
        checkpoint = open_checkpoint(path)
        wrong: list[str] = []
        with Payload(checkpoint) as payload:

            def run(offset: int) -> None:
                names = sorted(kept)
                for name in names[offset:] + names[:offset]:
                    raw = bytearray(checkpoint.tensors[name].nbytes)
                    payload.read_into(name, memoryview(raw))
                    if bytes(raw) != kept[name].array.tobytes():
                        wrong.append(name)

            threads = [threading.Thread(target=run, args=(7 * i,)) for i in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert wrong == []
            assert len(payload._open) <= 3 + len(threads)
        assert not payload._open
