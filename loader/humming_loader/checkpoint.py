"""Find a converted checkpoint, on disk or on the Hugging Face Hub, and read its manifest."""

from __future__ import annotations

import sys
from functools import lru_cache
from pathlib import Path

from humming_loader.entries import Manifest
from humming_loader.errors import OutputMissingError
from humming_loader.hub import fetch, fetch_missing, resolve
from humming_loader.manifest import MANIFEST_FILE, from_json

FOLDER = "humming"


def find_output(path_or_repo: str | Path, revision: str | None = None) -> Path:
    """The folder of a converted checkpoint: a local path, or a repository's snapshot that has its manifest.

    Of a repository only the manifest is fetched; `hub.fetch_missing` brings the experts files that are needed. Raises
    OutputMissingError when there is no manifest, HubError with the Hub's reason.
    """
    folder = Path(path_or_repo)
    if not folder.is_dir():
        return _snapshot(str(path_or_repo), revision, vllm_download_dir())
    fetch_missing(folder, [MANIFEST_FILE])
    if not (folder / MANIFEST_FILE).is_file():
        raise OutputMissingError(str(path_or_repo), f"a checkpoint of humming-convert with {MANIFEST_FILE}", "none")
    return folder


def vllm_download_dir() -> str | None:
    """Where vLLM, if it runs here, was told to keep downloads (`--download-dir`); None: the Hub's own cache."""
    if "vllm" not in sys.modules:
        return None
    from humming_loader import vllm_compat

    return vllm_compat.download_dir()


def read_manifest(path_or_repo: str | Path, revision: str | None = None) -> Manifest:
    """The manifest of a converted checkpoint. Raises OutputMissingError, HubError or ManifestError."""
    return from_json((find_output(path_or_repo, revision) / MANIFEST_FILE).read_bytes())


@lru_cache(maxsize=8)
def cached_manifest(folder: Path, stamp: tuple[int, int]) -> Manifest:
    """The manifest in `folder`, parsed once per state (`stamp`, see `manifest_stamp`) of its file."""
    return from_json((folder / MANIFEST_FILE).read_bytes())


def manifest_stamp(folder: Path) -> tuple[int, int]:
    """Size and time of the manifest file: a changed file is another stamp."""
    state = (folder / MANIFEST_FILE).stat()
    return state.st_size, state.st_mtime_ns


@lru_cache(maxsize=8)
def _snapshot(repo: str, revision: str | None, cache: str | None) -> Path:
    """The snapshot folder, asked for once a process: every file of a run is then of one commit."""
    return fetch(repo, MANIFEST_FILE, resolve(repo, revision, cache), cache).parent.parent
