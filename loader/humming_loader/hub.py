"""The Hugging Face Hub through its own client: folders of its cache, single files, and plain words for what it answers.

The client is imported when it is first needed: whoever reads a local folder never pays for it. Token, cache, endpoint
and offline mode are the client's own (HF_TOKEN, HF_HOME, HF_ENDPOINT, HF_HUB_OFFLINE).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from humming_loader.errors import HubError

TIMEOUT = 30.0
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_LOGIN = "log in with `hf auth login`, or set HF_TOKEN"


@dataclass(frozen=True, slots=True)
class Repository:
    """A model repository at one commit, and the cache (`HF_HUB_CACHE`) that a snapshot of it lies in."""

    name: str
    commit: str
    cache: Path


def repository_of(folder: Path) -> Repository | None:
    """What a folder is a snapshot of, by the client's documented layout `models--ORG--NAME/snapshots/COMMIT`."""
    path = folder.absolute()
    kind, *name = path.parent.parent.name.split("--")
    if kind != "models" or not name or path.parent.name != "snapshots" or not _COMMIT.fullmatch(path.name):
        return None
    return Repository("/".join(name), path.name, path.parent.parent.parent)


def cached_sha256(path: Path) -> str | None:
    """The SHA-256 of a file in a snapshot where the cache knows it: large files are stored under it."""
    blob = path.resolve()
    return blob.name if blob.parent.name == "blobs" and _SHA256.fullmatch(blob.name) else None


def snapshot_folder(repo: str, commit: str, cache: Path | str | None = None) -> Path:
    """Where the client keeps the files of a repository at a commit."""
    return _repository_folder(repo, cache) / "snapshots" / commit


