from __future__ import annotations

import contextlib
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save

from humming_convert.errors import CheckpointError
from humming_convert.safetensors_header import MAX_HEADER_BYTES, read_header

HINT = "the file is truncated or is no safetensors file: fetch it again"


def write(path: Path, header: object, payload: bytes = b"", length: int | None = None) -> Path:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw) if length is None else length) + raw + payload)
    return path


def entry(dtype: object = "U8", shape: object = (4,), offsets: object = (0, 4)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def fault(path: Path) -> str:
    with pytest.raises(CheckpointError) as error:
        read_header(path, "f")
    assert len(error.value.problems) == 1
    return str(error.value)


def test_a_file_of_the_safetensors_library_reads(tmp_path: Path) -> None:
    values: dict[str, np.ndarray[Any, Any]] = {
        "b": np.ones((2, 3), np.float32),
        "a": np.arange(5, dtype=np.int64),
        "s": np.array(3, np.float16),
    }
    raw = save(values, {"k": "v"})
    (tmp_path / "f").write_bytes(raw)
    header = read_header(tmp_path / "f", "f")
    assert header.metadata == {"k": "v"}
    assert {tensor.name for tensor in header.tensors} == set(values)
    for tensor in header.tensors:
        assert raw[tensor.offset : tensor.offset + tensor.nbytes] == values[tensor.name].tobytes()
        assert tensor.shape == values[tensor.name].shape
    assert [tensor.offset for tensor in header.tensors] == sorted(tensor.offset for tensor in header.tensors)


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (b"", f"f: expected an 8 byte header length, found a file of 0 bytes; {HINT}"),
        (b"1234567", f"f: expected an 8 byte header length, found a file of 7 bytes; {HINT}"),
        (
            struct.pack("<Q", 100) + b"{}",
            f"f: expected at least 108 bytes, as its header length says, found 10 bytes; {HINT}",
        ),
        (
            struct.pack("<Q", MAX_HEADER_BYTES + 1) + b"{}",
            f"f: expected a header of at most 100000000 bytes, found 100000001 bytes; {HINT}",
        ),
        (
            struct.pack("<Q", 1 << 63) + b"{}",
            f"f: expected a header of at most 100000000 bytes, found 9223372036854775808 bytes; {HINT}",
        ),
    ],
)
def test_header_length(tmp_path: Path, raw: bytes, expected: str) -> None:
    (tmp_path / "f").write_bytes(raw)
    assert fault(tmp_path / "f") == expected


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        (b"[]", "f: expected a JSON object as header, found a list"),
        (b"\xff\xff", "a JSON header, found one that cannot be read ('utf-8' codec can't decode byte 0xff"),
        (b"{", "a JSON header, found one that cannot be read (Expecting property name"),
        (b"[" * 200_000, "f: expected a JSON header of two levels, found one nested too deeply to read"),
        (b'{"a": ' + b"9" * 5000 + b"}", "a JSON header, found one that cannot be read (Exceeds the limit"),
        (
            b'{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},'
            b'"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}',
            "a JSON header, found one that cannot be read (key 'a' occurs twice)",
        ),
        (
            b'{"a":{"dtype":"U8","\\u0064type":"I8","shape":[0],"data_offsets":[0,0]}}',
            "a JSON header, found one that cannot be read (key 'dtype' occurs twice)",
        ),
        (b'{"__metadata__": {"a": 1}}', "f: expected __metadata__ that maps text to text, found {'a': 1}"),
        (b'{"__metadata__": []}', "f: expected __metadata__ that maps text to text, found []"),
        (b'{"a": 3}', "f: tensor a: expected dtype, shape and data_offsets, found int"),
        (
            b'{"a": {"dtype": "U8", "shape": []}}',
            "f: tensor a: expected dtype, shape and data_offsets, found ['dtype', 'shape']",
        ),
        (
            b'{"a": {"dtype":"U8","shape":[0],"data_offsets":[0,0],"more":1}}',
            "dtype, shape and data_offsets, found ['data_offsets', 'dtype', 'more', 'shape']",
        ),
    ],
)
def test_header_text(tmp_path: Path, header: bytes, expected: str) -> None:
    assert expected in fault(write(tmp_path / "f", header))


