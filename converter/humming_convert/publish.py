"""Put a finished output on the Hub: checked first, large files next, and one commit last."""

from __future__ import annotations

import queue
import threading
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from humming_convert.errors import OutputError, VerificationError
from humming_convert.hub_destination import Destination, PushOptions, Receipt
from humming_convert.model_card import CARD, check_card
from humming_convert.progress import ByteProgress
from humming_convert.replacing import kernel_files
from humming_convert.verify_output import check_output, output_bytes, read_manifest
from humming_loader._version import __version__
from humming_loader.errors import HubError, LoaderError
from humming_loader.manifest import MANIFEST_FILE, Manifest

if TYPE_CHECKING:
    from huggingface_hub import CommitOperationAdd


@dataclass(frozen=True, slots=True)
class PushReport:
    """What was put where. `receipt` is None for a dry run."""

    out: Path
    options: PushOptions
    files: tuple[tuple[str, int], ...]
    removed: tuple[str, ...]
    receipt: Receipt | None

    def text(self) -> str:
        """A few lines for a terminal."""
        where = self.options.repo + (f", branch {self.options.revision}" if self.options.revision else "")
        size = f"{len(self.files)} files, {sum(size for _, size in self.files) / 1e6:.1f} MB"
        lines = [f"removed there: {name}" for name in self.removed]
        if self.receipt is None:
            lines += [f"{size_of / 1e6:12.3f} MB  {name}" for name, size_of in self.files]
            return "\n".join([*lines, f"{self.out}: {size} would go to {where}; nothing was sent"])
        if self.receipt.commit is None:
            return "\n".join([*lines, f"{where} has all of {self.out} already"])
        return "\n".join([*lines, f"{self.out}: {size} are on {where}: {self.receipt.url}"])


def push(out: Path, options: PushOptions, progress: ByteProgress) -> PushReport:
    """Upload the output folder `out` in one commit.

    Raises VerificationError for an output that is not what its manifest says, OutputError for a repository that holds
    other weights, HubError with the Hub's reason. Run again after a failure, it sends only what the Hub lacks.
    """
    manifest = read_manifest(out)
    progress.total(output_bytes(manifest))
    progress.label("checksums")
    problems = check_output(out, manifest, progress)
    if problems:
        raise VerificationError(problems)
    card = out / CARD
    if card.is_file():
        check_card(card.read_text(encoding="utf-8"))
    destination = Destination(options)
    names = files_of(out, manifest)
    sizes = tuple((name, (out / name).stat().st_size) for name in names)
    if options.dry_run:
        return PushReport(out, options, sizes, destination.removed(names), None)
    additions = [destination.operation(name, out / name) for name in names]
    progress.label(f"sending to {options.repo}")
    destination.send(additions)
    receipt = _commit(destination, additions, manifest)
    return PushReport(out, options, sizes, destination.removed(names), receipt)


def files_of(out: Path, manifest: Manifest) -> tuple[str, ...]:
    """The files of an output, compiled kernels included: large ones first, the manifest last."""
    passed = tuple(file.name for file in manifest.passthrough.files)
    side = tuple(file.name for file in manifest.side_files)
    return (*manifest.experts_files(), *passed, *side, *sorted(kernel_files(out)), MANIFEST_FILE)


class StreamingUpload:
    """Uploads files of an output while it is made; `finish` commits. Used as a context manager.

    A failure stops the sending, not the conversion: the output is worth more than the upload, which `push` completes.
    """

    def __init__(self, options: PushOptions) -> None:
        self._destination = Destination(options)
        self._options = options
        self._queue: queue.SimpleQueue[tuple[str, Path] | None] = queue.SimpleQueue()
        self._sent: dict[str, CommitOperationAdd] = {}
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._work, name="upload", daemon=True)

    @property
    def repo(self) -> str:
        """Where it goes."""
        return self._options.repo

    def __enter__(self) -> StreamingUpload:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._queue.put(None)
        if error is None:
            self._thread.join()
        # Else the thread ends with the process: a transfer of gigabytes cannot be waited for.

    def add(self, name: str, path: Path) -> None:
        """Send the finished file at `path`, which the output will call `name`, when its turn comes."""
        self._queue.put((name, path))

    def sent(self) -> None:
        """Wait until everything that was added is sent, or could not be: the files may be renamed after that."""
        self._queue.put(None)
        self._thread.join()

    def finish(self, out: Path, manifest: Manifest) -> PushReport:
        """Send the rest of the finished output `out` and commit. Raises OutputError with what to do when it failed."""
        try:
            if self._error is not None:
                raise self._error
            names = files_of(out, manifest)
            rest = {name: self._destination.operation(name, out / name) for name in names if name not in self._sent}
            self._destination.send(list(rest.values()))
            additions = [self._sent.get(name) or rest[name] for name in names]
            receipt = _commit(self._destination, additions, manifest)
        except (HubError, LoaderError, OutputError) as error:
            again = f"`humming-convert push {out} {self._options.repo}` sends what is missing"
            raise OutputError(f"{out}: is whole, but was not published: {error}\n{again}") from error
        sizes = tuple((name, (out / name).stat().st_size) for name in names)
        return PushReport(out, self._options, sizes, self._destination.removed(names), receipt)

    def _work(self) -> None:
        while (job := self._queue.get()) is not None and self._error is None:
            name, path = job
            try:
                addition = self._destination.operation(name, path)
                self._destination.send([addition])
            except (HubError, OutputError, OSError, ValueError, RuntimeError) as error:
                self._error = error if isinstance(error, HubError | OutputError) else OutputError(f"{name}: {error}")
            else:
                # The client empties what it has sent; a file that it would rather have in the commit comes later.
                if addition.path_or_fileobj == b"":
                    self._sent[name] = addition


def _commit(destination: Destination, additions: list[CommitOperationAdd], manifest: Manifest) -> Receipt:
    target = f"sm{manifest.target.sm}"
    revision = f" at {manifest.source.revision}" if manifest.source.revision else ""
    message = f"{manifest.source.name}, packed for Humming on {target}"
    description = (
        f"Made by humming-convert {manifest.producer.version} with humming-kernels {manifest.humming_version} from "
        f"{manifest.source.name}{revision}, published by humming-convert {__version__}."
    )
    return destination.commit(additions, message, description)
