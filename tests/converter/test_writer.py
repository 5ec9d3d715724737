from __future__ import annotations

import errno
import hashlib
import os
import random
import struct
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from humming_convert.errors import OutputError
from humming_convert.files import BackgroundHash, TempFile
from humming_convert.writer import ExpertsFileWriter, TensorSpec, metadata_size

METADATA = {"format": "pt", "about": 'quotes " and \\ and ünicode'}
SPECS = [
    TensorSpec("a.w13_weight_scale", "F8_E4M3", (3, 5)),
    TensorSpec("a.w13_weight", "I32", (3, 4, 8)),
    TensorSpec("a.w13_bias", "BF16", (3, 7)),
    TensorSpec("a.none", "F32", (0, 3)),
]


def payload(spec: TensorSpec) -> bytes:
    return random.Random(spec.name).randbytes(spec.nbytes)


def write_all(path: Path) -> dict[str, str]:
    with ExpertsFileWriter(path, SPECS, metadata_size(METADATA)) as writer:
        for piece in range(3):
            for spec in SPECS:
                part = spec.nbytes // 3
                writer.write(spec.name, payload(spec)[piece * part : (piece + 1) * part])
        return writer.finish(METADATA)


def test_file_is_what_the_safetensors_library_reads(tmp_path: Path) -> None:
    path = tmp_path / "experts.safetensors"
    digests = write_all(path)
    assert list(tmp_path.iterdir()) == [path]
    raw = path.read_bytes()
    start = 8 + struct.unpack("<Q", raw[:8])[0]
    assert start % 4096 == 0
    with safe_open(path, "pt") as opened:
        assert opened.metadata() == METADATA
        assert set(opened.keys()) == {spec.name for spec in SPECS}
        for spec in SPECS:
            part = opened.get_slice(spec.name)
            assert (part.get_dtype(), tuple(part.get_shape())) == (spec.dtype, spec.shape)
    with safe_open(path, "np") as opened:
        assert opened.get_tensor("a.w13_weight").tobytes() == payload(SPECS[1])
    assert digests == {spec.name: hashlib.sha256(payload(spec)).hexdigest() for spec in SPECS}


def test_tensors_begin_at_a_multiple_of_their_element_size(tmp_path: Path) -> None:
    path = tmp_path / "experts.safetensors"
    write_all(path)
    raw = path.read_bytes()
    start = 8 + struct.unpack("<Q", raw[:8])[0]
    # Widest first: I32 (and the empty F32), then BF16, then the 15 bytes of FP8.
    expected = payload(SPECS[1]) + payload(SPECS[2]) + payload(SPECS[0])
    assert raw[start:] == expected


def test_numpy_memory_and_chunks_of_any_shape(tmp_path: Path) -> None:
    values = np.arange(96, dtype=np.int32).reshape(3, 4, 8)
    path = tmp_path / "x.safetensors"
    with ExpertsFileWriter(path, [TensorSpec("w", "I32", (3, 4, 8))], metadata_size({})) as writer:
        writer.write("w", values[:1].data)
        writer.write("w", values[1:1].data)
        writer.write("w", values[1:].data)
        writer.finish({})
    with safe_open(path, "np") as opened:
        np.testing.assert_array_equal(opened.get_tensor("w"), values)


def test_exact_metadata_reserve_fits_and_a_page_more_does_not(tmp_path: Path) -> None:
    spec = TensorSpec("w", "U8", (1,))
    long = {"k": "v" * 5000}
    with ExpertsFileWriter(tmp_path / "a", [spec], metadata_size(long)) as writer:
        writer.write("w", b"1")
        writer.finish(long)
    with ExpertsFileWriter(tmp_path / "b", [spec], metadata_size({})) as writer:
        writer.write("w", b"1")
        with pytest.raises(OutputError, match=r"the header takes \d+ bytes, 4088 were reserved$"):
            writer.finish(long)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