def resolve(repo: str, revision: str | None, cache: Path | str | None = None) -> str:
    """The commit that a branch or tag (None: main) names now, or while the client is offline, named last.

    A name is resolved before anything is fetched: the client looks at a file and then downloads it by name, and a
    push in between would give it other bytes than it looked at. Raises HubError.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import OfflineModeIsEnabled

    if revision is not None and _COMMIT.fullmatch(revision):
        return revision
    try:
        with explained(repo, repo):
            commit = str(HfApi().model_info(repo, revision=revision, timeout=TIMEOUT).sha)
    except HubError as error:
        known = noted_commit(repo, revision, cache) if isinstance(error.__cause__, OfflineModeIsEnabled) else None
        if known is None:
            raise
        return known
    note_commit(repo, revision, commit, cache)
    return commit


def note_commit(repo: str, revision: str | None, commit: str, cache: Path | str | None = None) -> None:
    """Note in the cache, as the client does, what a name stands for, for the day when the Hub cannot be asked."""
    if revision == commit:
        return
    path = _reference(repo, revision, cache)
    with suppress(OSError):  # a cache that may only be read has no such day
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        temporary.write_text(commit)
        temporary.replace(path)


def noted_commit(repo: str, revision: str | None, cache: Path | str | None = None) -> str | None:
    """The commit that a name stood for when the client last knew it."""
    path = _reference(repo, revision, cache)
    return path.read_text().strip() if path.is_file() else None


def _reference(repo: str, revision: str | None, cache: Path | str | None) -> Path:
    return _repository_folder(repo, cache) / "refs" / (revision or "main")


def _repository_folder(repo: str, cache: Path | str | None) -> Path:
    from huggingface_hub import constants

    return Path(cache or constants.HF_HUB_CACHE).expanduser() / f"models--{repo.replace('/', '--')}"


def fetch(repo: str, name: str, revision: str | None, cache: Path | str | None = None) -> Path:
    """The path of one file of a repository, downloaded into the cache if it is not there. Raises HubError."""
    from huggingface_hub import hf_hub_download

    with explained(f"{repo}: {name}", repo):
        return Path(hf_hub_download(repo, name, revision=revision, cache_dir=cache))


def fetch_missing(folder: Path, names: Iterable[str]) -> None:
    """Download those of `names` that a snapshot folder lacks, at its commit; other folders are left alone."""
    missing = [name for name in names if not (folder / name).exists()]
    repository = repository_of(folder) if missing else None
    if repository is not None:
        for name in missing:
            fetch(repository.name, name, repository.commit, repository.cache)


@contextmanager
def explained(where: str, repo: str) -> Iterator[None]:
    """Turn every error of the client into a HubError that says what the Hub answered and what to do about it."""
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, HFValidationError, OfflineModeIsEnabled

    # The client's errors share a base with those of the HTTP library under it, whichever that is.
    transport: type[Exception] = HfHubHTTPError.__bases__[0]
    try:
        yield
    except (HFValidationError, OfflineModeIsEnabled, EntryNotFoundError, transport) as error:
        found, hint = _words(error, repo)
        raise HubError(where, found, hint) from error
    except OSError as error:
        if error.errno is not None:
            raise  # the disk's, not the Hub's
        raise HubError(where, _first_line(error), "try again") from error


def _words(error: BaseException, repo: str) -> tuple[str, str]:
    from huggingface_hub.errors import (
        DisabledRepoError,
        FileMetadataError,
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RemoteEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    if isinstance(error, LocalEntryNotFoundError) and error.__cause__ is not None:
        error = error.__cause__  # "not cached either" says less than why it had to be asked for
    if isinstance(error, HFValidationError):
        return _first_line(error), "a repository is named ORG/NAME"
    if isinstance(error, OfflineModeIsEnabled | LocalEntryNotFoundError):
        return "it not in the cache while HF_HUB_OFFLINE is set", f"fetch it once: hf download {repo}"
    if isinstance(error, FileMetadataError):
        return _first_line(error), "does HF_ENDPOINT name a Hub?"
    said = getattr(error, "server_message", None)
    if isinstance(error, GatedRepoError):
        page = f"{_endpoint()}/{repo}"
        return _said("a gated repository", said), f"ask for access on {page}, then {_LOGIN}"
    if isinstance(error, DisabledRepoError):
        return "a repository that is disabled", "its owner can say why"
    if isinstance(error, RevisionNotFoundError):
        return _said("no such revision", said), "name a branch, a tag or a commit that is there"
    if isinstance(error, RepositoryNotFoundError):
        return "no such repository, or a private one", f"check the name; for a private one {_LOGIN}"
    if isinstance(error, RemoteEntryNotFoundError):
        return "no such file in the repository", "is it a whole model, at the right revision?"
    return _by_status(error, said)


def _by_status(error: BaseException, said: str | None) -> tuple[str, str]:
    response = getattr(error, "response", None)
    status = getattr(response, "status_code", None)
    if response is None or status is None:
        hint = "check the network and HF_ENDPOINT; HF_HUB_OFFLINE=1 uses what is cached"
        return f"{_endpoint()} out of reach ({type(error).__name__}: {_first_line(error)})", hint
    if status == 401:
        return _said("a token that the Hub does not take", said), _LOGIN
    if status == 403:
        return _said("no permission", said), "use a token that may do this (huggingface.co/settings/tokens)"
    if status == 404:
        return _said("nothing there", said), "check the name"
    if status in (409, 412):
        return _said("that the branch changed meanwhile", said), "run the same command again"
    if status == 429:
        wait = response.headers.get("Retry-After")
        return _said("too many requests", said), f"wait {f'{wait} seconds' if wait else 'a while'} and run it again"
    if status >= 500:
        return _said(f"a fault of the Hub (HTTP {status})", said), "run it again later; what was transferred is kept"
    return _said(f"HTTP {status}", said), ""


def _said(found: str, said: str | None) -> str:
    text = " ".join((said or "").split())
    return f"{found} ({text[:300]})" if text else found


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0].rstrip(".")[:300] if lines else type(error).__name__


def _endpoint() -> str:
    from huggingface_hub import HfApi

    return HfApi().endpoint
