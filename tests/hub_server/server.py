"""The HTTP side of the test Hub: requests to answers, one method a kind of request.

Paths, fields and headers are those that huggingface_hub sends and reads; what it does not use is not here. Storage is
LFS alone (no Xet), with multipart uploads.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from tests.hub_server import uploads
from tests.hub_server.answers import Answer, error, found, json_answer
from tests.hub_server.faults import Fault, Seen, Traffic
from tests.hub_server.store import Blob, Commit, Repository, Store

_PIECE = 64 << 10
Route = tuple[str, str, Callable[["Handler", re.Match[str]], Answer]]


@dataclass(frozen=True, slots=True)
class Hold:
    """A download whose path matches, other than by a range, stops after its first piece until `go_on` is set."""

    path: str
    stuck: threading.Event = field(default_factory=threading.Event)
    go_on: threading.Event = field(default_factory=threading.Event)


class HubServer(ThreadingHTTPServer):
    """A Hub on a free port of 127.0.0.1; `url` is what HF_ENDPOINT is to be."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, folder: Path, part_bytes: int = 256 << 10) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.store = Store(folder)
        self.traffic = Traffic()
        self.part_bytes = part_bytes
        self.required_token: str | None = None
        self.has_ranges = True
        self.hold: Hold | None = None

    @property
    def url(self) -> str:
        """The endpoint."""
        return f"http://127.0.0.1:{self.server_address[1]}"

    @property
    def storage_url(self) -> str:
        """Where large objects are: another host, which gets no token."""
        return f"http://localhost:{self.server_address[1]}"

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ANN401 - socketserver's signature
        """Connections that are cut on purpose are no news."""


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    server: HubServer

    def log_message(self, format: str, *args: Any) -> None:  # noqa: ANN401 - the base class's signature
        """Nothing on standard error."""

    def _serve(self) -> None:
        self.path_only = unquote(urlsplit(self.path).path)
        self.query = parse_qs(urlsplit(self.path).query)
        self.token = self.headers.get("authorization", "").removeprefix("Bearer ")
        fault = self.server.traffic.fault_for(
            self.command, self.path_only, is_whole=not self.headers.get("range")
        )
        self.body = self._read_body(fault)
        if self.body is None:
            return
        answer = self._answer() if fault is None or not fault.status else self._faulty(fault)
        self._send(answer, fault)

    do_GET = do_HEAD = do_POST = do_PUT = _serve  # noqa: N815 - the names that the base class calls

    def _read_body(self, fault: Fault | None) -> bytes | None:
        """The request's body; None when the connection was cut in the middle of it."""
        length = int(self.headers.get("content-length", "0"))
        if "chunked" in self.headers.get("transfer-encoding", ""):
            return self._read_chunks()
        if fault is not None and fault.cut_after >= 0 and self.command != "GET":
            read = self.rfile.read(min(fault.cut_after, length))
            self._note(0, len(read), 0)
            self._cut()
            return None
        return self.rfile.read(length)

    def _read_chunks(self) -> bytes:
        data = bytearray()
        while size := int(self.rfile.readline().split(b";")[0], 16):
            data += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return bytes(data)

    def _cut(self) -> None:
        self.close_connection = True
        self.connection.close()

    def _faulty(self, fault: Fault) -> Answer:
        return error(fault.status, fault.headers.get("X-Error-Message", "on purpose"), extra=fault.headers)

    def _answer(self) -> Answer:
        for method, pattern, handle in ROUTES:
            match = re.fullmatch(pattern, self.path_only)
            if match and method == self.command.replace("HEAD", "GET"):
                with self.server.store.lock:
                    return handle(self, match)
        return error(404, f"no route for {self.command} {self.path_only}")

    def _send(self, answer: Answer, fault: Fault | None) -> None:
        start, stop = self._range(answer)
        partial = answer.status == 200 and (start, stop) != (0, answer.size)
        self.send_response(206 if partial else answer.status)
        for name, value in answer.headers.items():
            self.send_header(name, value)
        if partial:
            self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{answer.size}")
        self.send_header("Content-Length", str(stop - start))
        self.end_headers()
        sent = 0
        if self.command != "HEAD":
            limit = fault.cut_after if fault is not None and fault.cut_after >= 0 else stop - start
            try:
                while sent < min(limit, stop - start):
                    piece = answer.read(start + sent, min(start + sent + _PIECE, start + limit, stop))
                    self.wfile.write(piece)
                    sent += len(piece)
                    self._hold()
                self.wfile.flush()
            except OSError:
                self.close_connection = True  # a client that has enough hangs up
            if sent < stop - start:
                self._cut()
        self._note(206 if partial else answer.status, len(self.body or b""), sent)

    def _hold(self) -> None:
        hold = self.server.hold
        if hold is not None and re.search(hold.path, self.path_only) and not self.headers.get("range"):
            hold.stuck.set()
            hold.go_on.wait(30)

    def _range(self, answer: Answer) -> tuple[int, int]:
        match = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("range", ""))
        if not match or answer.status != 200 or not self.server.has_ranges:
            return 0, answer.size
        return int(match[1]), min(int(match[2]) + 1 if match[2] else answer.size, answer.size)

    def _note(self, status: int, received: int, sent: int) -> None:
        seen = Seen(self.command, self.path_only, self.headers.get("range", ""), status, received, sent, self.token)
        self.server.traffic.note(seen)

    def repository(self, name: str, *, write: bool = False) -> Repository | Answer:
        """The repository, or the answer of the Hub to somebody who may not see or change it."""
        needed = self.server.required_token
        if self.token and needed is not None and self.token != needed:
            return error(401, "Invalid credentials in Authorization header")
        repository = self.server.store.repositories.get(name)
        may_read = repository is not None and (not repository.private or self.token == needed)
        if repository is None or not may_read:
            return error(404 if self.token else 401, "Repository not found", code="RepoNotFound")
        if repository.gated and self.token != needed:
            words = f"Access to model {name} is restricted. You must have access to it."
            return error(403 if self.token else 401, words, code="GatedRepo")
        if write and needed is not None and self.token != needed:
            return error(403 if self.token else 401, "You don't have the rights to do this")
        return repository

    def at(self, name: str, revision: str, *, write: bool = False) -> tuple[Repository, Commit] | Answer:
        """The repository at a revision."""
        repository = self.repository(name, write=write)
        if isinstance(repository, Answer):
            return repository
        commit = repository.find(revision)
        if commit is None:
            return error(404, f"Invalid rev id: {revision}", code="RevisionNotFound")
        return repository, commit


