"""Writing past the page cache: the same bytes as through it, whatever the file system does."""

from __future__ import annotations

import errno
import mmap
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from humming_convert.errors import OutputError
from humming_convert.files import PAGE, TempFile
from humming_convert.host import cpu
from humming_convert.writer import TensorSpec, offsets_of, storage_order

DIRECT = getattr(os, "O_DIRECT", 0)
Pwrite = Callable[[int, memoryview, int], int]


def pages(count: int, seed: int = 0) -> memoryview:
    memory = mmap.mmap(-1, count * PAGE)
    memory.write(random.Random(seed).randbytes(count * PAGE))
    return memoryview(memory)


def is_direct(descriptor: int) -> bool:
    flags = Path(f"/proc/self/fdinfo/{descriptor}").read_text().split("flags:")[1].split()[0]
    return bool(int(flags, 8) & DIRECT)


def write_pieces(path: Path, pieces: list[tuple[int, memoryview]]) -> bytes:
    file = TempFile(path)
    for offset, data in pieces:
        file.write_at(data, offset)
    file.commit()
    return path.read_bytes()


def expected(pieces: list[tuple[int, memoryview]]) -> bytes:
    whole = bytearray(max(offset + data.nbytes for offset, data in pieces))
    for offset, data in pieces:
        whole[offset : offset + data.nbytes] = data
    return bytes(whole)


# Whole pages, a piece that ends inside a page, one that begins inside it, one page alone, memory off a page.
PIECES = [
    (4 * PAGE, pages(3)),
    (0, pages(1, 1)),
    (PAGE, pages(3, 2)[: 2 * PAGE + 7]),
    (3 * PAGE + 7, pages(1, 3)[:99]),
    (7 * PAGE, pages(3, 4)[8 : 8 + 2 * PAGE]),
]


def test_whole_pages_go_past_the_cache_and_the_rest_through_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    probe = TempFile(tmp_path / "probe")
    probe.abort()
    if probe._direct < 0:
        pytest.skip("the file system of the temporary folder has no O_DIRECT")
    went = {}
    pwrite = os.pwrite

    def spy(descriptor: int, data: memoryview, offset: int) -> int:
        went[offset] = is_direct(descriptor)
        return pwrite(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", spy)
    assert write_pieces(tmp_path / "x", PIECES) == expected(PIECES)
    assert went == {4 * PAGE: True, 0: True, PAGE: False, 3 * PAGE + 7: False, 7 * PAGE: False}


@pytest.mark.parametrize("order", [PIECES, PIECES[::-1]])
def test_bytes_are_the_same_without_it(
    order: list[tuple[int, memoryview]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = os.open

    def refuse(path: Path, flags: int, mode: int = 0o777) -> int:
        if flags & DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return opened(path, flags, mode)

    with_it = write_pieces(tmp_path / "with", order)
    monkeypatch.setattr(os, "open", refuse)
    assert write_pieces(tmp_path / "without", order) == with_it == expected(order)


@pytest.mark.parametrize("first", [0, 512, PAGE, 2 * PAGE + 512])
def test_a_file_system_that_gives_up_midway_gets_the_rest_the_usual_way(
    first: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pwrite = os.pwrite
    calls = 0

    def give_up(descriptor: int, data: memoryview, offset: int) -> int:
        nonlocal calls
        if not DIRECT or not is_direct(descriptor):
            return pwrite(descriptor, data, offset)
        calls += 1
        if calls > 1 or not first:
            raise OSError(errno.EINVAL, "Invalid argument")
        return pwrite(descriptor, data[:first], offset)

    monkeypatch.setattr(os, "pwrite", give_up)
    data = pages(3)
    assert write_pieces(tmp_path / "x", [(PAGE, data)]) == bytes(PAGE) + bytes(data)


def test_a_full_disk_is_named_as_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    file = TempFile(tmp_path / "x")
    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OutputError, match=r"x: cannot write 8192 bytes at 4096: No space left on device; free space"):
        file.write_at(pages(2), PAGE)
    file.abort()
    assert list(tmp_path.iterdir()) == []


def test_packed_weights_begin_at_a_page_in_memory_and_in_the_file() -> None:
    weight = torch.zeros((3, 256, 128 * 4 // 32), dtype=torch.int32)
    packed = [cpu.repack_weight(weight, 4, 16, True) for _ in range(5)]
    assert all(one.data_ptr() % PAGE == 0 and one.is_contiguous() for one in packed)
    specs = [
        TensorSpec("w13_weight_scale", "F32", (3, 5)),
        TensorSpec("w13_weight", "I32", (3, 8, 2048)),
        TensorSpec("w2_bias", "BF16", (3, 7)),
        TensorSpec("w2_weight", "I32", (3, 4, 2048)),
    ]
    ordered = storage_order(specs)
    assert [spec.name for spec in ordered] == ["w13_weight", "w2_weight", "w13_weight_scale", "w2_bias"]
    assert [begin % PAGE for begin, _ in offsets_of(ordered).values()][:3] == [0, 0, 0]
