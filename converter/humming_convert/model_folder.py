"""The files of a model folder by name: weights and their index, configs, what is copied and what is not."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path, PurePosixPath
from typing import Any

from humming_convert.errors import CheckpointError, Problem
from humming_convert.safetensors_header import is_text, refuse_duplicates, require_regular

INDEX_SUFFIX = ".safetensors.index.json"
DEFAULT_INDEX = "model" + INDEX_SUFFIX
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx")


def list_weight_files(root: Path) -> tuple[tuple[str, ...], dict[str, str] | None]:
    """Names of the weight files in order, and the index's weight map if there is an index."""
    names = [entry.name for entry in root.iterdir()]
    return choose_weight_files(names, str(root), lambda name: read_json(root / name, name))


def choose_weight_files(
    names: Iterable[str], where: str, read: Callable[[str], dict[str, Any]]
) -> tuple[tuple[str, ...], dict[str, str] | None]:
    """What `list_weight_files` says of a folder that holds `names`; `read` is asked for the index only."""
    names = tuple(names)
    present = sorted(name for name in names if name.endswith(".safetensors"))
    indexes = sorted(name for name in names if name.endswith(INDEX_SUFFIX))
    if not indexes:
        if len(present) == 1:
            return tuple(present), None
        expected = "one .safetensors file, or several with a model.safetensors.index.json"
        found = f"{len(present)} .safetensors files and no index"
        hint = "fetch the index too" if present else "this is no safetensors checkpoint"
        raise CheckpointError([Problem(where, expected, found, hint)])
    if len(indexes) > 1 and DEFAULT_INDEX not in indexes:
        raise CheckpointError([Problem(where, "one index", ", ".join(indexes), "move the others away")])
    index_name = DEFAULT_INDEX if DEFAULT_INDEX in indexes else indexes[0]
    weight_map = _weight_map(read(index_name), index_name)
    used = sorted(set(weight_map.values()))
    strays = [name for name in present if name not in used]
    if strays:
        hint = f"move away what is not part of the model, or fetch the {index_name} that belongs to it"
        raise CheckpointError([Problem(name, f"to be named by {index_name}", "no entry", hint) for name in strays])
    return tuple(used), weight_map


def index_naming(path: Path) -> str:
    """The index beside a bare file that names it among others, "" without one."""
    for index in sorted(path.parent.glob(f"*{INDEX_SUFFIX}")):
        try:
            files = set(_weight_map(read_json(index, index.name), index.name).values())
        except CheckpointError:
            # A damaged index beside the file is no fault of the file.
            continue
        if path.name in files and len(files) > 1:
            return index.name
    return ""


def side_files_of(root: Path) -> tuple[str, ...]:
    """Names of the files that are copied: no weights, no index, no config.json, nothing hidden."""
    return tuple(sorted(entry.name for entry in root.iterdir() if entry.is_file() and is_kept(entry.name)))


def is_kept(name: str) -> bool:
    """Whether a plain file of this name, in the folder itself, is copied."""
    return (
        not name.startswith(".")
        and PurePosixPath(name).suffix not in _WEIGHT_SUFFIXES
        and not name.endswith(".index.json")
        and name != "config.json"
    )


def left_out_of(root: Path, names: tuple[str, ...]) -> tuple[str, ...]:
    """Entries that stay behind, folders with a slash; hidden ones (.cache, .git) are nobody's model."""
    used = {PurePosixPath(name).parts[0] for name in names}
    found = []
    for entry in sorted(root.iterdir()):
        if entry.name.startswith(".") or entry.name in used:
            continue
        if entry.is_dir():
            found.append(f"{entry.name}/")
        elif not entry.is_file() or entry.suffix in _WEIGHT_SUFFIXES:
            found.append(entry.name)
    return tuple(found)


def _weight_map(index: dict[str, Any], index_name: str) -> dict[str, str]:
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError([Problem(index_name, "a weight_map", f"{str(weight_map)[:80]}")])
    plain = {file: _plain_name(file) for file in weight_map.values() if isinstance(file, str)}
    odd = [file for file in weight_map.values() if not isinstance(file, str)][:1]
    odd += [file for file, name in plain.items() if name is None]
    expected = "names of .safetensors files inside the folder"
    problems = [Problem(index_name, expected, f"{str(file)[:80]!a}") for file in odd]
    problems += [Problem(index_name, "names of tensors", f"{name[:80]!a}") for name in weight_map if not is_text(name)]
    if problems:
        raise CheckpointError(problems)
    return {name: str(plain[file]) for name, file in weight_map.items()}


def _plain_name(file: str) -> str | None:
    """The name of a file inside the folder without `./` and the like, None for everything else."""
    if not file.endswith(".safetensors") or not is_text(file) or "\\" in file:
        return None
    path = PurePosixPath(file)
    return None if path.is_absolute() or ".." in path.parts else str(path)


def is_there(root: Path, name: str) -> bool:
    """Whether the folder has a file of this name. Raises CheckpointError for one that is no regular file."""
    path = root / name
    if not os.path.lexists(path):
        return False
    require_regular(path, name)
    return True


def read_json(path: Path, where: str) -> dict[str, Any]:
    """The object in a JSON file. Raises CheckpointError, with `where`, for everything else."""
    require_regular(path, where)
    try:
        content = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=refuse_duplicates)
    except OSError as error:
        raise CheckpointError([Problem(where, "a readable file", error.strerror or str(error))]) from None
    except RecursionError:
        raise CheckpointError([Problem(where, "JSON", "JSON nested too deeply to read")]) from None
    except ValueError as error:
        raise CheckpointError([Problem(where, "JSON", f"text that cannot be read ({error})")]) from None
    if not isinstance(content, dict):
        raise CheckpointError([Problem(where, "a JSON object", f"a {type(content).__name__}")])
    return content
