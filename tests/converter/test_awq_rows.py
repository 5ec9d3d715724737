"""AWQ weights transposed while they are read: the same codes, and the same final bytes, as through Humming's schema."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from humming_convert.errors import UnsupportedError
from humming_convert.kernel_format import SublayerConverter
from humming_convert.plan import Step
from humming_convert.steps import apply
from humming_convert.target import Target

# The column of eight whose code lies in nibble 0, 1, ... of an AWQ word.
COLUMN_OF_NIBBLE = (0, 2, 4, 6, 1, 3, 5, 7)


def awq_words(codes: np.ndarray) -> torch.Tensor:
    """`[..., K, N]` codes as AWQ's qweight `[..., K, N/8]`."""
    grouped = codes.reshape(*codes.shape[:-1], -1, 8).astype(np.uint32)
    words = np.zeros(grouped.shape[:-1], dtype=np.uint32)
    for nibble, column in enumerate(COLUMN_OF_NIBBLE):
        words |= grouped[..., column] << np.uint32(4 * nibble)
    return torch.from_numpy(words.view(np.int32))


@pytest.mark.parametrize("shape", [(32, 32), (64, 96), (2, 128, 64), (3, 160, 32)])
def test_rows_hold_the_codes_of_the_columns(shape: tuple[int, ...]) -> None:
    codes = np.random.default_rng(0).integers(0, 16, shape)
    rows = apply(Step("awq_rows"), awq_words(codes)).numpy().view(np.uint32)
    assert rows.shape == (*shape[:-2], shape[-1], shape[-2] // 8)
    unpacked = (rows[..., None] >> (4 * np.arange(8, dtype=np.uint32))) & 15
    np.testing.assert_array_equal(unpacked.reshape(*rows.shape[:-1], -1), np.swapaxes(codes, -1, -2))


def converter(n: int, k: int, small: dict[str, torch.Tensor], *, is_packed: bool) -> SublayerConverter:
    schema = {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True}
    return SublayerConverter(
        schema,
        None,
        shape_n=n,
        shape_k=k,
        shape_n_stacks=[n],
        num_experts=3,
        has_bias=False,
        param_dtype="float16",
        target=Target(90),
        small=small,
        weight_is_packed=is_packed,
    )


@pytest.mark.parametrize(("n", "k"), [(256, 128), (256, 256), (320, 192)])
def test_final_bytes_are_those_of_the_schema_s_own_form(n: int, k: int) -> None:
    rng = np.random.default_rng(n + k)
    qweight = awq_words(rng.integers(0, 16, (3, k, n)))
    small = {
        "scales": torch.from_numpy(rng.uniform(0.01, 1, (3, k // 64, n)).astype(np.float16)),
        "qzeros": awq_words(rng.integers(0, 16, (3, k // 64, n))),
    }
    expected = converter(n, k, small, is_packed=False).convert(qweight, 0)
    rows = torch.stack([apply(Step("awq_rows"), one) for one in qweight])
    found = converter(n, k, small, is_packed=True)
    for first in range(3):
        part = found.convert(rows[first : first + 1], first)
        assert {name: value.tolist() for name, value in part.items()} == {
            name: value[first : first + 1].tolist() for name, value in expected.items()
        }
    if n != k:
        with pytest.raises(UnsupportedError, match=rf"\(3, {n}, {k // 8}\)"):
            found.convert(qweight, 0)
