"""Humming's operators as this package answers them: signatures, in place, outputs, devices."""

from __future__ import annotations

import inspect

import pytest
import torch
from tests.support.codes import pack_bits, random_codes

from humming_convert.host import cpu
from humming_convert.host.foreign import Foreign
from humming_convert.host.target import humming


@pytest.mark.parametrize("name", cpu.NAMES)
def test_every_argument_of_humming_is_taken(name: str) -> None:
    original = getattr(humming().ops, name, None)
    if original is None:
        pytest.skip(f"this humming-kernels has no {name}")
    ours = inspect.signature(getattr(cpu, name)).parameters
    for parameter in inspect.signature(original).parameters.values():
        assert ours[parameter.name].default == parameter.default


def test_in_place_changes_the_argument() -> None:
    words = pack_bits(random_codes(1, 4, 2, 64), 4)
    before = words.clone()
    out = cpu.convert_weight(words, "uint4", "int4", inplace=True)
    assert out is words
    assert torch.equal(words, before ^ -0x77777778)
    folded = cpu.process_mxfp4_w4a8_weight(before, torch.ones(2, 2, dtype=torch.uint8), inplace=True)
    assert folded is before


def test_repack_in_place_is_repack() -> None:
    words = pack_bits(random_codes(2, 4, 3, 64, 128), 4)
    arguments: dict[str, Foreign] = {"weight_bits": 4, "activation_bits": 16, "is_weight_packed": True}
    want = cpu.repack_weight(words, **arguments)
    got = cpu.repack_weight(words, **arguments, inplace=True)
    assert got.shape == want.shape == (3, 8, 128)
    assert torch.equal(got, want)
    assert got.data_ptr() == words.data_ptr()


def test_outputs_are_filled_and_checked() -> None:
    words = pack_bits(random_codes(3, 4, 2, 64), 4)
    outputs = torch.empty(2, 64, dtype=torch.uint8)
    assert cpu.unpack_weight(words, 4, outputs=outputs) is outputs
    assert torch.equal(outputs, cpu.unpack_weight(words, 4, dtype=torch.uint8))
    with pytest.raises(
        ValueError, match=r"expected outputs \(2, 64\) torch.int32, found \(2, 32\) torch.int32"
    ):
        cpu.unpack_weight(words, 4, outputs=torch.empty(2, 32, dtype=torch.int32))


@pytest.mark.parametrize(("lowest", "fits"), [(False, 1), (True, 0)])
@pytest.mark.parametrize(("dtype", "code"), [("uint4", 0), ("int4", 8)])
def test_check_only_answers_whether_all_codes_fit(dtype: str, code: int, lowest: bool, fits: int) -> None:
    codes = random_codes(4, 4, 64)
    codes[codes == code] = code + 1
    if lowest:
        codes[63] = code
    answer = cpu.convert_weight(pack_bits(codes, 4), dtype, "float4e0m3", check_only=True)
    assert (answer.shape, answer.dtype, int(answer)) == ((), torch.int32, fits)


def test_dtypes_with_an_exponent_do_not_convert() -> None:
    with pytest.raises(ValueError, match="only intN, uintN and floatNe0m"):
        cpu.convert_weight(torch.zeros(4, dtype=torch.int32), "float4e2m1", "uint4")
    with pytest.raises(ValueError, match="expected dtypes of one width, found uint4 and int8"):
        cpu.convert_weight(torch.zeros(4, dtype=torch.int32), "uint4", "int8")


def test_meta_tensors_get_shapes() -> None:
    meta = torch.empty(2, 64, 16, dtype=torch.int32, device="meta")
    arguments: dict[str, Foreign] = {"weight_bits": 4, "activation_bits": 8, "is_weight_packed": True}
    out = cpu.repack_weight(meta, **arguments, use_packed_k_layout=True)
    assert (out.device.type, out.shape) == ("meta", (2, 2, 512))
    assert cpu.pack_weight(cpu.unpack_weight(meta, 4), 4).shape == meta.shape


def test_missing_operators_say_so() -> None:
    operator = cpu.missing("quant_weight", lambda inputs: inputs)
    with pytest.raises(NotImplementedError, match="quant_weight has no CPU version: use --device cuda"):
        operator(torch.zeros(1))
