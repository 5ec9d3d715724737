"""Names of the Hub: what a command line argument means, and which repository a folder on this machine is a copy of."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from humming_loader.hub import cached_sha256, repository_of

_ID = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(\S+))?", re.ASCII)


@dataclass(frozen=True, slots=True)
class HubId:
    """`ORG/NAME[@REVISION]`: a model repository, and a branch, tag or commit of it."""

    repo: str
    revision: str | None = None

    def __str__(self) -> str:
        return self.repo if self.revision is None else f"{self.repo}@{self.revision}"


@dataclass(frozen=True, slots=True)
class Origin:
    """The repository and the commit that a checkpoint is of; `sha256` of those of its files that the Hub knows it of.

    `is_remote` says that the weight files are still to be downloaded.
    """

    repo: str
    commit: str
    sha256: Mapping[str, str]
    is_remote: bool = False


def parse_hub_id(text: str) -> HubId | None:
    """The repository that `text` names, None for what cannot be one."""
    match = _ID.fullmatch(text)
    return HubId(match[1], match[2]) if match else None


def parse_source(text: str) -> Path | HubId:
    """A path if there is something, a repository if it is named like one, else a path after all."""
    path = Path(text)
    if path.exists() or path.suffix == ".safetensors":
        return path
    return parse_hub_id(text) or path


def origin_of_snapshot(root: Path, names: Iterable[str]) -> Origin | None:
    """What a folder is a copy of, if it lies in the Hub's cache."""
    repository = repository_of(root)
    if repository is None:
        return None
    digests = {name: cached_sha256(root / name) for name in names}
    known = {name: digest for name, digest in digests.items() if digest is not None}
    return Origin(repository.name, repository.commit, known)
