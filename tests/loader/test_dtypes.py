from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from humming_loader.dtypes import (
    SAFETENSORS_DTYPES,
    code_of_torch_dtype,
    dtype_info,
    tensor_nbytes,
)
from humming_loader.errors import DtypeError


@pytest.mark.parametrize("code", sorted(SAFETENSORS_DTYPES))
def test_every_code_and_width_is_one_that_safetensors_accepts(code: str, tmp_path: Path) -> None:
    # 8 elements of b bits are b bytes; the library compares dtype, shape and offsets.
    nbytes = SAFETENSORS_DTYPES[code].bits
    header = json.dumps({"t": {"dtype": code, "shape": [8], "data_offsets": [0, nbytes]}}).encode()
    path = tmp_path / "one.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(nbytes))
    with safe_open(path, "pt") as opened:
        assert opened.get_slice("t").get_dtype() == code
        assert opened.get_slice("t").get_shape() == [8]


def test_no_code_of_the_library_is_missing(tmp_path: Path) -> None:
    # The library lists its variants in the error for an unknown one.
    header = b'{"t":{"dtype":"X","shape":[1],"data_offsets":[0,1]}}'
    path = tmp_path / "unknown.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + b"\0")
    with pytest.raises(Exception, match="unknown variant") as caught, safe_open(path, "pt"):
        pass
    listed = str(caught.value).split("expected one of", 1)[1].split(" at line")[0]
    codes = {item.strip(" `") for item in listed.split(",")}
    assert codes == set(SAFETENSORS_DTYPES)


@pytest.mark.parametrize("code", sorted(SAFETENSORS_DTYPES))
def test_torch_names_exist_and_have_that_width(code: str) -> None:
    info = SAFETENSORS_DTYPES[code]
    if info.torch_name is None:
        assert code in {"F4", "F6_E2M3", "F6_E3M2"}
        return
    dtype = getattr(torch, info.torch_name)
    assert dtype.itemsize * 8 == info.bits
    assert code_of_torch_dtype(dtype, "t") == code


def test_unknown_code_names_the_tensor() -> None:
    with pytest.raises(DtypeError) as caught:
        dtype_info("F7", "model.layers.0.w")
    assert str(caught.value) == "tensor 'model.layers.0.w': unknown dtype code 'F7'"


def test_unknown_torch_dtype_names_the_tensor() -> None:
    with pytest.raises(DtypeError, match=r"^tensor 'x': unknown dtype code 'complex128'$"):
        code_of_torch_dtype(torch.complex128, "x")


def test_sizes() -> None:
    assert tensor_nbytes("BF16", (3, 5), "t") == 30
    assert tensor_nbytes("F4", (3, 2), "t") == 3
    assert tensor_nbytes("F32", (), "t") == 4
    assert tensor_nbytes("I64", (0, 7), "t") == 0
    with pytest.raises(DtypeError, match="ends inside a byte"):
        tensor_nbytes("F6_E3M2", (3,), "t")


def test_import_stays_light() -> None:
    code = "import sys, humming_loader.dtypes; print([m for m in ('torch', 'numpy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
