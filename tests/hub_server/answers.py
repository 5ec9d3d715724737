"""Answers of the test Hub."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from tests.hub_server.store import Blob


@dataclass(frozen=True, slots=True)
class Answer:
    """A status, headers and a body: bytes, or a file that is read by ranges."""

    status: int
    headers: dict[str, str] = field(default_factory=dict)
    data: bytes = b""
    blob: Blob | None = None

    @property
    def size(self) -> int:
        """Bytes of the whole body."""
        return len(self.data) if self.blob is None else self.blob.size

    def read(self, start: int, stop: int) -> bytes:
        """Bytes of the body."""
        return self.data[start:stop] if self.blob is None else self.blob.read(start, stop)


def json_answer(value: object, status: int = 200) -> Answer:
    """A JSON document."""
    return Answer(status, {"Content-Type": "application/json"}, json.dumps(value).encode())


def found(blob: Blob, headers: dict[str, str]) -> Answer:
    """A file."""
    return Answer(200, headers, blob=blob)


def error(status: int, message: str, *, code: str = "", extra: dict[str, str] | None = None) -> Answer:
    """What the Hub says when something is wrong: in headers, and in the body."""
    headers = {"Content-Type": "application/json", "X-Error-Message": message} | (extra or {})
    if code:
        headers["X-Error-Code"] = code
    return Answer(status, headers, json.dumps({"error": message}).encode())
