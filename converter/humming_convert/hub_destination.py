"""A repository of the Hub that an output goes to, in one commit: a reader sees all of it or nothing.

Large files are sent before the commit and are invisible until then. The Hub keeps what it received, so a run that
broke is simply started again: it sends what is missing. (The client's own `upload_folder` resumes as well, but splits
a large folder into several commits, between which a reader would find half a model.)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from humming_convert.errors import OutputError
from humming_convert.replacing import listed_files
from humming_loader.errors import HubError
from humming_loader.hub import explained, fetch
from humming_loader.kernel_entries import KERNELS_FOLDER
from humming_loader.manifest import MANIFEST_FILE

if TYPE_CHECKING:
    from huggingface_hub import CommitOperationAdd, HfApi, ModelInfo

# Files that a loader would take for a part of the model.
_WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin", ".pt", ".pth", ".gguf")
_SHOWN = 3


@dataclass(frozen=True, slots=True)
class PushOptions:
    """Where an output goes: `ORG/NAME`, a branch of it (None: main) or a new pull request, public or private."""

    repo: str
    revision: str | None = None
    private: bool = False
    create_pr: bool = False
    dry_run: bool = False


@dataclass(frozen=True, slots=True)
class Receipt:
    """What a push did: the commit (None: there was nothing to change), its address, the files that were added."""

    commit: str | None
    url: str
    added: int
    removed: int


class Destination:
    """The repository and branch of `options`, made if they are not there. Raises HubError and OutputError.

    A repository that holds somebody else's weights is refused: a loader would mix them with these.
    """

    def __init__(self, options: PushOptions) -> None:
        from huggingface_hub import HfApi

        self.options = options
        self._api: HfApi = HfApi()
        self._head: ModelInfo | None = self._find_head()
        if self._head is None and not options.dry_run:
            self._make()
            self._head = self._look()
        self._there = {file.rfilename: file.lfs for file in (self._head.siblings or [])} if self._head else {}
        self._stale = self._stale_files()

    def is_there(self, name: str, sha256: str | None) -> bool:
        """Whether the branch already has a large file of this name and digest."""
        lfs = self._there.get(name)
        return lfs is not None and lfs.sha256 == sha256

    def operation(self, name: str, path: Path) -> CommitOperationAdd:
        """The addition of a file to the commit."""
        from huggingface_hub import CommitOperationAdd

        return CommitOperationAdd(name, path)

    def send(self, additions: Sequence[CommitOperationAdd]) -> None:
        """Send the large ones among the files, unless the Hub has them. Nobody sees them before the commit."""
        with self._failures("upload"):
            self._api.preupload_lfs_files(
                self.options.repo,
                additions=additions,
                revision=self.options.revision,
                create_pr=self.options.create_pr,
                free_memory=True,
            )

    def removed(self, names: Iterable[str]) -> tuple[str, ...]:
        """The files of an earlier output that one of `names` does not replace."""
        return tuple(sorted(self._stale - set(names)))

    def commit(self, additions: Sequence[CommitOperationAdd], message: str, description: str) -> Receipt:
        """Add the files and remove what is left of an earlier output, all at once. Raises HubError."""
        from huggingface_hub import CommitOperationDelete

        removed = self.removed(addition.path_in_repo for addition in additions)
        head = self._head.sha if self._head is not None else None
        with self._failures("commit"):
            info = self._api.create_commit(
                self.options.repo,
                [*additions, *(CommitOperationDelete(name) for name in removed)],
                commit_message=message,
                commit_description=description,
                revision=self.options.revision,
                create_pr=self.options.create_pr,
                # Another commit in between is refused: it may have been made of other files.
                parent_commit=head,
            )
        changed = info.oid if info.oid != head else None
        return Receipt(changed, str(info.pr_url or info.commit_url), len(additions), len(removed))

    def _find_head(self) -> ModelInfo | None:
        from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

        try:
            return self._look()
        except HubError as error:
            if isinstance(error.__cause__, RepositoryNotFoundError | RevisionNotFoundError):
                return None
            raise

    def _look(self) -> ModelInfo:
        repo, revision = self.options.repo, self.options.revision
        with explained(repo, repo):
            return self._api.model_info(repo, revision=revision, files_metadata=True)

    def _make(self) -> None:
        repo, revision = self.options.repo, self.options.revision
        with explained(repo, repo):
            self._api.create_repo(repo, private=self.options.private or None, exist_ok=True)
            if revision is not None:
                self._api.create_branch(repo, branch=revision, exist_ok=True)

    def _stale_files(self) -> set[str]:
        """What an earlier output's manifest lists. Raises OutputError for weights that none lists."""
        if self._head is None:
            return set()
        ours: set[str] = set()
        if MANIFEST_FILE in self._there:
            ours = {MANIFEST_FILE, *listed_files(fetch(self.options.repo, MANIFEST_FILE, self._head.sha).read_bytes())}
            ours |= {name for name in self._there if name.startswith(f"{KERNELS_FOLDER}/")}
        foreign = [name for name in self._there if name.endswith(_WEIGHTS) and name not in ours]
        if foreign:
            more = f" and {len(foreign) - _SHOWN} more" if len(foreign) > _SHOWN else ""
            raise OutputError(
                f"{self.options.repo}: holds weights that humming-convert did not put there: "
                f"{', '.join(sorted(foreign)[:_SHOWN])}{more}; push to another repository or branch"
            )
        # The card, .gitattributes and the like stay where a new output has none of its own.
        return {name for name in self._there if name in ours and PurePosixPath(name).name != ".gitattributes"}

    def _failures(self, what: str) -> AbstractContextManager[None]:
        return _failures(f"{self.options.repo}: {what}", self.options.repo)


@contextmanager
def _failures(where: str, repo: str) -> Iterator[None]:
    """Around calls of the client that may fail for one of many files: it wraps what happened, and that is what counts.

    Raises HubError, OutputError for what the client or the Hub does not take (a card that is no card, ...).
    """
    try:
        with explained(where, repo):
            try:
                yield
            except RuntimeError as error:
                if error.__cause__ is None:
                    raise
                raise error.__cause__ from None
    except ValueError as error:
        raise OutputError(f"{where}: {error}") from error