@pytest.mark.parametrize(
    ("bad", "expected"),
    [
        (entry(dtype="F12"), "a dtype code of safetensors, found 'F12'"),
        (entry(dtype=5), "a dtype code of safetensors, found '5'"),
        (entry(dtype=["U8"]), "a dtype code of safetensors, found \"['U8']\""),
        (entry(shape=(-4,)), "a shape of whole numbers, found [-4]"),
        (entry(shape=(True, 4)), "a shape of whole numbers, found [True, 4]"),
        (entry(shape=(4.0,)), "a shape of whole numbers, found [4.0]"),
        (entry(shape="4"), "a shape of whole numbers, found 4"),
        (entry(shape={"4": 1}), "a shape of whole numbers, found {'4': 1}"),
        (entry(shape=None), "a shape of whole numbers, found None"),
        (entry(offsets=(4, 0)), "data_offsets [begin, end], found [4, 0]"),
        (entry(offsets=(-4, 0)), "data_offsets [begin, end], found [-4, 0]"),
        (entry(offsets=(False, 4)), "data_offsets [begin, end], found [False, 4]"),
        (entry(offsets=(0, 4, 8)), "data_offsets [begin, end], found [0, 4, 8]"),
        (entry(offsets=7), "data_offsets [begin, end], found 7"),
        (entry(dtype="I32"), "16 bytes for I32 [4], found 4 bytes"),
        (entry(shape=(1 << 63, 1 << 63)), f"{1 << 126} bytes for U8 [{1 << 63}, {1 << 63}], found 4 bytes"),
        (entry(shape=(0, 1 << 63)), f"0 bytes for U8 [0, {1 << 63}], found 4 bytes"),
    ],
)
def test_a_bad_entry(tmp_path: Path, bad: dict[str, object], expected: str) -> None:
    path = write(tmp_path / "f", {"ok": entry(), "bad": bad}, b"\0" * 8)
    assert fault(path) == f"f: tensor bad: expected {expected}"


@pytest.mark.parametrize(
    ("second", "payload", "expected"),
    [
        (
            (2, 6),
            6,
            "f: tensor b: expected data at offset 4, found offset 2, which overlaps the tensor before it",
        ),
        (
            (0, 4),
            4,
            "f: tensor b: expected data at offset 4, found offset 0, which overlaps the tensor before it",
        ),
        ((5, 9), 9, "f: tensor b: expected data at offset 4, found offset 5, which leaves a gap before it"),
        ((4, 8), 7, "bytes, as its header says, found"),
        ((4, 8), 9, "; the file has bytes that no tensor owns"),
    ],
)
def test_ranges_must_tile_the_file(tmp_path: Path, second: tuple[int, int], payload: int, expected: str) -> None:
    path = write(tmp_path / "f", {"a": entry(), "b": entry(offsets=second)}, b"\0" * payload)
    assert expected in fault(path)


def test_a_truncated_payload_says_to_fetch_again(tmp_path: Path) -> None:
    path = write(tmp_path / "f", {"a": entry()}, b"\0\0")
    size = path.stat().st_size
    assert fault(path) == (
        f"f: expected {size + 2} bytes, as its header says, found {size} bytes; the file is truncated: fetch it again"
    )


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200), st.integers(0, 220))
def test_no_bytes_whatsoever_escape_the_error_family(
    tmp_path_factory: pytest.TempPathFactory, raw: bytes, length: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzz"
    path.write_bytes(struct.pack("<Q", length) + raw)
    with contextlib.suppress(CheckpointError):
        read_header(path, "f")


@settings(max_examples=300, deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.text(max_size=4) | st.floats(allow_nan=False),
        lambda inner: (
            st.lists(inner, max_size=4)
            | st.dictionaries(
                st.sampled_from(["dtype", "shape", "data_offsets", "a", "__metadata__"]), inner, max_size=4
            )
        ),
        max_leaves=12,
    )
)
def test_no_json_whatsoever_escapes_the_error_family(tmp_path_factory: pytest.TempPathFactory, content: object) -> None:
    path = write(tmp_path_factory.getbasetemp() / "fuzz", content)
    with contextlib.suppress(CheckpointError):
        read_header(path, "f")


@pytest.mark.parametrize("name", ["a\ud800", "a\0b"])
def test_a_name_that_cannot_be_written_down(tmp_path: Path, name: str) -> None:
    assert (
        fault(write(tmp_path / "f", {name: entry()}, b"1234")) == f"f: expected names of tensors, found {name!a}"
    )


def test_names_in_any_script(tmp_path: Path) -> None:
    header = read_header(write(tmp_path / "f", {"层.😀": entry()}, b"1234"), "f")
    assert [tensor.name for tensor in header.tensors] == ["层.😀"]
