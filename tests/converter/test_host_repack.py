"""The compiled operators against references written here in numpy, element by element from the layout's
definition."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from tests.support.codes import Ints, pack_bits, random_codes, to_words

from humming_convert.host import native

# Widths that are no power of two share words: per output word, (input word, mask of each field, left shift).
SHARED: dict[int, list[list[tuple[int, int, int]]]] = {
    3: [[(0, 7, 0), (1, 4, 1)], [(1, 3, 0), (2, 6, 1)], [(2, 1, 0), (3, 7, 1)]],
    5: [
        [(0, 31, 0), (1, 28, 3)],
        [(1, 3, 0), (2, 31, 2), (3, 16, 3)],
        [(3, 15, 0), (4, 30, 3)],
        [(4, 1, 0), (5, 31, 1), (6, 24, 3)],
        [(6, 7, 0), (7, 31, 3)],
    ],
    6: [
        [(4 * half + 0, 63, 0), (4 * half + 1, 48, 2)]
        if part == 0
        else [(4 * half + 1, 15, 0), (4 * half + 2, 60, 2)]
        if part == 1
        else [(4 * half + 2, 3, 0), (4 * half + 3, 63, 2)]
        for half in range(2)
        for part in range(3)
    ],
    7: [[(i, (1 << (7 - i)) - 1, 0), (i + 1, 127 & ~((1 << (6 - i)) - 1), 1)] for i in range(7)],
}


def layout(
    codes: Ints,
    bits: int,
    activation: int,
    *,
    mode: int,
    transpose: bool,
    packed_k: bool,
    native_dequant: bool,
) -> Ints:
    """The kernel layout of one expert's codes [N, K] as unsigned words."""
    n, k = codes.shape
    pairs, halves, run = activation // 4, 16 // activation, 32 // activation
    width = {1: 1, 2: 2, 3: 4, 4: 4}.get(bits, 8)
    # axes: n block, half, pair, n parity, r | k block, k pair, k parity, q, column
    blocks = codes.reshape(n // 64, halves, pairs, 2, 8, k // 64, pairs, 2, 4, run)
    order = (5, 0, 4, 8, 6, 1, 2, 7, 3, 9) if transpose else (5, 0, 4, 8, 6, 1, 2, 3, 7, 9)
    lanes = blocks.transpose(order).reshape(k // 64, n // 64, 32, 4, width, 32 // width)
    fields = np.arange(32 // width)
    apart = fields if native_dequant else fields % (len(fields) // run) * run + fields // (len(fields) // run)
    top = 1 << (bits - 1)
    low_codes = lanes[..., apart if mode % 2 else fields] & (top - 1)
    top_codes = lanes[..., apart if mode // 2 else fields] & top
    words = ((low_codes | top_codes) << (fields * width)).sum(-1)
    if bits in SHARED:
        repeat = sum(1 << shift for shift in range(0, 32, width))
        count = {3: 4, 5: 8, 6: 8, 7: 8}[bits]
        assert words.shape[-1] == count
        shared = [
            sum((words[..., w] & (mask * repeat)) << shift for w, mask, shift in output)
            for output in SHARED[bits]
        ]
        words = np.stack(shared, -1)
    words = words.reshape(k // 64, n // 64, 32, pairs, halves, bits)
    if packed_k:
        split = words.reshape(*words.shape[:-1], 2, bits // 2)  # kb, nb, lane, i, j, region half, s
        ordered: Ints = split.transpose(0, 1, 4, 5, 2, 3, 6).reshape(k // 64, -1)
        return ordered
    ordered = words.transpose(0, 3, 1, 4, 2, 5).reshape(k // 64 * pairs, -1)
    return ordered


def run_repack(
    weight: torch.Tensor, n: int, k: int, bits: int, activation: int, *, fast: bool, **fields: int
) -> torch.Tensor:
    experts = weight.shape[0]
    out = torch.empty(experts, n * k * bits // 32, dtype=torch.int32)
    zero = fields.pop("zero_point", None)
    arguments = native.RepackArgs(
        weight=weight.data_ptr(),
        out=out.data_ptr(),
        zero_point=zero,
        experts=experts,
        n=n,
        k=k,
        **{
            "zero_group": k,
            "bits": bits,
            "activation_bits": activation,
            "packed": 1,
            "interleave": 3,
            **fields,
        },
    )
    native.repack(arguments, fast=fast)
    return out


REPACKS = [
    (bits, activation, mode, packed_k, dequant)
    for bits, activation in itertools.product(range(1, 9), (4, 8, 16))
    if bits <= activation
    for mode in (0, 1, 2, 3)
    for packed_k in ((False, True) if activation == 8 and bits % 2 == 0 else (False,))
    for dequant in ((False, True) if mode == 3 and not packed_k else (False,))
]


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize(("bits", "activation", "mode", "packed_k", "dequant"), REPACKS)
def test_repack_is_the_layout_of_the_definition(
    bits: int, activation: int, mode: int, packed_k: bool, dequant: bool, fast: bool
) -> None:
    n, k = 128, 256
    codes = random_codes(bits * 100 + activation, bits, 2, n, k)
    for transpose in (False, True) if packed_k else (False,):
        got = run_repack(
            pack_bits(codes, bits),
            n,
            k,
            bits,
            activation,
            fast=fast,
            interleave=mode,
            packed_k=packed_k,
            native_dequant=dequant,
            transpose_mini=transpose,
        )
        for expert in range(2):
            want = layout(
                codes[expert],
                bits,
                activation,
                mode=mode,
                transpose=transpose,
                packed_k=packed_k,
                native_dequant=dequant,
            )
            assert torch.equal(got[expert], to_words(want).reshape(-1))


@pytest.mark.parametrize("bits", [3, 4, 8])
def test_repack_takes_one_code_a_word(bits: int) -> None:
    n, k = 64, 128
    codes = random_codes(7, bits, 1, n, k)
    got = run_repack(to_words(codes), n, k, bits, 16, fast=True, packed=0)
    want = layout(codes[0], bits, 16, mode=3, transpose=False, packed_k=False, native_dequant=False)
    assert torch.equal(got[0], to_words(want).reshape(-1))


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("group", [None, 32, 64, 128])
@pytest.mark.parametrize(
    ("bits", "activation"), [(4, 8), (8, 16), (7, 16), (2, 8), (3, 8), (5, 8), (6, 8), (4, 16)]
)
def test_repack_counts_from_the_zero_point(bits: int, activation: int, group: int | None, fast: bool) -> None:
    n, k = 128, 256
    codes = random_codes(3, bits, 2, n, k)
    zeros = random_codes(4, bits, 2, n, k // group) if group else np.full((2, n, 1), 1 << (bits - 1))
    spread = np.repeat(zeros, k // zeros.shape[-1], axis=-1)
    wanted = np.where(codes >= spread, codes - spread, (1 << bits) - 1 - codes)
    packed = pack_bits(zeros.transpose(0, 2, 1), bits).transpose(1, 2).contiguous()
    fields = {"int2fp": 1} | ({"zero_point": packed.data_ptr(), "zero_group": group} if group else {})
    got = run_repack(pack_bits(codes, bits), n, k, bits, activation, fast=fast, **fields)
    for expert in range(2):
        want = layout(
            wanted[expert], bits, activation, mode=3, transpose=False, packed_k=False, native_dequant=False
        )
        assert torch.equal(got[expert], to_words(want).reshape(-1))


def converted(codes: Ints, bits: int, source: str, target: str) -> Ints:
    """Codes of the same numbers in another kind; sign and magnitude lacks the lowest number."""
    middle = 1 << (bits - 1)
    values = {
        "uint": codes - middle,
        "int": np.where(codes >= middle, codes - 2 * middle, codes),
        "sign_magnitude": np.where(codes >= middle, middle - codes, codes),
    }[source]
    magnitudes = np.minimum(np.abs(values), middle - 1)
    sign = np.where((values < 0) & (magnitudes > 0), middle, 0)
    made: Ints = {
        "uint": values + middle,
        "int": values & ((1 << bits) - 1),
        "sign_magnitude": magnitudes | sign,
    }[target]
    return made


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize(("source", "target"), list(itertools.permutations(native.KINDS, 2)))
@pytest.mark.parametrize(
    ("bits", "activation"), [(bits, act) for bits in range(1, 9) for act in (4, 8, 16) if bits <= act]
)
def test_repack_converts_codes_on_the_way(bits: int, activation: int, source: str, target: str, fast: bool) -> None:
    n, k = 64, 256
    codes = random_codes(bits, bits, 2, n, k)
    kinds = {"source_kind": native.KINDS[source], "target_kind": native.KINDS[target]}
    got = run_repack(pack_bits(codes, bits), n, k, bits, activation, fast=fast, **kinds)
    wanted = converted(codes, bits, source, target)
    for expert in range(2):
        want = layout(
            wanted[expert], bits, activation, mode=3, transpose=False, packed_k=False, native_dequant=False
        )
        assert torch.equal(got[expert], to_words(want).reshape(-1))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"n": 96},
            "the kernel layout takes a multiple of 64 rows (N), "
            "found 4-bit weights, N 96, K 128, 16-bit activations",
        ),
        ({"k": 48}, "columns (K) a multiple of 512 divided by the activation bits"),
        ({"bits": 9}, "weights of 1 to 8 bits"),
        ({"activation_bits": 12}, "activations of 4, 8 or 16 bits"),
        ({"bits": 8, "activation_bits": 4}, "weights no wider than the activations"),
        ({"packed_k": 1}, "8-bit activations, weights of an even width"),
    ],
)
def test_repack_refuses_shapes_without_a_layout(changes: dict[str, int], expected: str) -> None:
    fields = {
        "n": 64,
        "k": 128,
        "experts": 1,
        "bits": 4,
        "activation_bits": 16,
        "packed": 1,
        "interleave": 3,
        "zero_group": 128,
    }
    with pytest.raises(ValueError, match="the kernel layout takes") as caught:
        native.repack(native.RepackArgs(**(fields | changes)))
    assert expected in str(caught.value)