REFUSALS = {
    "unknown": ([("nope", b"1")], "tensor 'nope' is not one of the file's"),
    "too long": ([("w", b"123"), ("w", b"45")], "tensor 'w' has 4 bytes, 3 were written and 2 more came"),
    "missing": ([("w", b"123")], "not complete: w has 3 of 4 bytes; v has 0 of 2 bytes"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_wrong_calls_are_refused_and_leave_nothing(case: str, tmp_path: Path) -> None:
    calls, message = REFUSALS[case]
    path = tmp_path / "x.safetensors"
    specs = [TensorSpec("w", "U8", (4,)), TensorSpec("v", "I8", (2,))]

    def write() -> None:
        with ExpertsFileWriter(path, specs, 0) as writer:
            for name, data in calls:
                writer.write(name, data)
            writer.finish({})

    with pytest.raises(OutputError) as caught:
        write()
    assert str(caught.value) == f"{path}: {message}"
    assert list(tmp_path.iterdir()) == []


def test_repeated_name_existing_file_and_second_finish(tmp_path: Path) -> None:
    spec = TensorSpec("w", "U8", (1,))
    with pytest.raises(OutputError, match=r"tensor named twice: w$"):
        ExpertsFileWriter(tmp_path / "x", [spec, spec], 0)
    with ExpertsFileWriter(tmp_path / "x", [spec], metadata_size({})) as writer:
        writer.write("w", b"1")
        writer.finish({})
        with pytest.raises(OutputError, match=r"the file was finished already$"):
            writer.finish({})
        with pytest.raises(OutputError, match=r"the file was finished already$"):
            writer.write("w", b"1")
    with pytest.raises(OutputError, match=r"x: exists already$"):
        ExpertsFileWriter(tmp_path / "x", [spec], 0)
    assert (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("call", "code"), [("pwrite", errno.ENOSPC), ("pwrite", errno.EIO), ("fsync", errno.EIO)]
)
def test_failing_disk_is_an_output_error_and_leaves_nothing(
    call: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    path = tmp_path / "x.safetensors"
    monkeypatch.setattr(os, call, fail)
    with pytest.raises(OutputError) as caught:
        write_all(path)
    text = str(caught.value)
    assert text.startswith(f"{path}: cannot ")
    assert os.strerror(code) in text
    if call == "pwrite":
        assert "write 5 bytes at " in text
    assert ("free space" in text) == (code == errno.ENOSPC)
    assert list(tmp_path.iterdir()) == []


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: real(fd, memoryview(data)[:7], at))
    write_all(tmp_path / "short")
    monkeypatch.undo()
    write_all(tmp_path / "whole")
    assert (tmp_path / "short").read_bytes() == (tmp_path / "whole").read_bytes()


def test_interrupt_removes_the_temporary_file(tmp_path: Path) -> None:
    def write() -> None:
        with ExpertsFileWriter(tmp_path / "x", SPECS, 0) as writer:
            writer.write("a.w13_bias", b"12")
            assert len(list(tmp_path.iterdir())) == 1
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write()
    assert list(tmp_path.iterdir()) == []


def test_hash_thread_keeps_order_and_surfaces_errors() -> None:
    digest = hashlib.sha256()
    hashing = BackgroundHash(depth=2)
    pieces = [random.Random(i).randbytes(200_000) for i in range(20)]
    for piece in pieces:
        hashing.update(digest, memoryview(piece))
    hashing.wait()
    assert digest.hexdigest() == hashlib.sha256(b"".join(pieces)).hexdigest()
    released = memoryview(bytearray(4))
    released.release()
    hashing.update(digest, released)
    with pytest.raises(ValueError, match="released"):
        hashing.wait()
    hashing.close()


def test_temp_file_in_a_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(OutputError) as caught:
        TempFile(tmp_path / "no" / "x")
    assert str(caught.value) == f"{tmp_path}/no/x: cannot create the file: No such file or directory"


def test_a_stopped_writer_refuses_every_thread_and_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "experts.safetensors"
    with ExpertsFileWriter(path, SPECS, metadata_size(METADATA)) as writer:
        writer.place(SPECS[1].name, 0, payload(SPECS[1])[:32])
        writer.stop()
        for call in (writer.place, lambda name, _, data: writer.append_digest(name, data)):
            with pytest.raises(OutputError, match=r"experts\.safetensors: the file was stopped already"):
                call(SPECS[1].name, 32, payload(SPECS[1])[32:64])
    assert list(tmp_path.iterdir()) == []
