"""Scales in one native pass: the operator against numpy, the seam against Humming's own function, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.support.codes import pack_bits, random_codes
from tests.support.sublayers import raw

from humming_convert.host import native, scales
from humming_convert.host.foreign import Foreign
from humming_convert.host.target import emulate, humming
from humming_convert.target import Target

DTYPES = [torch.uint8, torch.float8_e8m0fnu, torch.float16, torch.bfloat16, torch.float32, torch.int32]


def random_bytes(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 5) -> torch.Tensor:
    width = dtype.itemsize
    drawn = np.random.default_rng(seed).integers(0, 256, size=(*shape[:-1], shape[-1] * width), dtype=np.uint8)
    return torch.from_numpy(drawn).view(dtype)


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32])
@pytest.mark.parametrize("shape", [(3, 128, 16), (64, 1), (2, 2, 192, 40), (1, 64, 6), (128, 19)])
def test_transpose_moves_rows_inside_their_blocks(shape: tuple[int, ...], dtype: torch.dtype, fast: bool) -> None:
    values = random_bytes(shape, dtype)
    order = np.random.default_rng(1).permutation(64)
    rows = np.arange(shape[-2]).reshape(-1, 64)[:, order].ravel()
    out = torch.empty((*shape[:-2], shape[-1], shape[-2]), dtype=dtype)
    native.transpose(values, out, order.tolist(), fast=fast)
    assert np.array_equal(out.numpy(), np.swapaxes(values.numpy()[..., rows, :], -1, -2))


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32])
@pytest.mark.parametrize(("n", "groups"), [(1, 1), (7, 5), (33, 17), (300, 64), (513, 2)])
def test_transpose_without_blocks(n: int, groups: int, dtype: torch.dtype, fast: bool) -> None:
    values = random_bytes((2, n, groups), dtype)
    out = torch.empty((2, groups, n), dtype=dtype)
    native.transpose(values, out, [0], fast=fast)
    assert torch.equal(out, values.transpose(-1, -2))


def test_transpose_refuses_what_it_cannot_do() -> None:
    values = torch.zeros((2, 96, 4), dtype=torch.int16)
    out = torch.empty((2, 4, 96), dtype=torch.int16)
    with pytest.raises(ValueError, match="by blocks of 64"):
        native.transpose(values, out, range(64))
    with pytest.raises(ValueError, match="cannot transpose"):
        native.transpose(values, out.view(2, 96, 4), range(32))
    with pytest.raises(ValueError, match=r"by \(0, 2\)"):
        native.transpose(values, out, [0, 2])
    with pytest.raises(ValueError, match="contiguous"):
        native.transpose(values.transpose(-1, -2), out, range(32))
    with pytest.raises(ValueError, match=r"torch\.int64"):
        native.transpose(values.long(), out.long(), range(32))


def check_against_humming(values: torch.Tensor, target: Target, **options: Foreign) -> bool:
    """Whether the native pass did the work; its bytes are held against Humming's function either way."""
    modules = humming()
    original = modules.transform.transform_humming_weight_scale
    calls = []

    def counted(given: torch.Tensor, **kwargs: Foreign) -> torch.Tensor:
        calls.append(tuple(given.shape))
        result: torch.Tensor = original(given, **kwargs)
        return result

    with emulate(target):
        unit = 1 if not options.get("is_mxmma") else 2 if options["mxmma_scale_vec"] == 1 else 4
        unit = 4 if options.get("is_umma") else unit
        found = scales.transform(counted, values, min(4, unit * values.element_size()), **options)
        wanted = original(values, **options)
        through_the_seam = modules.transform.transform_humming_weight_scale(values, **options)
    for result in (found, through_the_seam):
        assert (result.dtype, result.shape, result.is_contiguous()) == (wanted.dtype, wanted.shape, True)
        assert raw(result) == raw(wanted)
    return tuple(values.shape) not in calls


@pytest.mark.parametrize("is_ppu", [False, True])
@pytest.mark.parametrize("on_c", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(2, 192, 16), (3, 64, 1), (128, 21), (2, 3, 128, 5)])
def test_software_scales(shape: tuple[int, ...], dtype: torch.dtype, on_c: bool, is_ppu: bool) -> None:
    values = random_bytes(shape, dtype)
    assert check_against_humming(values, Target(80, is_ppu=is_ppu), to_apply_on_c=on_c)
    assert check_against_humming(values, Target(90), to_apply_on_c=on_c)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_block_scales_are_only_transposed(dtype: torch.dtype) -> None:
    assert check_against_humming(random_bytes((3, 12, 16), dtype), Target(90), is_blockwise=True)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e8m0fnu, torch.float8_e4m3fn])
@pytest.mark.parametrize(("vector", "groups"), [(1, 6), (2, 8), (4, 8), (4, 64)])
def test_scales_of_block_scaled_tensor_cores(dtype: torch.dtype, vector: int, groups: int) -> None:
    options = {"is_mxmma": True, "mxmma_scale_vec": vector, "is_umma": False}
    assert check_against_humming(random_bytes((2, 256, groups), dtype), Target(120), **options)
    options["is_umma"] = True
    natively = groups % 4 == 0
    assert check_against_humming(random_bytes((2, 256, groups), dtype), Target(100), **options) == natively


