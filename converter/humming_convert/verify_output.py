"""Check a finished output against its own manifest: every file, every tensor, every checksum."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from humming_convert.decode import parse_layout
from humming_convert.errors import Problem, VerificationError
from humming_convert.files import open_regular, read_regular
from humming_convert.passthrough import INDEX_FILE
from humming_convert.progress import ByteProgress
from humming_convert.replacing import kernel_files
from humming_loader.dtypes import tensor_nbytes
from humming_loader.entries import FileEntry, LayerEntry, Manifest, SublayerEntry, TensorEntry
from humming_loader.errors import LoaderError, ManifestError
from humming_loader.kernel_entries import KERNELS_MANIFEST
from humming_loader.kernel_entries import from_json as from_kernels_json
from humming_loader.manifest import MANIFEST_FILE, from_json
from humming_loader.reader import ExpertsFile

BUFFER_BYTES = 8 << 20
_INPUT_SCALES = frozenset(("input_scale", "input_scale_2"))


def read_manifest(out: Path) -> Manifest:
    """The manifest of `out`. Raises VerificationError when there is none, or none that this version reads."""
    path = out / MANIFEST_FILE
    try:
        return from_json(read_regular(path))
    except OSError as error:
        hint = "the conversion did not finish, or this is no output of humming-convert"
        raise VerificationError([Problem(str(path), "a manifest", error.strerror or "none", hint)]) from error
    except ManifestError as error:
        where = f"{path}: {error.field}"
        raise VerificationError([Problem(where, error.expected, error.found)]) from error


def check_output(out: Path, manifest: Manifest, progress: ByteProgress | None) -> list[Problem]:
    """Everything in which `out` is not what `manifest` says."""
    problems = list(_unlisted(out, manifest))
    for name, tensors in tensors_by_file(manifest).items():
        problems += _check_experts_file(out, name, tensors, manifest, progress)
    for entry in (*manifest.passthrough.files, *manifest.side_files, *_kernels(out)):
        problems += _check_file(out, entry, progress)
    problems += _check_passthrough(out, manifest)
    for layer_name, layer in manifest.layers.items():
        for key, sublayer in layer.sublayers.items():
            problems += _check_complete(f"{layer_name} {key}", layer, sublayer, manifest)
    return problems


def tensors_by_file(manifest: Manifest) -> dict[str, list[TensorEntry]]:
    """The packed tensors that the manifest lists, by file."""
    found: dict[str, list[TensorEntry]] = {}
    for layer in manifest.layers.values():
        for sublayer in layer.sublayers.values():
            for tensor in sublayer.tensors.values():
                found.setdefault(tensor.file, []).append(tensor)
    return found


def _kernels(out: Path) -> list[FileEntry]:
    """The compiled kernels; a manifest of theirs that cannot be read is a file that nothing lists."""
    try:
        return [kernel.file for kernel in from_kernels_json(read_regular(out / KERNELS_MANIFEST)).kernels]
    except (OSError, ManifestError):
        return []


def output_bytes(manifest: Manifest) -> int:
    """Bytes that `check_output` reads of packed tensors and listed files, up to headers."""
    listed = sum(entry.size for entry in (*manifest.passthrough.files, *manifest.side_files))
    return listed + sum(packed_sizes(manifest))


def packed_sizes(manifest: Manifest) -> Iterator[int]:
    """Bytes of each packed tensor."""
    for tensors in tensors_by_file(manifest).values():
        yield from (tensor_nbytes(tensor.dtype, tensor.shape, tensor.name) for tensor in tensors)


def passthrough_tensors(out: Path, manifest: Manifest) -> dict[str, str]:
    """File of each passed-through tensor. Raises LoaderError for a file that is not sound."""
    found: dict[str, str] = {}
    for entry in manifest.passthrough.files:
        if entry.name.endswith(".safetensors"):
            with ExpertsFile(out / entry.name) as opened:
                found.update(dict.fromkeys(opened.tensors, entry.name))
    return found


def _unlisted(out: Path, manifest: Manifest) -> Iterator[Problem]:
    """Files that a loader would take for a part of the model, but that the manifest does not list."""
    listed = {MANIFEST_FILE, *manifest.experts_files()}
    listed |= {entry.name for entry in (*manifest.passthrough.files, *manifest.side_files)}
    listed |= kernel_files(out)
    for path in sorted(out.rglob("*")):
        name = path.relative_to(out).as_posix()
        is_part = name.startswith("humming/") or name.endswith((".safetensors", ".safetensors.index.json"))
        if is_part and name not in listed and (path.is_symlink() or not path.is_dir()):
            yield Problem(name, "only files that the manifest lists", "a file", "remove it")


def _check_experts_file(
    out: Path, name: str, tensors: list[TensorEntry], manifest: Manifest, progress: ByteProgress | None
) -> list[Problem]:
    problems: list[Problem] = []
    try:
        with ExpertsFile(out / name) as opened:
            extra = sorted(set(opened.tensors) - {tensor.name for tensor in tensors})
            problems += [
                Problem(f"{name}: tensor {one}", "to be in the manifest", "it only in the file") for one in extra
            ]
            problems += _compare_layers(name, opened.layers(), manifest)
            for tensor in tensors:
                problems += _check_tensor(opened, tensor, progress)
    except LoaderError as error:
        problems.append(_as_problem(name, error))
    return problems


def _compare_layers(name: str, told: Mapping[str, LayerEntry], manifest: Manifest) -> Iterator[Problem]:
    """What the file says of its own layers is what the manifest says of the layers in that file."""
    wanted = {key: layer for key, layer in manifest.layers.items() if name in _files_of(layer)}
    for layer_name in sorted(told.keys() | wanted.keys()):
        if layer_name not in told:
            yield Problem(f"{name}: {layer_name}", "the manifest's entry for it", "none in the file")
        elif wanted.get(layer_name) != told[layer_name]:
            yield Problem(f"{name}: {layer_name}", "the manifest's entry for it", "another one in the file")


def _files_of(layer: LayerEntry) -> set[str]:
    return {tensor.file for sublayer in layer.sublayers.values() for tensor in sublayer.tensors.values()}


def _check_tensor(opened: ExpertsFile, tensor: TensorEntry, progress: ByteProgress | None) -> Iterator[Problem]:
    try:
        stored = opened.check(tensor)
        digest = hashlib.sha256()
        buffer = bytearray(min(BUFFER_BYTES, stored.nbytes))
        for start in range(0, stored.nbytes, BUFFER_BYTES):
            piece = memoryview(buffer)[: min(BUFFER_BYTES, stored.nbytes - start)]
            opened.read_into(tensor.name, piece, start)
            digest.update(piece)
            if progress is not None:
                progress.advance(piece.nbytes)
        if digest.hexdigest() != tensor.sha256:
            yield Problem(f"{tensor.file}: tensor {tensor.name}", f"sha256 {tensor.sha256}", digest.hexdigest())
    except LoaderError as error:
        yield _as_problem(tensor.file, error)


def _check_file(out: Path, entry: FileEntry, progress: ByteProgress | None) -> Iterator[Problem]:
    digest = hashlib.sha256()
    try:
        with open_regular(out / entry.name) as opened:
            size = os.fstat(opened.fileno()).st_size
            if size != entry.size:
                yield Problem(entry.name, f"{entry.size} bytes", f"{size}")
                return
            while piece := opened.read(BUFFER_BYTES):
                digest.update(piece)
                if progress is not None:
                    progress.advance(len(piece))
    except OSError as error:
        yield Problem(entry.name, "a readable file", error.strerror or str(error))
        return
    if digest.hexdigest() != entry.sha256:
        yield Problem(entry.name, f"sha256 {entry.sha256}", digest.hexdigest())


def _check_passthrough(out: Path, manifest: Manifest) -> Iterator[Problem]:
    """Count and bytes of the tensors that were passed through, and the index that names their files."""
    listed = [entry.name for entry in manifest.passthrough.files]
    try:
        found = passthrough_tensors(out, manifest)
        nbytes = 0
        for name in listed:
            if name.endswith(".safetensors"):
                with ExpertsFile(out / name) as opened:
                    nbytes += sum(stored.nbytes for stored in opened.tensors.values())
    except LoaderError as error:
        yield _as_problem("passthrough", error)
        return
    wanted = f"{manifest.passthrough.tensors} tensors of {manifest.passthrough.bytes} bytes"
    if (len(found), nbytes) != (manifest.passthrough.tensors, manifest.passthrough.bytes):
        yield Problem("passthrough", wanted, f"{len(found)} of {nbytes} bytes")
    if INDEX_FILE in listed:
        try:
            index = json.loads(read_regular(out / INDEX_FILE))
        except (OSError, ValueError) as error:
            yield Problem(INDEX_FILE, "a readable index", str(error))
            return
        if not isinstance(index, dict) or index.get("weight_map") != found:
            yield Problem(INDEX_FILE, "the tensors that the files hold", "another weight_map")


def _check_complete(where: str, layer: LayerEntry, sublayer: SublayerEntry, manifest: Manifest) -> list[Problem]:
    """Every tensor that the layout needs is there, the weight has as many bits as the layout says, and the layout
    is for the manifest's target and dtype."""
    try:
        layout = parse_layout(sublayer.layer_config, sublayer.fingerprint.flags)
    except VerificationError as error:
        return [Problem(f"{where}: {one.where}", one.expected, one.found) for one in error.problems]
    needed = {"weight", "weight_scale"}
    needed |= {"zero_point"} if layout.has_zero_point else set()
    needed |= {"weight_scale_2"} if layout.scale_2_type != "none" else set()
    needed |= {"bias"} if layer.has_bias else set()
    found = set(sublayer.tensors) - _INPUT_SCALES
    problems = []
    if found != needed:
        problems.append(Problem(where, ", ".join(sorted(needed)), ", ".join(sorted(found))))
    logical = (sublayer.shape_n, sublayer.shape_k)
    if (layout.logical_n, layout.logical_k) != logical:
        found_shape = f"{[layout.logical_n, layout.logical_k]} in layer_config"
        problems.append(Problem(where, f"one expert of shape {list(logical)}", found_shape))
    made_for = (layout.sm, layout.result.name)
    if made_for != (manifest.target.sm, manifest.param_dtype):
        expected = f"sm{manifest.target.sm} and {manifest.param_dtype}, as the manifest says"
        problems.append(Problem(where, expected, f"sm{made_for[0]} and {made_for[1]} in layer_config"))
    shape = sublayer.tensors["weight"].shape
    bits = layout.shape_n * layout.shape_k * layout.weight.bits
    words = 1
    for extent in shape[1:]:
        words *= extent
    if words * 32 != bits:
        problems.append(Problem(f"{where} weight", f"{bits} bits for each expert", f"{words * 32}"))
    return problems


def _as_problem(where: str, error: LoaderError) -> Problem:
    return Problem(where, "a sound file", str(error))
