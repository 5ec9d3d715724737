"""Compare a finished output with its source: every byte accounted for, every value equal.

The plan is used only to know which source tensor belongs to which expert; the values of both sides are
decoded independently of the code that converted them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from humming_convert.decode import parse_layout
from humming_convert.errors import Problem, UnsupportedError, VerificationError
from humming_convert.files import read_regular
from humming_convert.hf_config import converted_config
from humming_convert.hub_id import HubId
from humming_convert.passthrough import is_side_file
from humming_convert.plan import ConversionPlan, LayerPlan, StackedTensor, SublayerPlan
from humming_convert.plan_build import build_plan
from humming_convert.source import Checkpoint, open_checkpoint
from humming_convert.verify_facts import installed_humming, layer_problems, layout_problems
from humming_convert.verify_output import BUFFER_BYTES, passthrough_tensors
from humming_convert.verify_sublayer import Sides, SublayerComparison
from humming_loader.entries import LayerEntry, Manifest
from humming_loader.parts import tp_size_of
from humming_loader.reader import ExpertsFile

CONFIG_FILE = "config.json"
OWN_FILES = (CONFIG_FILE, "README.md")


@dataclass(slots=True)
class SourceReport:
    """What was compared: bytes of the source by what became of them, and weights decoded on both sides."""

    claimed: int = 0
    unused: int = 0
    passed: int = 0
    weights: int = 0
    notes: list[str] = field(default_factory=list)

    @property
    def total(self) -> int:
        """All payload bytes of the source."""
        return self.claimed + self.unused + self.passed


def open_source(
    out: Path, source: Path | HubId, manifest: Manifest, quant_config: Path | None
) -> tuple[Checkpoint, ConversionPlan]:
    """The source and its plan under the output's own options. Raises CheckpointError and UnsupportedError.

    Without `quant_config` the quantization section is the one kept in the output's config.json, which
    --quant-config may have given. The output of a bare file keeps none.
    """
    checkpoint = open_checkpoint(source, quant_config)
    kept = _kept_quantization(out) if quant_config is None else None
    if kept:
        checkpoint = replace(checkpoint, quantization=kept)
    plan = build_plan(
        checkpoint,
        activation=manifest.activation,
        dtype=manifest.param_dtype,
        tp_size=tp_size_of(manifest.layers),
    )
    return checkpoint, plan


def _kept_quantization(out: Path) -> dict[str, object] | None:
    section = _written_config(out).get("quantization_config")
    kept = section.get("source") if isinstance(section, dict) else None
    return kept if isinstance(kept, dict) else None


def _written_config(out: Path) -> dict[str, Any]:
    """The output's config.json; nothing when there is none or no JSON object."""
    try:
        document = json.loads(read_regular(out / CONFIG_FILE))
    except (OSError, ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}


