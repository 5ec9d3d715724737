"""What goes wrong on purpose, and a count of everything that went over the wire."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(slots=True)
class Fault:
    """For the next `times` requests of `method` whose path matches: an answer of `status`, or a connection cut.

    `cut_after` is how many bytes of the body are sent (GET) or read (PUT, POST) before the connection is closed;
    `is_whole` is for requests without a range only.
    """

    method: str
    path: str
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    cut_after: int = -1
    times: int = 1
    is_whole: bool = False


@dataclass(frozen=True, slots=True)
class Seen:
    """One request as it was answered: bytes of the bodies that came and went."""

    method: str
    path: str
    range: str
    status: int
    received: int
    sent: int
    token: str


class Traffic:
    """Faults that wait for their request, and the requests that came."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.faults: list[Fault] = []
        self.seen: list[Seen] = []
        self.after: Callable[[Seen], None] | None = None

    def fault_for(self, method: str, path: str, *, is_whole: bool) -> Fault | None:
        """The fault that this request meets, used up once."""
        with self._lock:
            for fault in self.faults:
                matches = fault.times > 0 and fault.method == method and re.search(fault.path, path)
                if matches and (is_whole or not fault.is_whole):
                    fault.times -= 1
                    return fault
        return None

    def note(self, seen: Seen) -> None:
        """Remember a request."""
        with self._lock:
            self.seen.append(seen)
        if self.after is not None:
            self.after(seen)

    def clear(self) -> None:
        """Forget faults and requests."""
        with self._lock:
            self.faults.clear()
            self.seen.clear()

    def sent_bytes(self) -> int:
        """Bytes of all bodies that were sent."""
        with self._lock:
            return sum(seen.sent for seen in self.seen)

    def received_bytes(self, path: str = "") -> int:
        """Bytes of all bodies that came in with requests for paths that hold `path`."""
        with self._lock:
            return sum(seen.received for seen in self.seen if path in seen.path)

    def matching(self, method: str, path: str) -> list[Seen]:
        """The requests of a method whose path matches."""
        with self._lock:
            return [seen for seen in self.seen if seen.method == method and re.search(path, seen.path)]
