"""The compiled operators on streams of codes against references written here, value by value."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from tests.support.codes import pack_bits, random_codes

from humming_convert.host import native


def value_of(code: int, bits: int, kind: str) -> int:
    middle = 1 << (bits - 1)
    if kind == "uint":
        return code - middle
    if kind == "int":
        return code - 2 * middle if code >= middle else code
    return -(code - middle) if code >= middle else code


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8])
def test_pack_and_unpack_are_one_bit_stream(bits: int, dtype: torch.dtype) -> None:
    codes = random_codes(bits, bits, 3, 5, 96)
    words = pack_bits(codes, bits)
    values = torch.from_numpy(codes).to(dtype)
    packed = torch.empty_like(words)
    native.pack(values, packed, bits)
    assert torch.equal(packed, words)
    back = torch.empty_like(values)
    native.unpack(words, back, bits)
    assert torch.equal(back, values)


def test_pack_takes_the_low_bits_only() -> None:
    out = torch.empty(1, 4, dtype=torch.int32)
    native.pack(torch.full((1, 32), -1, dtype=torch.int32), out, 4)
    assert out.tolist() == [[-1, -1, -1, -1]]


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize(("source", "target"), list(itertools.product(native.KINDS, repeat=2)))
def test_convert_keeps_every_value_that_fits(bits: int, source: str, target: str) -> None:
    codes = np.concatenate([np.arange(1 << bits), random_codes(bits, bits, 1 << 12)])[: 1 << 12].reshape(
        4, -1
    )
    words = pack_bits(codes, bits)
    out = torch.empty_like(words)
    native.convert(words, out, bits, source, target)
    unpacked = torch.empty(codes.shape, dtype=torch.int32)
    native.unpack(out, unpacked, bits)
    largest = (1 << (bits - 1)) - 1
    for code, got in zip(codes.ravel().tolist(), unpacked.ravel().tolist(), strict=True):
        value = value_of(code, bits, source)
        if target == "sign_magnitude":
            value = max(value, -largest)  # the one value that sign and magnitude lack
            assert got != largest + 1  # never a negative zero
        assert value_of(got, bits, target) == value
    again = words.clone()
    native.convert(again, again, bits, source, target)
    assert torch.equal(again, out)


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("position", [0, 1, 31, 4095, 40000, 65535])
def test_contains_code_finds_the_only_one(bits: int, position: int) -> None:
    codes = np.ones(1 << 16, dtype=np.int64)
    assert native.contains_code(pack_bits(codes, bits), bits, 0) is False
    assert native.contains_code(pack_bits(codes, bits), bits, 1) is True
    codes[position] = 0
    assert native.contains_code(pack_bits(codes, bits), bits, 0) is True


E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


@pytest.mark.parametrize("offset", [0, 1, 2, 3, 4, 5, 8, 60, 127])
@pytest.mark.parametrize("words", [4, 8])
def test_fold_rounds_to_the_nearest_e2m1_value(offset: int, words: int) -> None:
    codes = np.tile(np.arange(16), 2 * words).reshape(4, -1)
    packed = pack_bits(codes, 4)
    out = torch.empty_like(packed)
    native.fold_e2m1(packed, out, torch.full((packed.numel() // words,), offset, dtype=torch.uint8))
    got = torch.empty(codes.shape, dtype=torch.int32)
    native.unpack(out, got, 4)
    for code, result in zip(codes.ravel().tolist(), got.ravel().tolist(), strict=True):
        if code == 8:
            assert result == 0
            continue
        exact = E2M1[code & 7] * 2.0**-offset
        nearest = max(range(8), key=lambda i: (-abs(E2M1[i] - exact), E2M1[i]))
        assert result == (code & 8 | nearest if offset else code)


def test_fold_refuses_offsets_that_have_no_meaning() -> None:
    words = torch.zeros(4, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"a scale lies 2\^128 below the range kept for its tensor"):
        native.fold_e2m1(words, words, torch.tensor([128], dtype=torch.uint8))


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize(("k", "n"), [(64, 64), (128, 192), (72, 64), (8, 8), (192, 72)])
def test_awq_is_undone_and_packed_along_k(k: int, n: int, fast: bool) -> None:
    codes = random_codes(k * n, 4, 2, k, n)
    stored = codes.reshape(2, k, n // 8, 8)[..., [0, 2, 4, 6, 1, 3, 5, 7]].reshape(2, k, n)
    out = torch.empty(2, n, k // 8, dtype=torch.int32)
    native.awq_to_packed(pack_bits(stored, 4), out, fast=fast)
    assert torch.equal(out, pack_bits(codes.transpose(0, 2, 1), 4))


def test_wrong_arguments_are_refused() -> None:
    words = torch.zeros(2, 6, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"expected torch.int32, found torch.float32"):
        native.convert(words.float(), words, 4, "uint", "int")
    with pytest.raises(ValueError, match=r"cannot unpack 4-bit codes from \(2, 6\) into \(2, 32\)"):
        native.unpack(words, torch.zeros(2, 32, dtype=torch.int32), 4)
    with pytest.raises(ValueError, match=r"expected a contiguous CPU tensor"):
        native.contains_code(words.t(), 4, 0)
