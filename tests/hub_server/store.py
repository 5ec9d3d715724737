"""Repositories, commits and large objects of the test Hub. Files may be sparse: they are read by ranges only."""

from __future__ import annotations

import hashlib
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

LFS_LIMIT = 1 << 20


def git_sha1(data: bytes) -> str:
    """The object id that git gives a file."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@dataclass(frozen=True, slots=True)
class Blob:
    """A file at some commit: `oid` is git's for a small one, the SHA-256 for a large one, which lies at `path`."""

    oid: str
    size: int
    is_lfs: bool
    data: bytes = b""
    path: Path | None = None

    def read(self, start: int, stop: int) -> bytes:
        """Bytes of the file."""
        if self.path is None:
            return self.data[start:stop]
        with self.path.open("rb") as file:
            file.seek(start)
            return file.read(stop - start)


@dataclass(frozen=True, slots=True)
class Commit:
    """A state of a branch."""

    oid: str
    files: dict[str, Blob]
    title: str
    description: str = ""
    parent: str = ""


@dataclass(slots=True)
class Repository:
    """One model repository. `readers` and `writers` are tokens; no readers: everybody."""

    name: str
    private: bool = False
    gated: bool = False
    readers: frozenset[str] = frozenset()
    branches: dict[str, list[Commit]] = field(default_factory=dict)
    pulls: int = 0

    def find(self, revision: str) -> Commit | None:
        """The commit that a branch or a commit id names."""
        if revision in self.branches:
            return self.branches[revision][-1]
        commits = (commit for branch in self.branches.values() for commit in branch)
        return next((commit for commit in commits if commit.oid == revision), None)

    def add(self, branch: str, files: dict[str, Blob], title: str, description: str = "") -> Commit:
        """A commit of `files`, the whole tree, on top of `branch`."""
        history = self.branches.setdefault(branch, [])
        parent = history[-1].oid if history else ""
        tree = "".join(f"{name} {blob.oid}\n" for name, blob in sorted(files.items()))
        oid = hashlib.sha1(f"{self.name} {parent} {branch} {title}\n{tree}".encode()).hexdigest()
        commit = Commit(oid, dict(files), title, description, parent)
        history.append(commit)
        return commit


class Store:
    """Everything that the server knows. Tests look at it directly."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.lock = threading.RLock()
        self.repositories: dict[str, Repository] = {}
        self.objects: dict[str, Path] = {}
        self.parts: dict[str, dict[int, bytes]] = {}

    def create(self, name: str, *, private: bool = False) -> Repository:
        """A new repository with the one file that the Hub puts there."""
        repository = Repository(name, private=private)
        self.repositories[name] = repository
        repository.add("main", {".gitattributes": self.small(b"*.safetensors filter=lfs\n")}, "initial commit")
        return repository

    def small(self, data: bytes) -> Blob:
        """A file that git keeps."""
        return Blob(git_sha1(data), len(data), False, data)

    def large(self, path: Path, sha256: str | None = None) -> Blob:
        """A file that is kept beside git; `sha256` may be made up for one that nobody reads whole."""
        digest = sha256 or hashlib.sha256(path.read_bytes()).hexdigest()
        self.objects[digest] = path
        return Blob(digest, path.stat().st_size, True, path=path)

    def publish(self, name: str, folder: Path, *, is_sparse: bool = False, branch: str = "main") -> Commit:
        """A repository with the files of a folder, as if somebody had pushed it."""
        repository = self.repositories.get(name) or self.create(name)
        files = dict(repository.branches["main"][-1].files)
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            file = path.relative_to(folder).as_posix()
            if path.suffix == ".safetensors" or path.stat().st_size > LFS_LIMIT:
                digest = hashlib.sha256(file.encode()).hexdigest() if is_sparse else None
                files[file] = self.large(path, digest)
            else:
                files[file] = self.small(path.read_bytes())
        return repository.add(branch, files, "upload")

    def keep_object(self, sha256: str, data: bytes) -> bool:
        """Store an uploaded object if its bytes are what its name says."""
        if hashlib.sha256(data).hexdigest() != sha256:
            return False
        path = self.folder / sha256
        path.write_bytes(data)
        self.objects[sha256] = path
        return True

    def apply(self, repository: Repository, branch: str, lines: list[dict[str, Any]], base: str) -> Commit | str:
        """A commit from the client's lines, on `branch`, which begins at `base`; or what is wrong with it."""
        import base64

        head = repository.find(branch) or repository.find(base)
        files = dict(head.files) if head is not None else {}
        title = description = ""
        for line in lines:
            value = line["value"]
            if line["key"] == "header":
                title, description = value["summary"], value["description"]
                parent = value.get("parentCommit")
                if parent is not None and head is not None and parent != head.oid:
                    return "conflict"
            elif line["key"] == "file":
                files[value["path"]] = self.small(base64.b64decode(value["content"]))
            elif line["key"] == "lfsFile":
                if value["oid"] not in self.objects:
                    return f"missing object {value['oid']}"
                files[value["path"]] = self.large(self.objects[value["oid"]], value["oid"])
            elif line["key"] == "deletedFile":
                del files[value["path"]]
        if branch not in repository.branches and head is not None:
            repository.branches[branch] = [head]
        return repository.add(branch, files, title, description)
