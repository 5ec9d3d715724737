"""Find a converted checkpoint, on disk or on the Hugging Face Hub, and read its manifest."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from humming_loader.entries import Manifest
from humming_loader.errors import OutputMissingError
from humming_loader.manifest import MANIFEST_FILE, from_json

FOLDER = "humming"


def find_output(path_or_repo: str | Path, revision: str | None = None) -> Path:
    """The folder of a converted checkpoint: a local path, or a repository of which only `humming/` is fetched.

    Raises OutputMissingError when there is no manifest in it.
    """
    folder = Path(path_or_repo)
    if not folder.is_dir():
        folder = _download(str(path_or_repo), revision)
    if not (folder / MANIFEST_FILE).is_file():
        raise OutputMissingError(str(path_or_repo), f"a checkpoint of humming-convert with {MANIFEST_FILE}", "none")
    return folder


def read_manifest(path_or_repo: str | Path, revision: str | None = None) -> Manifest:
    """The manifest of a converted checkpoint. Raises OutputMissingError or ManifestError."""
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
def _download(repo: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        return Path(snapshot_download(repo, revision=revision, allow_patterns=[f"{FOLDER}/*"]))
    except (HFValidationError, LocalEntryNotFoundError, RepositoryNotFoundError) as error:
        raise OutputMissingError(repo, "a folder or a repository of the Hub", f"neither ({error})") from error
