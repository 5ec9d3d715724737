"""The one place that joins the stages: read headers, plan, convert layer by layer, copy the rest, commit."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from humming_convert import model_card
from humming_convert.collector import paused
from humming_convert.errors import CheckpointError, Problem
from humming_convert.hf_config import converted_config
from humming_convert.hub_source import fetch_side_files
from humming_convert.interrupts import held_back
from humming_convert.model_card import CARD
from humming_convert.options import ConvertOptions
from humming_convert.output import OutputFolder
from humming_convert.passthrough import Reader, copy_side_files, write_passthrough
from humming_convert.plan import ConversionPlan
from humming_convert.plan_build import build_plan
from humming_convert.progress import ByteProgress, byte_progress
from humming_convert.publish import PushReport, StreamingUpload
from humming_convert.source import Checkpoint, is_unchanged, open_checkpoint
from humming_convert.source_access import SourceAccess, open_access
from humming_convert.writer import TensorSpec
from humming_loader._version import __version__
from humming_loader.dtypes import tensor_nbytes
from humming_loader.entries import (
    FileEntry,
    LayerEntry,
    Manifest,
    Passthrough,
    Producer,
    Source,
    SourceFileEntry,
    TargetEntry,
)
from humming_loader.manifest import FORMAT_VERSION, PRODUCER, to_json

RATE_BYTES = 500_000_000


@dataclass(frozen=True, slots=True)
class ConversionReport:
    """What a conversion did: where, how much, how long."""

    out: Path
    layers: int
    packed_bytes: int
    source_bytes: int
    passthrough_tensors: int
    passthrough_bytes: int
    seconds: float
    target: str
    tp_size: int
    humming_version: str
    notes: tuple[str, ...]
    published: PushReport | None = None

    def text(self) -> str:
        """A few lines for a terminal."""
        # The start alone takes seconds: for little data a rate would say nothing.
        rate = f", {self.source_bytes / self.seconds / 1e6:.0f} MB/s" if self.source_bytes >= RATE_BYTES else ""
        lines = [f"note: {note}" for note in self.notes]
        ranks = f" for each of {self.tp_size} tensor-parallel ranks" if self.tp_size > 1 else ""
        lines.append(
            f"{self.out}: {self.layers} MoE layers packed{ranks} ({self.packed_bytes / 1e6:.1f} MB) "
            f"for {self.target} with humming-kernels {self.humming_version}, "
            f"{self.passthrough_tensors} tensors passed through ({self.passthrough_bytes / 1e6:.1f} MB), "
            f"{self.seconds:.1f} s{rate}"
        )
        if self.published is not None:
            lines.append(self.published.text())
        return "\n".join(lines)


def convert_checkpoint(options: ConvertOptions) -> ConversionReport:
    """Convert `options.source` into the new folder `options.out`.

    Raises CheckpointError, UnsupportedError, NothingToConvertError or OutputError (all ConvertError) with every
    problem found; then there is no OUT, or the one that was there before.
    """
    with paused():
        return _convert_checkpoint(options)


def _convert_checkpoint(options: ConvertOptions) -> ConversionReport:
    start = time.perf_counter()
    checkpoint = open_checkpoint(options.source, options.quant_config)
    plan = build_plan(checkpoint, activation=options.activation, dtype=options.dtype, tp_size=options.tp_size)
    source_root = checkpoint.root / checkpoint.files[0].name if checkpoint.is_single_file else checkpoint.root
    total = sum(header.nbytes for header in checkpoint.tensors.values())
    with OutputFolder(options.out, source_root=source_root, overwrite=options.overwrite) as folder:
        folder.require_space(total)
        with (
            _upload(options) as upload,
            byte_progress("converting") as progress,
            open_access(
                checkpoint,
                plan,
                folder.out,
                hash_source=options.hash_source,
                low_disk=options.low_disk,
                workers=options.workers,
            ) as access,
        ):

            def finished(number: int, name: str) -> None:
                access.layer_finished(number)
                if upload is not None:
                    upload.add(name, folder.path(name))

            # torch and Humming are imported only now: bad input is refused at once, and the source is hashed meanwhile.
            with held_back():
                from humming_convert.host.target import humming
                from humming_convert.layers import convert_layers

                humming()
            progress.total(total)
            layers = convert_layers(plan, options, checkpoint, access.payload, folder, progress, finished)
            access.finish_layers()
            passed = _copy_tensors(plan, checkpoint, access.reader, folder, options, progress)
            progress.label("hashing the source")
            digests = _digests(access, checkpoint)
            _refuse_changed_source(checkpoint)
            side_files = _write_side_files(plan, checkpoint, folder, options, layers, passed)
            manifest = _manifest(plan, checkpoint, options, layers, passed, side_files, digests)
            if upload is not None:
                progress.label(f"sending to {upload.repo}")
                upload.sent()  # before the files change their place
            folder.commit(to_json(manifest))
            published = upload.finish(folder.out, manifest) if upload is not None else None
    return ConversionReport(
        out=options.out,
        layers=len(plan.layers),
        packed_bytes=packed_bytes(layers),
        source_bytes=total,
        passthrough_tensors=passed.tensors,
        passthrough_bytes=passed.bytes,
        seconds=time.perf_counter() - start,
        target=str(options.target),
        tp_size=plan.tp_size,
        humming_version=manifest.humming_version,
        notes=plan.notes,
        published=published,
    )


@contextmanager
def _upload(options: ConvertOptions) -> Iterator[StreamingUpload | None]:
    """The upload beside the conversion, if one was asked for. Raises HubError or OutputError before any long work."""
    if options.push is None:
        yield None
        return
    with StreamingUpload(options.push) as upload:
        yield upload


def packed_bytes(layers: Mapping[str, LayerEntry]) -> int:
    """Bytes of all packed tensors."""
    return sum(
        tensor_nbytes(tensor.dtype, tensor.shape, tensor.name)
        for layer in layers.values()
        for sublayer in layer.sublayers.values()
        for tensor in sublayer.tensors.values()
    )


def _copy_tensors(
    plan: ConversionPlan,
    checkpoint: Checkpoint,
    reader: Reader,
    folder: OutputFolder,
    options: ConvertOptions,
    progress: ByteProgress,
) -> Passthrough:
    progress.label("other tensors")
    headers = [checkpoint.tensors[name] for name in plan.passthrough]
    specs = [TensorSpec(header.name, header.dtype, header.shape) for header in headers]
    return write_passthrough(
        specs, reader, folder.path(""), max_shard_bytes=options.max_shard_bytes, progress=progress.advance
    )


def _digests(access: SourceAccess, checkpoint: Checkpoint) -> Mapping[str, str]:
    try:
        return dict(checkpoint.origin.sha256 if checkpoint.origin is not None else {}) | dict(access.digests())
    except OSError:
        _refuse_changed_source(checkpoint)  # says more
        raise


def _refuse_changed_source(checkpoint: Checkpoint) -> None:
    """The last look at the source: a file that changed since its header was read makes the output worthless."""
    if checkpoint.origin is not None and checkpoint.origin.is_remote:
        return  # a commit does not change, and each file was looked at when it came
    problems = []
    hint = "start again once nothing writes to the source"
    for file in checkpoint.files:
        try:
            state = (checkpoint.root / file.name).stat()
        except OSError as error:
            found = error.strerror or str(error)
        else:
            if is_unchanged(file, state):
                continue
            found = "a changed file"
        problems.append(Problem(file.name, "the file whose header was read", found, hint))
    if problems:
        raise CheckpointError(problems)


def _write_side_files(
    plan: ConversionPlan,
    checkpoint: Checkpoint,
    folder: OutputFolder,
    options: ConvertOptions,
    layers: Mapping[str, LayerEntry],
    passed: Passthrough,
) -> tuple[FileEntry, ...]:
    if checkpoint.config is None:
        return ()
    fetch_side_files(checkpoint)
    kept = [name for name in checkpoint.side_files if name != CARD]
    entries = list(copy_side_files(checkpoint.root, kept, folder.path("")))
    config = converted_config(checkpoint.config, checkpoint.quantization)
    entries.append(folder.write_text("config.json", model_card.to_text(config)))
    shards = sum(file.name.endswith(".safetensors") for file in passed.files)
    facts = model_card.CardFacts(packed_bytes(layers), passed.bytes, shards)
    entries.append(folder.write_text(CARD, model_card.render(plan, checkpoint, options, facts)))
    return tuple(entries)


def _manifest(
    plan: ConversionPlan,
    checkpoint: Checkpoint,
    options: ConvertOptions,
    layers: Mapping[str, LayerEntry],
    passed: Passthrough,
    side_files: tuple[FileEntry, ...],
    digests: Mapping[str, str],
) -> Manifest:
    files = tuple(SourceFileEntry(file.name, file.size, digests.get(file.name)) for file in checkpoint.files)
    target = options.target
    return Manifest(
        format_version=FORMAT_VERSION,
        producer=Producer(PRODUCER, __version__),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        source=Source(plan.source, checkpoint.origin.commit if checkpoint.origin is not None else None, files),
        target=TargetEntry(target.sm, target.cuda, target.is_ppu),
        humming_version=version("humming-kernels"),
        param_dtype=plan.param_dtype,
        activation=options.activation,
        layers=dict(layers),
        passthrough=passed,
        side_files=side_files,
    )
