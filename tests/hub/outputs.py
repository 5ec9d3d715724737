"""Outputs to publish, made in this process, and comparisons of folders with what the server has."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path

from tests.hub_server.store import Commit
from tests.support.checkpoints import make_checkpoint

from humming_convert.options import ConvertOptions
from humming_convert.pipeline import convert_checkpoint
from humming_convert.target import Target


def make_output(folder: Path, *, layers: int = 2, name: str = "out") -> Path:
    """A converted checkpoint in `folder`."""
    source = make_checkpoint(folder / f"{name}-source", layers=layers, shards=2)
    convert_checkpoint(ConvertOptions(source=source, out=folder / name, target=Target(90, (13, 0))))
    return folder / name


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a folder."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def committed(commit: Commit | None) -> dict[str, bytes]:
    """Every file of a commit but the one that the Hub puts there itself."""
    assert commit is not None
    return {name: blob.read(0, blob.size) for name, blob in commit.files.items() if name != ".gitattributes"}


def split_in_order(source: Path, folder: Path, count: int) -> None:
    """The checkpoint in `source`, of one file, in `count` files: neighbours by name stay together, as real ones do."""
    folder.mkdir()
    data = (source / "model.safetensors").read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + length])
    metadata = header.pop("__metadata__")
    names = sorted(header, key=lambda name: [part.zfill(4) if part.isdigit() else part for part in name.split(".")])
    per_file = -(-len(names) // count)
    weight_map: dict[str, str] = {}
    for number in range(count):
        file = f"model-{number + 1:05d}-of-{count:05d}.safetensors"
        part, payload = {"__metadata__": metadata}, bytearray()
        for name in names[number * per_file : (number + 1) * per_file]:
            begin, end = header[name]["data_offsets"]
            start = len(payload)
            payload += data[8 + length + begin : 8 + length + end]
            part[name] = header[name] | {"data_offsets": [start, len(payload)]}
            weight_map[name] = file
        text = json.dumps(part).encode()
        (folder / file).write_bytes(struct.pack("<Q", len(text)) + text + payload)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    shutil.copy(source / "config.json", folder)
