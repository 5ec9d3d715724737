from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import pytest
from huggingface_hub import split_state_dict_into_shards_factory
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from humming_convert import passthrough
from humming_convert.errors import CheckpointError, OutputError
from humming_convert.passthrough import (
    copy_side_files,
    is_side_file,
    plan_shards,
    write_passthrough,
)
from humming_convert.writer import TensorSpec


@given(st.lists(st.integers(0, 12), max_size=12), st.integers(1, 10))
def test_shards_are_those_of_huggingface_hub(sizes: list[int], limit: int) -> None:
    named = {f"t{index}": size for index, size in enumerate(sizes)}
    expected = split_state_dict_into_shards_factory(
        named,
        get_storage_size=lambda size: size,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=limit,
    )
    shards = plan_shards(named.items(), limit)
    assert {shard.file: list(shard.names) for shard in shards} == expected.filename_to_tensors


class Source:
    """Payloads by name; read_into as the converter's own reader has it."""

    def __init__(self, specs: list[TensorSpec]) -> None:
        self.data = {spec.name: os.urandom(spec.nbytes) for spec in specs}

    def read_into(self, name: str, buffer: memoryview, start: int = 0) -> None:
        buffer[:] = self.data[name][start : start + buffer.nbytes]


SPECS = [
    TensorSpec("z.weight", "F8_E8M0", (5, 3)),
    TensorSpec("a.weight", "BF16", (100, 7)),
    TensorSpec("nibbles", "F4", (4, 2)),
    TensorSpec("empty", "F32", (0,)),
    TensorSpec("scalar", "F32", ()),
    TensorSpec("count", "I64", (3,)),
]


def raw_tensor(path: Path, name: str) -> bytes:
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    begin, end = json.loads(raw[8 : 8 + length])[name]["data_offsets"]
    return raw[8 + length + begin : 8 + length + end]


@pytest.mark.parametrize("buffer_bytes", [8 << 20, 16])
@pytest.mark.parametrize("limit", [10**9, 1400, 100, 1])
def test_bytes_names_shapes_and_digests(
    limit: int, buffer_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(passthrough, "BUFFER_BYTES", buffer_bytes)
    source = Source(SPECS)
    told: list[int] = []
    result = write_passthrough(SPECS, source, tmp_path, max_shard_bytes=limit, progress=told.append)
    total = sum(map(len, source.data.values()))
    assert (result.tensors, result.bytes, sum(told)) == (len(SPECS), total, total)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(entry.name for entry in result.files)
    for entry in result.files:
        raw = (tmp_path / entry.name).read_bytes()
        assert (entry.size, entry.sha256) == (len(raw), hashlib.sha256(raw).hexdigest())
    where = {spec.name: "model.safetensors" for spec in SPECS}
    if limit != 10**9:
        index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
        assert index["metadata"] == {"total_size": total}
        where = index["weight_map"]
    assert set(where) == {spec.name for spec in SPECS}
    for spec in SPECS:
        path = tmp_path / where[spec.name]
        assert raw_tensor(path, spec.name) == source.data[spec.name]
        with safe_open(path, "np") as opened:
            part = opened.get_slice(spec.name)
            assert (part.get_dtype(), tuple(part.get_shape())) == (spec.dtype, spec.shape)
            assert opened.metadata() == {"format": "pt"}


def test_nothing_to_pass_through_writes_nothing(tmp_path: Path) -> None:
    result = write_passthrough([], Source([]), tmp_path, max_shard_bytes=10)
    assert (result.files, result.tensors, result.bytes) == ((), 0, 0)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("call", ["pwrite", "fsync"])
def test_failing_disk(call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(OutputError, match="No space left on device"):
        write_passthrough(SPECS, Source(SPECS), tmp_path, max_shard_bytes=10**9)
    assert list(tmp_path.iterdir()) == []


def test_failing_source_leaves_no_file(tmp_path: Path) -> None:
    class Broken(Source):
        def read_into(self, name: str, buffer: memoryview, start: int = 0) -> None:
            raise CheckpointError([])

    with pytest.raises(CheckpointError):
        write_passthrough(SPECS, Broken(SPECS), tmp_path, max_shard_bytes=10**9)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "copied"),
    [
        *((name, True) for name in ("tokenizer.json", "generation_config.json", "original/params.json")),
        *((name, True) for name in ("hf_quant_config.json", "modeling.py", "vocab.index", "my_config.json")),
        *((name, False) for name in ("config.json", "model.safetensors", "model.safetensors.index.json")),
        *((name, False) for name in ("pytorch_model.bin", "pytorch_model.bin.index.json", "a.PT", "x.pth")),
        *((name, False) for name in ("x.ckpt", "x.gguf", "original/consolidated.00.pth")),
    ],
)
def test_side_file_rule(name: str, copied: bool) -> None:
    assert is_side_file(name) is copied


def test_side_files_are_copied_byte_for_byte(tmp_path: Path) -> None:
    root, out = tmp_path / "src", tmp_path / "out"
    (root / "sub").mkdir(parents=True)
    (root / "tokenizer.json").write_bytes(os.urandom(100_000))
    (root / "empty.txt").write_bytes(b"")
    (root / "sub" / "a.txt").write_bytes(b"a")
    (root / "config.json").write_bytes(b"{}")
    entries = copy_side_files(root, ["config.json", "empty.txt", "sub/a.txt", "tokenizer.json"], out)
    assert [entry.name for entry in entries] == ["empty.txt", "sub/a.txt", "tokenizer.json"]
    for entry in entries:
        data = (root / entry.name).read_bytes()
        assert (out / entry.name).read_bytes() == data
        assert (entry.size, entry.sha256) == (len(data), hashlib.sha256(data).hexdigest())
    assert not (out / "config.json").exists()


def test_side_file_that_is_no_regular_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.json")
    with pytest.raises(CheckpointError) as caught:
        copy_side_files(tmp_path, ["pipe.json"], tmp_path / "out")
    assert str(caught.value) == (f"{tmp_path}/pipe.json: expected a readable file, found not a regular file")