@pytest.mark.parametrize(("shape", "options"), [((2, 32, 2), {}), ((2, 192, 8), {"is_mxmma": True, "is_umma": True})])
def test_rows_that_are_no_whole_blocks_are_left_to_humming(shape: tuple[int, ...], options: dict[str, bool]) -> None:
    # The first mixes groups in its rows of 64, the second is padded; what they give is Humming's business.
    assert not check_against_humming(random_bytes(shape, torch.uint8), Target(100), mxmma_scale_vec=4, **options)


def test_transposed_scales_are_taken_as_they_lie() -> None:
    values = random_bytes((2, 16, 128), torch.bfloat16).transpose(-1, -2)
    assert check_against_humming(values, Target(90))


def test_only_an_order_inside_blocks_is_learned() -> None:
    def transposed(rows: torch.Tensor) -> torch.Tensor:
        return rows.transpose(-1, -2).contiguous()

    learned = scales.learn(transposed, torch.bfloat16, 2)
    assert learned is not None
    assert (learned.order, learned.result) == ((0,), torch.bfloat16)
    refused = [
        lambda rows: rows,  # not transposed
        lambda rows: transposed(rows.flip(0)),  # across all rows
        lambda rows: transposed(rows).flip(0),  # groups change places
        lambda rows: transposed(rows) + 1,  # values change
        lambda rows: transposed(rows)[..., 1:],  # a row is lost
        lambda rows: transposed(rows).to(torch.int32),  # another width
        lambda rows: rows.transpose(-1, -2),  # not laid out
        lambda rows: transposed(torch.cat([rows[1::2], rows[::2]])),
    ]
    for function in refused:
        assert scales.learn(function, torch.int16, 2) is None


def packed_zero_points(bits: int, *shape: int) -> torch.Tensor:
    """Random `bits`-bit codes packed along the second to last axis of `[..., n, groups]`."""
    codes = np.moveaxis(random_codes(bits, bits, *shape), -1, -2)
    return pack_bits(np.ascontiguousarray(codes), bits).transpose(-1, -2).contiguous()


@pytest.mark.parametrize("is_ppu", [False, True])
@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("shape", [(2, 128, 5), (192, 3), (3, 64, 1)])
def test_zero_points(shape: tuple[int, ...], bits: int, is_ppu: bool) -> None:
    modules = humming()
    original = modules.transform.transform_humming_zero_point
    words, dtype = packed_zero_points(bits, *shape), modules.dtypes.DataType.from_str(f"uint{bits}")
    calls = []

    def counted(given: torch.Tensor, **kwargs: Foreign) -> torch.Tensor:
        calls.append(tuple(given.shape))
        result: torch.Tensor = original(given, **kwargs)
        return result

    with emulate(Target(80, is_ppu=is_ppu)):
        wanted = original(words, dtype, packed=True)
        found = scales.transform_zero_point(counted, words, bits, dtype=dtype, packed=True)
        through_the_seam = modules.transform.transform_humming_zero_point(words, dtype, packed=True)
    assert tuple(words.shape) not in calls
    for result in (found, through_the_seam):
        assert (result.dtype, result.shape, result.is_contiguous()) == (wanted.dtype, wanted.shape, True)
        assert raw(result) == raw(wanted)


def test_zero_points_in_other_forms_are_left_to_humming() -> None:
    modules = humming()
    transform = modules.transform.transform_humming_zero_point
    uint4 = modules.dtypes.DataType.from_str("uint4")
    words = packed_zero_points(4, 2, 128, 4)
    codes = torch.from_numpy(random_codes(3, 4, 2, 128, 4).astype(np.int32))
    floats = torch.rand((2, 128, 4), generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    with emulate(Target(100)):
        seam = modules.transform.transform_humming_zero_point
        for given, options in ((words, {"packed": True, "num_groups_per_mma": 2}), (codes, {}), (floats, {})):
            assert raw(seam(given, uint4, **options)) == raw(transform(given, uint4, **options))


def test_only_an_order_of_zero_points_inside_blocks_is_learned() -> None:
    def in_bytes(words: torch.Tensor) -> torch.Tensor:
        codes = torch.empty((words.shape[1], words.shape[0] * 8), dtype=torch.int32)
        native.unpack(words.transpose(-1, -2).contiguous(), codes, 4)
        return codes.to(torch.uint8).view(torch.int32)

    learned = scales.learn_zero_points(in_bytes, 4)
    assert learned is not None
    assert (learned.order, learned.unit_bits) == (tuple(range(32)), 8)
    refused = [
        lambda words: words,  # not transposed
        lambda words: in_bytes(words).flip(0),  # groups change places
        lambda words: in_bytes(words).flip(1),  # across all rows
        lambda words: in_bytes(words) ^ 1,  # values change
        lambda words: in_bytes(words)[:1],  # a group is lost
        lambda words: in_bytes(words).to(torch.int64),
        lambda words: torch.full_like(in_bytes(words), -1),
    ]
    for function in refused:
        assert scales.learn_zero_points(function, 4) is None


def test_zero_points_refuse_what_does_not_fit() -> None:
    words, out = torch.zeros((2, 8, 3), dtype=torch.int32), torch.empty((2, 3, 8), dtype=torch.int32)
    with pytest.raises(ValueError, match="cannot lay out zero points"):
        native.zero_points(words, out.view(2, 8, 3), 4, 4, range(64))
    with pytest.raises(ValueError, match="4-bit zero points of 64 rows in blocks of 48"):
        native.zero_points(words, out, 4, 4, range(48))
    with pytest.raises(ValueError, match="in blocks of 32 by 4 bits"):
        native.zero_points(words, out, 4, 4, [32] * 32)