def _model_info(handler: Handler, match: re.Match[str]) -> Answer:
    here = handler.at(match["repo"], match["rev"] or "main")
    if isinstance(here, Answer):
        return here
    repository, commit = here
    siblings = [_sibling(name, blob, blobs="blobs" in handler.query) for name, blob in commit.files.items()]
    return json_answer(
        {
            "id": repository.name,
            "modelId": repository.name,
            "sha": commit.oid,
            "private": repository.private,
            "gated": "manual" if repository.gated else False,
            "tags": [],
            "downloads": 0,
            "likes": 0,
            "siblings": siblings,
        }
    )


def _sibling(name: str, blob: Blob, *, blobs: bool) -> dict[str, Any]:
    if not blobs:
        return {"rfilename": name}
    lfs = {"lfs": {"sha256": blob.oid, "size": blob.size, "pointerSize": 134}} if blob.is_lfs else {}
    return {"rfilename": name, "size": blob.size, "blobId": blob.oid[:40]} | lfs


def _tree(handler: Handler, match: re.Match[str]) -> Answer:
    here = handler.at(match["repo"], match["rev"])
    if isinstance(here, Answer):
        return here
    prefix = f"{match['path']}/" if match["path"] else ""
    rows: dict[str, dict[str, Any]] = {}
    for name, blob in here[1].files.items():
        if not name.startswith(prefix):
            continue
        rest = name.removeprefix(prefix)
        if "/" in rest and "recursive" not in handler.query:
            folder = prefix + rest.split("/")[0]
            rows[folder] = {"type": "directory", "oid": "0" * 40, "size": 0, "path": folder}
            continue
        lfs = {"lfs": {"oid": blob.oid, "size": blob.size, "pointerSize": 134}} if blob.is_lfs else {}
        rows[name] = {"type": "file", "oid": blob.oid[:40], "size": blob.size, "path": name} | lfs
    return json_answer(list(rows.values()))


def _resolve(handler: Handler, match: re.Match[str]) -> Answer:
    here = handler.at(match["repo"], match["rev"])
    if isinstance(here, Answer):
        return here
    commit = here[1]
    blob = commit.files.get(match["file"])
    headers = {"X-Repo-Commit": commit.oid}
    if blob is None:
        return error(404, "Entry not found", code="EntryNotFound", extra=headers)
    if not blob.is_lfs:
        return found(blob, headers | {"ETag": f'"{blob.oid}"', "Accept-Ranges": "bytes"})
    headers |= {"X-Linked-ETag": f'"{blob.oid}"', "X-Linked-Size": str(blob.size)}
    return Answer(302, headers | {"Location": f"{handler.server.storage_url}/cdn/{blob.oid}"})


def _object(handler: Handler, match: re.Match[str]) -> Answer:
    """What a signed address of the storage gives, to whoever has it."""
    path = handler.server.store.objects.get(match["oid"])
    if path is None:
        return error(404, "no such object")
    blob = Blob(match["oid"], path.stat().st_size, True, path=path)
    return found(blob, {"ETag": f'"{blob.oid}"', "Accept-Ranges": "bytes"})


_REPO = r"(?P<repo>[^/]+/[^/]+)"
_API = rf"/api/models/{_REPO}"
ROUTES: list[Route] = [
    ("GET", rf"{_API}(?:/revision/(?P<rev>.+))?", _model_info),
    ("GET", rf"{_API}/tree/(?P<rev>[^/]+)(?:/(?P<path>.+))?", _tree),
    ("GET", rf"/{_REPO}/resolve/(?P<rev>[^/]+)/(?P<file>.+)", _resolve),
    ("GET", r"/cdn/(?P<oid>[0-9a-f]{64})", _object),
    ("POST", r"/api/repos/create", uploads.create_repo),
    ("POST", r"/api/validate-yaml", uploads.validate_card),
    ("POST", rf"{_API}/branch/(?P<branch>.+)", uploads.create_branch),
    ("POST", rf"{_API}/preupload/(?P<rev>.+)", uploads.preupload),
    ("POST", rf"/{_REPO}\.git/info/lfs/objects/batch", uploads.lfs_batch),
    ("PUT", r"/lfs/(?P<oid>[0-9a-f]{64})(?:/(?P<part>\d+))?", uploads.put_object),
    ("POST", r"/lfs/(?P<oid>[0-9a-f]{64})/complete", uploads.complete),
    ("POST", r"/lfs/(?P<oid>[0-9a-f]{64})/verify", uploads.verify),
    ("POST", rf"{_API}/commit/(?P<rev>.+)", uploads.commit),
]


@contextmanager
def running(folder: Path, **options: Any) -> Iterator[HubServer]:  # noqa: ANN401 - HubServer's
    """A server in a thread, stopped at the end."""
    folder.mkdir(parents=True, exist_ok=True)
    server = HubServer(folder, **options)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
