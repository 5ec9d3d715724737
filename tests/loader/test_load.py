"""Reading a rank's bytes: any order of experts, any buffer size, checksums, damaged files."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.loader.test_slicing import NAME, int4_layer

from humming_loader import load
from humming_loader.entries import LayerEntry, SublayerEntry, TensorEntry
from humming_loader.errors import ChecksumError, FileError, TensorError
from humming_loader.layer import moves_of
from humming_loader.load import Move, empty_target, fill, wants_verification
from humming_loader.slicing import LayerSlice, slice_layer

Values = dict[str, np.ndarray]


@pytest.fixture
def stored(tmp_path: Path) -> tuple[LayerEntry, Values]:
    """A layer written below `tmp_path` with random bytes: its entry, and each tensor's bytes by expert."""
    rng = np.random.default_rng(0)
    layer, header, payload, values, offset = int4_layer(), {}, [], {}, 0
    sublayers: dict[str, SublayerEntry] = {}
    for name, entry in layer.sublayers.items():
        tensors: dict[str, TensorEntry] = {}
        for key, tensor in entry.tensors.items():
            size = int(np.prod(tensor.shape[1:])) * (4 if tensor.dtype == "I32" else 2)
            data = rng.integers(0, 256, (tensor.shape[0], size), dtype=np.uint8)
            end = offset + data.nbytes
            header[tensor.name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [offset, end]}
            offset = end
            payload.append(data.tobytes())
            values[f"{name}_{key}"] = data
            tensors[key] = replace(tensor, sha256=hashlib.sha256(data.tobytes()).hexdigest())
        sublayers[name] = replace(entry, tensors=tensors)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path = tmp_path / "humming/a.safetensors"
    path.parent.mkdir()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(payload))
    return replace(layer, sublayers=sublayers), values


def loaded(root: Path, part: LayerSlice, *, verify: bool = False) -> Values:
    """The part's bytes by expert."""
    tensors = {
        name: {key: empty_target(piece, "cpu") for key, piece in sublayer.tensors.items()}
        for name, sublayer in part.sublayers.items()
    }
    fill(root, moves_of(part, tensors), verify=verify)
    return {
        f"{name}_{key}": value.view(torch.uint8).numpy().reshape(len(part.experts), -1)
        for name, group in tensors.items()
        for key, value in group.items()
    }


def test_all_experts_with_checksums(tmp_path: Path, stored: tuple[LayerEntry, Values]) -> None:
    layer, values = stored
    found = loaded(tmp_path, slice_layer(NAME, layer), verify=True)
    assert found.keys() == values.keys()
    assert all(np.array_equal(found[name], values[name]) for name in values)


@pytest.mark.parametrize("buffer", [load.BUFFER_BYTES, 1000])
@pytest.mark.parametrize("experts", [(2,), (1, 2), (2, 0, 1), (0, 2, 2, 0), ()])
def test_experts_in_any_order(
    tmp_path: Path,
    stored: tuple[LayerEntry, Values],
    experts: tuple[int, ...],
    buffer: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(load, "BUFFER_BYTES", buffer)
    layer, values = stored
    found = loaded(tmp_path, slice_layer(NAME, layer, experts=experts)) if experts else {}
    assert all(np.array_equal(found[name], values[name][list(experts)]) for name in found)


@pytest.mark.parametrize(("gap", "buffer"), [(0, 1 << 24), (1 << 20, 1 << 24), (1 << 20, 5000)])
def test_a_rank_whatever_is_read_at_once(
    tmp_path: Path, stored: tuple[LayerEntry, Values], gap: int, buffer: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load, "GAP_BYTES", gap)
    monkeypatch.setattr(load, "BUFFER_BYTES", buffer)
    layer, values = stored
    found = loaded(tmp_path, slice_layer(NAME, layer, tp_rank=1, tp_size=2, experts=(2, 1)))
    gate_up = values["w13_weight"].reshape(3, 16, 2, 2, 2048)  # K rows, gate or up, rank, bytes
    assert np.array_equal(found["w13_weight"], gate_up[[2, 1], :, :, 1].reshape(2, -1))
    assert np.array_equal(found["w13_bias"], values["w13_bias"].reshape(3, 2, 2, -1)[[2, 1], :, 1].reshape(2, -1))
    assert np.array_equal(found["w2_weight"], values["w2_weight"].reshape(3, 2, -1)[[2, 1], 1])
    assert not found["w2_bias"].any()


def test_checksum_of_a_flipped_byte(tmp_path: Path, stored: tuple[LayerEntry, Values]) -> None:
    layer, values = stored
    path = tmp_path / "humming/a.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1  # the last byte of the last tensor, w2_bias
    path.write_bytes(data)
    assert np.array_equal(loaded(tmp_path, slice_layer(NAME, layer))["w2_weight"], values["w2_weight"])
    entry = layer.sublayers["w2"].tensors["bias"]
    with pytest.raises(ChecksumError) as caught:
        loaded(tmp_path, slice_layer(NAME, layer, tp_rank=1, tp_size=2), verify=True)
    assert str(caught.value).startswith(
        f"tensor 'model.layers.0.mlp.experts.w2_bias' in humming/a.safetensors: expected sha256 {entry.sha256}, found "
    )


def test_truncated_file(tmp_path: Path, stored: tuple[LayerEntry, Values]) -> None:
    path = tmp_path / "humming/a.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(FileError, match=r"expected .* bytes, found"):
        loaded(tmp_path, slice_layer(NAME, stored[0]))


def test_missing_file(tmp_path: Path, stored: tuple[LayerEntry, Values]) -> None:
    (tmp_path / "humming/a.safetensors").unlink()
    with pytest.raises(FileError, match="expected a readable file, found No such file"):
        loaded(tmp_path, slice_layer(NAME, stored[0]))


def test_target_of_another_shape(tmp_path: Path, stored: tuple[LayerEntry, Values]) -> None:
    part = slice_layer(NAME, stored[0])
    piece = part.sublayers["w2"].tensors["bias"]
    with pytest.raises(TensorError, match=r"expected a contiguous target of shape \[3, 256\], found \[3, 128\]"):
        fill(tmp_path, [Move(piece, part.experts, torch.empty(3, 128, dtype=torch.bfloat16))])


@pytest.mark.parametrize(("value", "expected"), [("1", True), ("true", True), ("0", False), ("", False), (None, False)])
def test_verification_by_environment(value: str | None, expected: bool) -> None:
    assert wants_verification({} if value is None else {"HUMMING_LOADER_VERIFY": value}) is expected
