"""Bring a rank's part of packed tensors into given torch tensors, by byte ranges, through small host buffers.

Tensors move as bytes, whatever their dtype; the device holds nothing beyond the destination.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from humming_loader.dtypes import dtype_info
from humming_loader.entries import TensorEntry
from humming_loader.errors import ChecksumError, TensorError
from humming_loader.hub import fetch_missing
from humming_loader.reader import ExpertsFile
from humming_loader.slicing import TensorSlice
from humming_loader.staging import BUFFER_BYTES as BUFFER_BYTES
from humming_loader.staging import Staging

VERIFY_VARIABLE = "HUMMING_LOADER_VERIFY"
HASH_BYTES = 4 << 20
# Ranges closer than this are read as one: the kernel reads ahead further than that anyway.
GAP_BYTES = 16 << 10
WORKERS = min(16, max(4, os.cpu_count() or 1))

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Move:
    """Fill `target` (contiguous, local shape and dtype of `part`) with the rank's part of `experts`."""

    part: TensorSlice
    experts: tuple[int, ...]
    target: torch.Tensor


def wants_verification(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether HUMMING_LOADER_VERIFY asks for the sha256 of every tensor."""
    return environ.get(VERIFY_VARIABLE, "0").strip().lower() in ("1", "true", "yes", "on")


def fill(root: Path, moves: Sequence[Move], *, verify: bool | None = None, workers: int = WORKERS) -> None:
    """Read every move's tensor from the experts files below `root`; what a snapshot of the Hub lacks is downloaded.

    Raises HubError, FileError, TensorError (a header that the manifest does not describe, a target of another shape)
    or, with `verify` (None: as HUMMING_LOADER_VERIFY says), ChecksumError before any byte reaches a target.
    """
    for move in moves:
        _check_target(move)
    names = list(dict.fromkeys(move.part.entry.file for move in moves))
    fetch_missing(root, names)
    with ExitStack() as stack:
        files = {name: stack.enter_context(ExpertsFile(root / name)) for name in names}
        for move in moves:
            files[move.part.entry.file].check(move.part.entry)
        with ThreadPoolExecutor(workers, thread_name_prefix="humming-load") as pool:
            if wants_verification() if verify is None else verify:
                _verify(files, [move.part.entry for move in moves], pool)
            _run(files, moves, pool)


def _check_target(move: Move) -> None:
    target, part = move.target, move.part
    name = part.entry.name
    if tuple(target.shape) != part.shape or not target.is_contiguous():
        raise TensorError(name, f"a contiguous target of shape {list(part.shape)}", f"{list(target.shape)}")
    if part.has_experts and len(move.experts) != part.shape[0]:
        raise TensorError(name, f"{part.shape[0]} experts", f"{len(move.experts)}")
    expected = part.target_bytes * (part.shape[0] if part.has_experts else 1)
    if target.numel() * target.element_size() != expected:
        raise TensorError(name, f"a target of {expected} bytes", f"{target.numel() * target.element_size()}")


def _verify(files: Mapping[str, ExpertsFile], entries: Sequence[TensorEntry], pool: ThreadPoolExecutor) -> None:
    def check(entry: TensorEntry) -> None:
        found = _sha256(files[entry.file], entry.name)
        if found != entry.sha256:
            raise ChecksumError(entry.name, entry.file, entry.sha256, found)

    for _ in pool.map(check, entries):
        pass


def _sha256(file: ExpertsFile, name: str) -> str:
    digest, total = hashlib.sha256(), file.tensors[name].nbytes
    buffer = bytearray(min(HASH_BYTES, total))
    for start in range(0, total, HASH_BYTES):
        view = memoryview(buffer)[: min(HASH_BYTES, total - start)]
        file.read_into(name, view, start)
        digest.update(view)
    return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class _Piece:
    """What one buffer holds: consecutive local experts of one move, or a run of one expert's bytes."""

    move: Move
    target: torch.Tensor  # bytes
    slots: range
    begin: int = 0
    end: int = 0  # bytes of a single expert that is larger than a buffer and taken as it is; 0: whole experts


def _pieces(moves: Sequence[Move]) -> Iterator[_Piece]:
    for move in moves:
        part = move.part
        count = part.shape[0] if part.has_experts else 1
        if part.target_bytes == 0:
            continue
        flat = move.target.detach().reshape(-1).view(torch.uint8)
        if part.target_bytes > BUFFER_BYTES and part.is_whole:
            for slot in range(count):
                first = slot * part.target_bytes
                for begin in range(0, part.target_bytes, BUFFER_BYTES):
                    end = min(begin + BUFFER_BYTES, part.target_bytes)
                    yield _Piece(move, flat[first + begin : first + end], range(slot, slot + 1), begin, end)
            continue
        step = max(1, BUFFER_BYTES // part.target_bytes)
        for first in range(0, count, step):
            slots = range(first, min(first + step, count))
            yield _Piece(move, flat[first * part.target_bytes : slots.stop * part.target_bytes], slots)


def _run(files: Mapping[str, ExpertsFile], moves: Sequence[Move], pool: ThreadPoolExecutor) -> None:
    local = threading.local()
    devices = {move.target.device for move in moves if move.target.is_cuda}
    ready = {device: torch.cuda.current_stream(device).record_event() for device in devices}
    stagings: list[Staging] = []

    def work(piece: _Piece) -> None:
        target = piece.target
        if not target.is_cuda:
            _read(files, piece, target.numpy())
            return
        staging: Staging | None = getattr(local, "staging", None)
        if staging is None:
            local.staging = staging = Staging(ready)
            stagings.append(staging)
        buffer = staging.buffer(target.numel())
        _read(files, piece, buffer.numpy())
        staging.send(buffer, target)

    try:
        for _ in pool.map(work, _pieces(moves)):
            pass
    finally:
        for staging in stagings:
            staging.close()


def _read(files: Mapping[str, ExpertsFile], piece: _Piece, out: Bytes) -> None:
    part = piece.move.part
    file = files[part.entry.file]
    if part.is_zero:
        out.fill(0)
        return
    if not part.has_experts:
        file.read_into(part.entry.name, out.data, piece.begin)
        return
    experts = [piece.move.experts[slot] for slot in piece.slots]
    if piece.end:
        start = experts[0] * part.source_bytes + piece.begin
        file.read_into(part.entry.name, out.data, start)
        return
    for first, count in _runs(experts):
        rows = out[first * part.target_bytes : (first + count) * part.target_bytes]
        start = experts[first] * part.source_bytes
        if part.is_whole:
            file.read_into(part.entry.name, rows.data, start)
            continue
        for index in range(count):
            row = rows[index * part.target_bytes : (index + 1) * part.target_bytes]
            _read_part(file, part, start + index * part.source_bytes, row)


def _runs(experts: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(position, length) of each run of consecutive ids."""
    first = 0
    for index in range(1, len(experts) + 1):
        if index == len(experts) or experts[index] != experts[index - 1] + 1:
            yield first, index - first
            first = index


def _read_part(file: ExpertsFile, part: TensorSlice, start: int, out: Bytes) -> None:
    """One expert's part: its tiles from the file's bytes at `start`, `fill` elsewhere."""
    tile = part.tile_bytes
    moved = sum(segment.count for segment in part.segments)
    if moved < part.target_tiles:
        out.fill(part.fill)
    rows = out.reshape(part.rows, part.target_tiles * tile)
    stride = part.source_tiles * tile
    if part.rows == 1 or (part.source_tiles - moved) * tile > GAP_BYTES:
        for number in range(part.rows):
            for segment in part.segments:
                place = rows[number, segment.target * tile : (segment.target + segment.count) * tile]
                begin = start + number * stride + segment.source * tile
                file.read_into(part.entry.name, place.data, begin)
        return
    step = max(1, BUFFER_BYTES // stride)
    scratch = np.empty(min(step, part.rows) * stride, dtype=np.uint8)
    for first in range(0, part.rows, step):
        count = min(step, part.rows - first)
        view = scratch[: count * stride]
        file.read_into(part.entry.name, view.data, start + first * stride)
        _pick(view.reshape(count, stride), rows[first : first + count], part)


def _pick(source: Bytes, target: Bytes, part: TensorSlice) -> None:
    tile = part.tile_bytes
    for segment in part.segments:
        wanted = source[:, segment.source * tile : (segment.source + segment.count) * tile]
        target[:, segment.target * tile : (segment.target + segment.count) * tile] = wanted


def empty_target(part: TensorSlice, device: torch.device | str) -> torch.Tensor:
    """An uninitialized tensor of the part's local shape and stored dtype on `device`."""
    name = dtype_info(part.dtype, part.entry.name).torch_name
    dtype = getattr(torch, name) if name else None
    if not isinstance(dtype, torch.dtype):
        raise TensorError(part.entry.name, "a dtype that torch has", part.dtype)
    return torch.empty(part.shape, dtype=dtype, device=device)
