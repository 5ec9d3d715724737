"""Verify a finished output: against its manifest, and against the checkpoint it was made from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from humming_convert.errors import VerificationError
from humming_convert.hub_id import HubId
from humming_convert.hub_source import fetch_side_files
from humming_convert.options import default_workers
from humming_convert.progress import ByteProgress
from humming_convert.provenance import SourceHasher
from humming_convert.source_access import open_access
from humming_convert.verify_output import check_output, output_bytes, packed_sizes, read_manifest
from humming_convert.verify_source import SourceComparison, SourceReport, open_source
from humming_convert.verify_sublayer import Sides
from humming_loader.parts import layer_names


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What was found to be in order. `source` is None when only the output was looked at."""

    out: Path
    layers: int
    packed_tensors: int
    packed_bytes: int
    passthrough_tensors: int
    passthrough_bytes: int
    side_files: int
    source: SourceReport | None

    def text(self) -> str:
        """A few lines for a terminal."""
        lines = [
            f"{self.out}: {self.layers} MoE layers in {self.packed_tensors} packed tensors "
            f"({self.packed_bytes} bytes), {self.passthrough_tensors} tensors passed through "
            f"({self.passthrough_bytes} bytes), {self.side_files} other files: all as the manifest says"
        ]
        if self.source is not None:
            report = self.source
            lines.append(
                f"source: {report.total} bytes = {report.claimed} converted + {report.unused} that have no "
                f"place in the kernel layout + {report.passed} passed through, equal byte for byte"
            )
            lines.append(f"weights: {report.weights} decoded from both sides, codes and scales all equal")
            lines += [f"note: {note}" for note in report.notes]
        return "\n".join(lines)


def verify(
    out: Path,
    source: Path | HubId | None = None,
    *,
    quant_config: Path | None = None,
    progress: ByteProgress | None = None,
) -> VerifyReport:
    """Check the output folder `out`; with `source`, also hold every value against the checkpoint.

    `quant_config` is the file that the conversion was given in place of the checkpoint's own section, if any.

    Raises VerificationError with every problem found, and CheckpointError or UnsupportedError when `source`
    itself cannot be read.
    """
    manifest = read_manifest(out)
    sizes = tuple(packed_sizes(manifest))
    if progress is not None:
        again = sum(sizes) + manifest.passthrough.bytes if source is not None else 0
        progress.total(output_bytes(manifest) + again)
        progress.label("checksums")
    problems = check_output(out, manifest, progress)
    if problems:
        raise VerificationError(problems)
    compared = None
    if source is not None:
        checkpoint, plan = open_source(out, source, manifest, quant_config)
        with open_access(
            checkpoint, plan, out, hash_source=False, low_disk=False, workers=default_workers()
        ) as access:
            sides = Sides(
                out=out,
                humming_version=manifest.humming_version,
                checkpoint=checkpoint,
                payload=access.payload,
                progress=progress,
                workers=default_workers(),
            )
            fetch_side_files(checkpoint)
            comparison = SourceComparison(manifest, plan, sides)
            recorded = {file.name for file in manifest.source.files if file.sha256 is not None}
            names = [file.name for file in checkpoint.files if file.name in recorded]
            is_remote = checkpoint.origin is not None and checkpoint.origin.is_remote
            with SourceHasher(checkpoint.root, [] if is_remote else names) as hasher:
                compared, problems = comparison.run()
                problems += comparison.compare_digests(access.digests() if is_remote else hasher.result())
        if problems:
            raise VerificationError(problems)
    return VerifyReport(
        out=out,
        layers=len(layer_names(manifest.layers)),
        packed_tensors=len(sizes),
        packed_bytes=sum(sizes),
        passthrough_tensors=manifest.passthrough.tensors,
        passthrough_bytes=manifest.passthrough.bytes,
        side_files=len(manifest.side_files),
        source=compared,
    )
