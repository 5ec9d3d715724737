"""Give Humming the kernels that came with a checkpoint in place of compiling them: `offer("OUT")`.

Humming asks its compiler for each kernel by source text. What stands before the compiler here answers with a shipped
file when everything that determines the code is the same on this host, and the file's checksum holds; every other
request goes on to Humming. Nothing is written: no cache is filled, so nothing shipped outlives the process.
"""

from __future__ import annotations

import atexit
import hashlib
import inspect
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

from humming_loader.checkpoint import find_output
from humming_loader.errors import HubError, KernelError, LoaderError
from humming_loader.hub import fetch_missing
from humming_loader.kernel_entries import KERNELS_MANIFEST, Identity, KernelEntry, KernelsManifest, from_json
from humming_loader.toolchain import Toolchain

TRUST_VARIABLE = "HUMMING_LOADER_TRUST_KERNELS"
QUIET_SECONDS = 3.0
_SHOWN = 60

Log = Callable[[str], None]


def is_trusted(path_or_repo: str | Path, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether kernels from there may run: as HUMMING_LOADER_TRUST_KERNELS says; unset, all but the Hub's may.

    A folder that the Hub's own tools downloaded is the Hub's.
    """
    said = environ.get(TRUST_VARIABLE, "").strip().lower()
    if said:
        return said in ("1", "true", "yes", "on")
    folder = Path(path_or_repo)
    return folder.is_dir() and not is_from_hub(folder.resolve())


def is_from_hub(folder: Path) -> bool:
    """Whether `folder` is a snapshot in the Hub's cache, or was downloaded by its tools to a place of its own."""
    parts = folder.parts
    in_cache = any(name.startswith("models--") and "snapshots" in parts[at:] for at, name in enumerate(parts))
    return in_cache or (folder / ".cache" / "huggingface").is_dir()


class Offer:
    """The kernels of one checkpoint: `find` answers a request, `summary` says what became of all of them."""

    def __init__(self, folder: Path, manifest: KernelsManifest, toolchain: Toolchain) -> None:
        self.folder = folder
        self._toolchain = toolchain
        self._by_source: dict[tuple[str, str], list[KernelEntry]] = {}
        for entry in manifest.kernels:
            self._by_source.setdefault((entry.identity.source, entry.identity.expression), []).append(entry)
        self._lock = threading.Lock()
        self.used: set[str] = set()
        self.refused: Counter[str] = Counter()

    def find(self, asked: Asked) -> Path | None:
        """The file for a request, None when there is none that fits; never raises for what is shipped."""
        found = self._match(asked)
        with self._lock:
            if isinstance(found, str):
                self.refused[found] += 1
                return None
            self.used.add(found.file.name)
        return self.folder / found.file.name

    def _match(self, asked: Asked) -> KernelEntry | str:
        """The entry that fits, or why there is none."""
        try:
            here = self._toolchain.identity(asked.code, asked.kernel_expr, asked.sm_version, asked.disable_fast_math)
        except (KernelError, OSError, AttributeError, RuntimeError) as error:
            return f"because this host's compiler is not known ({error})"
        shipped = self._by_source.get((here.source, here.expression))
        if not shipped:
            return "not among those that were shipped"
        match = next((entry for entry in shipped if entry.identity == here), None)
        if match is None:
            nearest = min((entry.identity for entry in shipped), key=lambda one: len(one.differences(here)))
            return _reason(nearest, here)
        if not _is_whole(self.folder / match.file.name, match):
            return f"because {match.file.name} is missing or damaged"
        return match

    def summary(self) -> str:
        """One line: how many kernels were used, how many were left to Humming, and why."""
        with self._lock:
            used, refused = len(self.used), dict(self.refused)
        line = f"{self.folder}: kernels that came with the checkpoint: {used} used"
        if refused:
            why = "; ".join(f"{count} {reason}" for reason, count in sorted(refused.items(), key=lambda one: -one[1]))
            line += f", {sum(refused.values())} left to Humming's own compiler: {why}"
        return line


def _reason(shipped: Identity, here: Identity) -> str:
    """The fields that differ, with both values where they are short."""
    words = []
    for name, (theirs, ours) in shipped.differences(here).items():
        if name in ("headers", "tools"):
            words.append(f"another content of {name}")
            continue
        if name == "flags":
            both = set(theirs) & set(ours)
            theirs, ours = (" ".join(flag for flag in flags if flag not in both) for flags in (theirs, ours))
        words.append(f"{name} {(theirs or 'none')[:_SHOWN]!r} in the checkpoint and {(ours or 'none')[:_SHOWN]!r} here")
    return "with " + ", ".join(words)


def _is_whole(path: Path, entry: KernelEntry) -> bool:
    try:
        data = path.read_bytes()
    except OSError:
        return False
    return len(data) == entry.file.size and hashlib.sha256(data).hexdigest() == entry.file.sha256


@dataclass(frozen=True, slots=True)
class Asked:
    """One request of Humming to its compiler; the names are Humming's."""

    code: str
    sm_version: str
    kernel_expr: str | None
    disable_fast_math: bool


class _Desk:
    """What stands before Humming's compiler in this process, once anything is offered."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.offers: dict[Path, Offer | None] = {}
        self.logs: dict[Path, Log] = {}
        self._toolchain: Toolchain | None = None
        self._undo: Callable[[], None] | None = None
        self._is_waiting = False
        self._last_request = 0.0
        self._said: dict[Path, str] = {}

    def install(self) -> Toolchain:
        """Stand before the compiler. Raises KernelError where this Humming has no such place."""
        if self._toolchain is not None:
            return self._toolchain
        toolchain = Toolchain()
        compiler = toolchain.compiler
        original, own = compiler.compile, vars(compiler).get("compile")
        signature = inspect.signature(original)
        names = [field.name for field in fields(Asked)]
        if not set(names) <= set(signature.parameters):
            raise KernelError("humming.jit.compiler", f"a compiler that takes {', '.join(names)}", str(signature))

        def compile_or_find(_: object, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - Humming's own values
            given = signature.bind(*args, **kwargs)
            given.apply_defaults()
            path = self.find(Asked(**{name: given.arguments[name] for name in names}))
            return original(*args, **kwargs) if path is None else path.as_posix()

        compiler.compile = classmethod(compile_or_find)
        inherited = partial(delattr, compiler, "compile")
        self._undo = inherited if own is None else partial(setattr, compiler, "compile", own)
        self._toolchain = toolchain
        atexit.register(self.say)
        return toolchain

    def remove(self) -> None:
        """Step aside and forget every offer."""
        with self.lock:
            if self._undo is not None:
                self._undo()
                atexit.unregister(self.say)
            self.offers, self.logs, self._said = {}, {}, {}
            self._toolchain = self._undo = None

    def find(self, asked: Asked) -> Path | None:
        """The first checkpoint's file that fits."""
        with self.lock:
            offers = [offer for offer in self.offers.values() if offer is not None]
        found = next((path for path in (offer.find(asked) for offer in offers) if path is not None), None)
        self._say_when_quiet()
        return found

    def _say_when_quiet(self) -> None:
        """Requests come in bursts: one line after each burst."""
        with self.lock:
            self._last_request = time.monotonic()
            if not self._is_waiting:
                self._is_waiting = True
                self._wait(QUIET_SECONDS)

    def _wait(self, seconds: float) -> None:
        timer = threading.Timer(seconds, self._on_time)
        timer.daemon = True
        timer.start()

    def _on_time(self) -> None:
        with self.lock:
            left = self._last_request + QUIET_SECONDS - time.monotonic()
            self._is_waiting = left > 0
            if self._is_waiting:
                self._wait(left)
            else:
                self.say()

    def say(self) -> None:
        """Log the summary of every checkpoint that has anything new to say."""
        with self.lock:
            for folder, offer in self.offers.items():
                if offer is not None and (offer.used or offer.refused):
                    line = offer.summary()
                    if line != self._said.get(folder):
                        self._said[folder] = line
                        self.logs[folder](line)


_desk = _Desk()


def offer(path_or_repo: str | Path, revision: str | None = None, *, log: Log | None = None) -> Offer | None:
    """Let Humming use the kernels of a converted checkpoint in this process, if it has any and they are trusted.

    Takes a folder or a Hub repository; asked again for one, it does nothing. What is wrong with the kernels or with
    this host's compiler is one line to `log` (default: this module's logger), and everything is compiled as usual.
    Raises OutputMissingError where there is no converted checkpoint.
    """
    say = log or logging.getLogger(__name__).info
    folder = find_output(path_or_repo, revision).absolute()
    with _desk.lock:
        if folder not in _desk.offers:
            _desk.logs[folder] = say
            _desk.offers[folder] = _offer(folder, str(path_or_repo), say)
        return _desk.offers[folder]


def withdraw() -> None:
    """Take back every offer: Humming's compiler is as it was. Kernels that Humming has already stay in use."""
    _desk.remove()


def _offer(folder: Path, name: str, say: Log) -> Offer | None:
    with suppress(HubError):
        fetch_missing(folder, [KERNELS_MANIFEST])  # most repositories have none
    if not (folder / KERNELS_MANIFEST).is_file():
        return None
    if not is_trusted(name):
        say(f"{name}: its compiled kernels are not used: code from there runs only with {TRUST_VARIABLE}=1")
        return None
    try:
        manifest = from_json((folder / KERNELS_MANIFEST).read_bytes())
        fetch_missing(folder, manifest.files())
        return Offer(folder, manifest, _desk.install())
    except (LoaderError, OSError) as error:
        say(f"{name}: its compiled kernels are not used: {error}")
        return None
