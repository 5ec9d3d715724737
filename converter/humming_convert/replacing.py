"""Whether an existing folder may be replaced: only if everything in it was written by this program."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from humming_convert.errors import OutputError
from humming_convert.files import read_regular
from humming_loader import kernel_entries
from humming_loader.errors import ManifestError
from humming_loader.manifest import MANIFEST_FILE, PRODUCER

_SHOWN = 3


def refuse_foreign(folder: Path, out: Path) -> None:
    """Raise OutputError (naming `out`) unless `folder` is empty, or an output with nothing but what it lists."""
    if not any(folder.iterdir()):
        return
    try:
        document = json.loads(read_regular(folder / MANIFEST_FILE))
    except (OSError, ValueError, RecursionError):
        document = None
    producer = document.get("producer") if isinstance(document, dict) else None
    if not isinstance(producer, dict) or producer.get("name") != PRODUCER:
        raise OutputError(
            f"{out}: holds files that humming-convert did not write, and --overwrite would delete them; "
            "choose another folder or empty this one"
        )
    listed = {MANIFEST_FILE, *_listed(document), *kernel_files(folder)}
    listed |= {parent.as_posix() for name in listed for parent in PurePosixPath(name).parents}
    found = (path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*")))
    added = [name for name in found if name not in listed]
    if added:
        more = f" and {len(added) - _SHOWN} more" if len(added) > _SHOWN else ""
        raise OutputError(
            f"{out}: holds what its manifest does not list, and --overwrite would delete it: "
            f"{', '.join(added[:_SHOWN])}{more}; move it away or choose another folder"
        )


def kernel_files(folder: Path) -> set[str]:
    """The files of compiled kernels that `folder`'s manifest of kernels lists, and that manifest; none without one."""
    try:
        return set(kernel_entries.from_json(read_regular(folder / kernel_entries.KERNELS_MANIFEST)).files())
    except (OSError, ManifestError):
        return set()


def listed_files(manifest: bytes) -> frozenset[str]:
    """The files that a manifest's text, of this version or another, lists; none for what is no manifest."""
    try:
        document = json.loads(manifest)
    except (ValueError, RecursionError):
        return frozenset()
    return frozenset(_listed(document)) if isinstance(document, dict) else frozenset()


def _listed(document: Mapping[str, Any]) -> Iterator[str]:
    """The files that a manifest, of this version or another, lists."""
    yield from _values(document.get("layers"), "file")
    yield from _values(document.get("passthrough"), "name")
    yield from _values(document.get("side_files"), "name")


def _values(node: object, key: str) -> Iterator[str]:
    if isinstance(node, list):
        for item in node:
            yield from _values(item, key)
    elif isinstance(node, dict):
        if isinstance(node.get(key), str):
            yield node[key]
        for item in node.values():
            yield from _values(item, key)