@dataclass(frozen=True, slots=True)
class SourceComparison:
    """The whole output against the whole source."""

    manifest: Manifest
    plan: ConversionPlan
    sides: Sides

    def run(self) -> tuple[SourceReport, list[Problem]]:
        """Compare everything; what was compared and every problem found."""
        report = SourceReport()
        problems = list(self._account(report))
        problems += self._compare_files()
        problems += self._compare_passthrough()
        problems += self._compare_side_files()
        planned = {layer.layer_name: layer for layer in self.plan.packed}
        if set(planned) != set(self.manifest.layers):
            wanted, found = ", ".join(sorted(planned)), ", ".join(sorted(self.manifest.layers))
            problems.append(Problem("layers", f"those of the source: {wanted}", found))
            return report, problems
        is_same_humming = self._is_same_humming(report)
        for name, layer in planned.items():
            if self.sides.progress is not None:
                self.sides.progress.label(name)
            problems += self._compare_facts(layer, is_same_humming)
            for sublayer in layer.sublayers:
                entry = self.manifest.layers[name]
                problems += self._compare_sublayer(layer, sublayer, entry, report)
        return report, problems

    def _account(self, report: SourceReport) -> Iterator[Problem]:
        """Every tensor of the source is claimed, unused or passed through, and only one of them."""
        claimed = {part.source for one in self._sublayers() for tensor in _all_tensors(one) for part in tensor.parts}
        unused = {name for one in self._sublayers() for name in one.unused}
        passed = set(self.plan.passthrough)
        headers = self.sides.checkpoint.tensors
        for name in headers:
            times = (name in claimed) + (name in unused) + (name in passed)
            if times != 1:
                yield Problem(f"tensor {name}", "to be claimed or passed through, once", f"{times} times")
        report.claimed = sum(headers[name].nbytes for name in claimed)
        report.unused = sum(headers[name].nbytes for name in unused)
        report.passed = sum(headers[name].nbytes for name in passed)
        total = sum(header.nbytes for header in headers.values())
        if report.total != total:
            yield Problem("source", f"{total} bytes accounted for", f"{report.total}")

    def _sublayers(self) -> Iterator[SublayerPlan]:
        for layer in self.plan.layers:
            yield from layer.sublayers

    def _compare_files(self) -> Iterator[Problem]:
        wanted = {file.name: file.size for file in self.manifest.source.files}
        found = {file.name: file.size for file in self.sides.checkpoint.files}
        for name in sorted(wanted.keys() | found.keys()):
            if wanted.get(name) != found.get(name):
                expected = f"{wanted[name]} bytes, as converted" if name in wanted else "no such file"
                yield Problem(f"source {name}", expected, f"{found[name]} bytes" if name in found else "none")

    def compare_digests(self, digests: Mapping[str, str]) -> Iterator[Problem]:
        """Source files whose recorded SHA-256 is not the one in `digests`."""
        for file in self.manifest.source.files:
            if file.sha256 is not None and digests.get(file.name, file.sha256) != file.sha256:
                yield Problem(f"source {file.name}", f"sha256 {file.sha256}, as converted", digests[file.name])

    def _compare_passthrough(self) -> Iterator[Problem]:
        where = passthrough_tensors(self.sides.out, self.manifest)
        for name in sorted(set(where) ^ set(self.plan.passthrough)):
            found = "it only in the output" if name in where else "it only in the source"
            yield Problem(f"tensor {name}", "it passed through", found)
        by_file: dict[str, list[str]] = {}
        for name in self.plan.passthrough:
            if name in where:
                by_file.setdefault(where[name], []).append(name)
        for file, names in by_file.items():
            with ExpertsFile(self.sides.out / file) as opened:
                for name in names:
                    yield from self._compare_bytes(opened, file, name)

    def _compare_bytes(self, opened: ExpertsFile, file: str, name: str) -> Iterator[Problem]:
        header, stored = self.sides.checkpoint.tensors[name], opened.tensors[name]
        if (header.dtype, header.shape) != (stored.dtype, stored.shape):
            expected = f"{header.dtype} {list(header.shape)}, as in the source"
            yield Problem(f"{file}: tensor {name}", expected, f"{stored.dtype} {list(stored.shape)}")
            return
        ours, theirs = bytearray(BUFFER_BYTES), bytearray(BUFFER_BYTES)
        for start in range(0, header.nbytes, BUFFER_BYTES):
            size = min(BUFFER_BYTES, header.nbytes - start)
            opened.read_into(name, memoryview(ours)[:size], start)
            self.sides.payload.read_into(name, memoryview(theirs)[:size], start)
            if self.sides.progress is not None:
                self.sides.progress.advance(size)
            if ours[:size] != theirs[:size]:
                first = next(index for index in range(size) if ours[index] != theirs[index])
                yield Problem(f"{file}: tensor {name}", "the source's bytes", f"another at {start + first}")
                return

    def _is_same_humming(self, report: SourceReport) -> bool:
        installed, wanted = installed_humming(), self.manifest.humming_version
        if installed != wanted:
            have = f"{installed} is installed" if installed else "none is installed"
            report.notes.append(
                f"the layout's probe, flags and schemas were not recomputed: made with humming-kernels {wanted}, {have}"
            )
        return installed == wanted

    def _compare_facts(self, layer: LayerPlan, is_same_humming: bool) -> list[Problem]:
        entry = self.manifest.layers[layer.layer_name]
        problems = list(layer_problems(layer, entry))
        if problems or not is_same_humming:
            return problems
        try:
            return list(layout_problems(layer, entry, self.manifest, self.sides.checkpoint, self.sides.payload))
        except UnsupportedError as error:
            return list(error.problems)

    def _compare_side_files(self) -> Iterator[Problem]:
        """Tokenizer and other files are the source's, config.json is the source's but for the quantization."""
        checkpoint = self.sides.checkpoint
        if checkpoint.config is None:
            return
        stored = {entry.name: entry.sha256 for entry in self.manifest.side_files if entry.name not in OWN_FILES}
        kept = {name for name in checkpoint.side_files if is_side_file(name) and name not in OWN_FILES}
        for name in sorted(stored.keys() ^ kept):
            found = "it only in the output" if name in stored else "it only in the source"
            yield Problem(name, "a file of both", found)
        for name in sorted(stored.keys() & kept):
            digest = hashlib.sha256(read_regular(checkpoint.root / name)).hexdigest()
            if digest != stored[name]:
                yield Problem(name, f"the source's file, sha256 {digest}", f"sha256 {stored[name]}")
        wanted, written = converted_config(checkpoint.config, checkpoint.quantization), _written_config(self.sides.out)
        different = sorted(key for key in wanted.keys() | written.keys() if wanted.get(key) != written.get(key))
        if different:
            yield Problem(CONFIG_FILE, "the source's values", f"others for {', '.join(different)}")

    def _compare_sublayer(
        self, layer: LayerPlan, sublayer: SublayerPlan, entry: LayerEntry, report: SourceReport
    ) -> list[Problem]:
        packed = entry.sublayers[sublayer.name]
        where = f"{layer.layer_name} {sublayer.name}"
        shape = (entry.num_experts, packed.shape_n, packed.shape_k, packed.shape_n_stacks)
        wanted = (layer.num_experts, sublayer.shape_n, sublayer.shape_k, sublayer.shape_n_stacks)
        if shape != wanted:
            return [Problem(where, f"experts, N, K and stacks {wanted} of the source", f"{shape}")]
        try:
            layout = parse_layout(packed.layer_config, packed.fingerprint.flags)
            problems = SublayerComparison(self.sides, layer, sublayer, packed, layout).run()
            report.weights += layer.num_experts * sublayer.shape_n * sublayer.shape_k
        except VerificationError as error:
            problems = list(error.problems)
        return [Problem(f"{where} {one.where}", one.expected, one.found, one.hint) for one in problems]


def _all_tensors(sublayer: SublayerPlan) -> Iterator[StackedTensor]:
    yield from sublayer.tensors
    yield from sublayer.input_tensors
