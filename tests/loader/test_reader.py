from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from humming_loader.entries import TensorEntry
from humming_loader.errors import FileError, LoaderError, TensorError
from humming_loader.reader import ExpertsFile

VALUES: dict[str, np.ndarray[Any, Any]] = {
    "a": np.arange(60, dtype=np.int32).reshape(5, 3, 4),
    "b": np.arange(10, dtype=np.float16).reshape(5, 2),
    "one": np.array([7.0], dtype=np.float32),
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "experts.safetensors"
    save_file(VALUES, file, metadata={"format": "pt"})
    return file


def write(path: Path, header: Any, payload: bytes) -> Path:  # noqa: ANN401 - any JSON value, also wrong ones
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + payload)
    return path


def test_reads_what_safetensors_wrote(path: Path) -> None:
    with ExpertsFile(path) as opened:
        assert opened.metadata == {"format": "pt"}
        assert {name: stored.shape for name, stored in opened.tensors.items()} == {
            name: value.shape for name, value in VALUES.items()
        }
        for name, value in VALUES.items():
            got = np.empty_like(value)
            opened.read_into(name, got.data)
            np.testing.assert_array_equal(got, value)
        part = bytearray(6)
        opened.read_into("a", memoryview(part), 10)
        assert bytes(part) == VALUES["a"].tobytes()[10:16]


@pytest.mark.parametrize(("limit", "runs"), [(1, [1] * 5), (96, [2, 2, 1]), (10**6, [5])])
def test_experts_by_runs(path: Path, limit: int, runs: list[int]) -> None:
    with ExpertsFile(path) as opened:
        pieces = list(opened.iter_experts("a", limit))
    assert [len(experts) for experts, _ in pieces] == runs
    assert b"".join(bytes(data) for _, data in pieces) == VALUES["a"].tobytes()
    assert [expert for experts, _ in pieces for expert in experts] == [0, 1, 2, 3, 4]


def test_short_reads_are_continued(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: real(fd, [views[0][:5]], at))
    with ExpertsFile(path) as opened:
        got = np.empty_like(VALUES["a"])
        opened.read_into("a", got.data)
    np.testing.assert_array_equal(got, VALUES["a"])


def test_refused_reads(path: Path) -> None:
    with ExpertsFile(path) as opened:
        with pytest.raises(TensorError) as caught:
            opened.read_into("nope", memoryview(bytearray(1)))
        assert str(caught.value) == f"tensor 'nope': expected a tensor of {path}, found none of that name"
        with pytest.raises(TensorError) as caught:
            opened.read_into("b", memoryview(bytearray(2)), 19)
        assert str(caught.value) == "tensor 'b': expected a range within 20 bytes, found a read of 2 at 19"
        with pytest.raises(TensorError, match="a read of 1 at -1"):
            opened.read_into("b", memoryview(bytearray(1)), -1)
        with pytest.raises(TensorError, match="4 bytes for each of consecutive experts"):
            opened.read_experts("b", range(2), memoryview(bytearray(4)))


def test_check_against_a_manifest_entry(path: Path) -> None:
    entry = TensorEntry("humming/x", "a", "I32", (5, 3, 4), "0" * 64)
    with ExpertsFile(path) as opened:
        assert opened.check(entry).nbytes == 240
        with pytest.raises(TensorError) as caught:
            opened.check(TensorEntry("humming/x", "a", "U32", (5, 3, 4), "0" * 64))
    assert str(caught.value) == (
        "tensor 'a': expected U32 [5, 3, 4], as the manifest says, found I32 [5, 3, 4]"
    )


def test_file_without_layers_says_so(path: Path) -> None:
    with ExpertsFile(path) as opened, pytest.raises(FileError) as caught:
        opened.layers()
    assert str(caught.value) == f"{path}: expected __metadata__ to be the key humming_layers, found format"


ONE = {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}
BROKEN: dict[str, tuple[object, bytes, str]] = {
    "truncated payload": ({"t": ONE}, b"123", "expected 72 bytes, found 71"),
    "trailing bytes": ({"t": ONE}, b"12345", "bytes, found"),
    "overlap": ({"t": ONE, "u": ONE}, b"1234", "tensor 'u' at"),
    "gap": ({"t": {**ONE, "data_offsets": [1, 5]}}, b"12345", "tensor 't' at"),
    "size": ({"t": {**ONE, "shape": [5]}}, b"1234", "t.data_offsets to be a range of 5 bytes, found [0, 4]"),
    "half a byte": (
        {"t": {"dtype": "F4", "shape": [3], "data_offsets": [0, 1]}},
        b"1",
        "t.data_offsets to be a range of 1.5 bytes, found [0, 1]",
    ),
    "dtype": ({"t": {**ONE, "dtype": "U7"}}, b"1234", "t.dtype to be one of BOOL"),
    "negative": ({"t": {**ONE, "shape": [-4]}}, b"1234", "t.shape to be a list of integers"),
    "extra key": ({"t": {**ONE, "x": 1}}, b"1234", "t to be no other keys, found x"),
    "no json": (b"{", b"", "text that does not parse"),
    "list": ([], b"", "header to be a JSON object, found list"),
    "metadata": ({"__metadata__": {"a": 1}, "t": ONE}, b"1234", "__metadata__ of strings"),
    "repeated": (b'{"t":{},"t":{}}', b"", "'t' twice"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_unsound_headers(case: str, tmp_path: Path) -> None:
    header, payload, message = BROKEN[case]
    path = write(tmp_path / "x", header, payload)
    with pytest.raises(FileError) as caught:
        ExpertsFile(path)
    assert str(caught.value).startswith(f"{path}: expected ")
    assert message in str(caught.value)


def test_files_that_are_none(tmp_path: Path) -> None:
    short = tmp_path / "short"
    short.write_bytes(b"123")
    huge = tmp_path / "huge"
    huge.write_bytes(struct.pack("<Q", 1 << 40) + b"{}")
    os.mkfifo(tmp_path / "pipe")
    expected = {
        "missing": "expected a readable file, found No such file or directory",
        "short": "expected a safetensors header, found a file of 3 bytes",
        "huge": f"expected a header inside the file, found a header length of {1 << 40}",
        "pipe": "expected a regular file, found something else",
    }
    for name, message in expected.items():
        with pytest.raises(FileError) as caught:
            ExpertsFile(tmp_path / name)
        assert str(caught.value) == f"{tmp_path}/{name}: {message}"


def test_file_that_shrinks_while_it_is_open(path: Path) -> None:
    with ExpertsFile(path) as opened:
        os.truncate(path, 300)
        with pytest.raises(LoaderError, match="then the end"):
            opened.read_into("a", memoryview(bytearray(240)))
