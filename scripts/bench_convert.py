"""Time `humming-convert` against `cp` of the same file, in the same run, page cache warm.

    python scripts/bench_convert.py [--shapes NAMES] [--formats NAMES] [--runs 5] [--work DIR]

One synthetic model file per format is written once, of random codes: at Qwen3-30B layer shapes (128 experts, w13
1536 x 2048, w2 2048 x 768) about 7 GB; at DeepSeek-V3's (256 experts, w13 4096 x 7168, w2 7168 x 2048) one layer, in
FP8 half of its experts: 5.6 GB, so that it fits into 24 GiB twice. Then `cp`, and a whole `humming-convert` process
(start-up, SHA-256 of every tensor and fsync included), take turns; the source is read before each. With --fill-memory
all free memory is taken into the page cache first, as on a machine that has been up for long: where a virtual machine's
host takes free pages back, their first use is timed otherwise, in both. Prints medians, their ratio, the same against
`cp` with `sync`, and the peak resident memory; writes bench-convert.json. With --device cuda the place of `cp` is taken
by scripts/copy_through_gpu.py, a process that sends the same bytes through the GPU and back.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.bench_models import FORMATS, SHAPES, sizes_of, write_model

ALLOWANCE = 700 * 10**6


@dataclass(frozen=True)
class Row:
    """One format's medians at one shape: bytes, seconds, ratios to cp (1 is as fast), peak resident bytes."""

    format: str
    shape: str
    layers: int
    source_bytes: int
    cp_seconds: float
    cp_sync_seconds: float
    convert_seconds: float
    ratio: float
    ratio_to_synced: float
    peak_bytes: int


def warm(work: Path, source: Path, *, fill_memory: bool) -> None:
    """Read `source` into the page cache, after everything that was free if `fill_memory`; nothing is left to write."""
    ballast = work / "ballast"
    with ballast.open("wb") as file:
        file.truncate(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if fill_memory else 0)
    block = bytearray(16 << 20)
    for path in (ballast, source):
        with path.open("rb", buffering=0) as file:
            while file.readinto(block):
                pass
    os.sync()


def _timed(command: list[str]) -> tuple[float, int]:
    """Seconds and peak resident bytes of a command. Leaves with its output when it fails."""
    start = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        seconds = time.perf_counter() - start
        if process.returncode:
            sys.exit(f"{' '.join(command)} failed: {process.stderr.read().decode() if process.stderr else ''}")
    return seconds, usage.ru_maxrss * 1024


def measure(name: str, shape_name: str, work: Path, given: argparse.Namespace) -> Row:
    """Alternate cp and humming-convert over one synthetic model, `given.runs` times each, after a warm-up of both."""
    layers, experts = sizes_of(name, SHAPES[shape_name], given.layers)
    path = write_model(work / name, name, replace(SHAPES[shape_name], experts=experts), layers)
    tool = [sys.executable, "-m", "humming_convert.cli", "convert", str(path.parent), str(work / "out")]
    tool += ["--target", given.target, "--device", given.device, *given.extra]
    copy = ["cp"] if given.device == "cpu" else [sys.executable, str(Path(__file__).with_name("copy_through_gpu.py"))]
    cp_times, synced_times, convert_times, peaks = [], [], [], []
    for turn in range(given.runs + 1):
        warm(work, path, fill_memory=given.fill_memory)
        seconds, _ = _timed([*copy, str(path), str(work / "copy")])
        flushing, _ = _timed(["sync", str(work / "copy")])
        (work / "copy").unlink()
        warm(work, path, fill_memory=given.fill_memory)
        packed, peak = _timed(tool)
        shutil.rmtree(work / "out")
        if turn:
            cp_times.append(seconds)
            synced_times.append(seconds + flushing)
            convert_times.append(packed)
            peaks.append(peak)
    size = path.stat().st_size
    shutil.rmtree(path.parent)
    cp, synced = statistics.median(cp_times), statistics.median(synced_times)
    convert = statistics.median(convert_times)
    if max(peaks) > 2 * size // layers + ALLOWANCE:
        print(f"{name}, {shape_name}: {max(peaks) / 1e6:.0f} MB are more than two layers and {ALLOWANCE / 1e6:.0f} MB")
    return Row(name, shape_name, layers, size, cp, synced, convert, cp / convert, synced / convert, max(peaks))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--device", default="cpu", help="cuda: against a copy of the same bytes through the GPU")
    parser.add_argument("--target", default="sm90")
    parser.add_argument("--fill-memory", action="store_true")
    parser.add_argument("--formats", default=",".join(FORMATS))
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--work", type=Path, help="folder for the files (default: a temporary one)")
    parser.add_argument("--json", type=Path, default=Path("bench-convert.json"))
    parser.add_argument("extra", nargs="*", help="further options for humming-convert, after --")
    given = parser.parse_args()
    rows = []
    print("| format | shape | layers | GB | cp MB/s | cp+sync MB/s | convert MB/s | of cp | of cp+sync | peak MB |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory(dir=given.work) as folder:
        for name, shape in product(given.formats.split(","), given.shapes.split(",")):
            row = measure(name, shape, Path(folder), given)
            rows.append(row)
            speeds = (row.source_bytes / 1e6 / t for t in (row.cp_seconds, row.cp_sync_seconds, row.convert_seconds))
            print(
                f"| {name} | {shape} | {row.layers} | {row.source_bytes / 1e9:.1f} | "
                + " | ".join(f"{speed:.0f}" for speed in speeds)
                + f" | {row.ratio:.2f} | {row.ratio_to_synced:.2f} | {row.peak_bytes / 1e6:.0f} |",
                flush=True,
            )
    machine = {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()}
    settings = {"runs": given.runs, "fill_memory": given.fill_memory, "device": given.device}
    document = {"machine": machine, **settings, "rows": [asdict(row) for row in rows]}
    given.json.write_text(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
