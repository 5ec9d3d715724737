"""Time `humming-convert` against `cp` of the same file, in the same run, page cache warm.

    python scripts/bench_convert.py [--layers N] [--formats fp8_block,mxfp4,awq,ct_int4] [--runs 5] [--work DIR]

One synthetic model file per format at Qwen3-30B layer shapes (128 experts, w13 1536 x 2048, w2 2048 x 768, random
codes) is written once: 12 layers in FP8, 24 in 4 bits, about 7 GB, unless --layers says otherwise. Then `cp`, and a
whole `humming-convert` process (start-up, SHA-256 of every tensor and fsync included), take turns; the source is read
before each. With --fill-memory all free memory is taken into the page cache first, as on a machine that has been up
for long: where a virtual machine's host takes free pages back, their first use is timed otherwise, in both. Prints
medians, their ratio, the same against `cp` with `sync`, and the peak resident memory; writes bench-convert.json.
With --device cuda the place of `cp` is taken by scripts/copy_through_gpu.py, a process that sends the same bytes
through the GPU and back.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

EXPERTS, HIDDEN, INTERMEDIATE = 128, 2048, 768
ALLOWANCE = 700 * 10**6
Tensor = tuple[str, str, tuple[int, ...], Callable[[np.random.Generator], np.ndarray[Any, Any]]]


def projections() -> list[tuple[str, int, int]]:
    """Name, N and K of one expert's projections."""
    return [
        ("gate_proj", INTERMEDIATE, HIDDEN),
        ("up_proj", INTERMEDIATE, HIDDEN),
        ("down_proj", HIDDEN, INTERMEDIATE),
    ]


def _words(*shape: int) -> Callable[[np.random.Generator], np.ndarray[Any, Any]]:
    return lambda rng: rng.integers(0, 256, size=int(np.prod(shape)) * 4, dtype=np.uint8)


def _codes(*shape: int) -> Callable[[np.random.Generator], np.ndarray[Any, Any]]:
    # The exponent's lowest bit is cleared so that no code is NaN.
    return lambda rng: rng.integers(0, 256, size=shape, dtype=np.uint8) & 0xF7


def _bytes(low: int, high: int, *shape: int) -> Callable[[np.random.Generator], np.ndarray[Any, Any]]:
    return lambda rng: rng.integers(low, high, size=shape, dtype=np.uint8)


def _scales(dtype: str, *shape: int) -> Callable[[np.random.Generator], np.ndarray[Any, Any]]:
    def draw(rng: np.random.Generator) -> np.ndarray[Any, Any]:
        values = rng.uniform(0.01, 0.1, size=shape).astype(np.float32)
        if dtype == "BF16":
            return (values.view(np.uint32) >> 16).astype(np.uint16)
        return values.astype({"F32": np.float32, "F16": np.float16}[dtype])

    return draw


def fp8_block(prefix: str, n: int, k: int) -> list[Tensor]:
    scale = (n // 128, k // 128)
    return [
        (f"{prefix}.weight", "F8_E4M3", (n, k), _codes(n, k)),
        (f"{prefix}.weight_scale_inv", "F32", scale, _scales("F32", *scale)),
    ]


def mxfp4(prefix: str, n: int, k: int) -> list[Tensor]:
    return [
        (f"{prefix}.weight_packed", "U8", (n, k // 2), _bytes(0, 256, n, k // 2)),
        (f"{prefix}.weight_scale", "U8", (n, k // 32), _bytes(112, 128, n, k // 32)),
    ]


def awq(prefix: str, n: int, k: int) -> list[Tensor]:
    groups = k // 128
    return [
        (f"{prefix}.qweight", "I32", (k, n // 8), _words(k, n // 8)),
        (f"{prefix}.qzeros", "I32", (groups, n // 8), _words(groups, n // 8)),
        (f"{prefix}.scales", "F16", (groups, n), _scales("F16", groups, n)),
    ]


def ct_int4(prefix: str, n: int, k: int) -> list[Tensor]:
    return [
        (f"{prefix}.weight_packed", "I32", (n, k // 8), _words(n, k // 8)),
        (f"{prefix}.weight_scale", "BF16", (n, k // 128), _scales("BF16", n, k // 128)),
    ]


def _compressed_tensors(**weights: object) -> dict[str, Any]:
    group_format = weights.pop("format")
    group = {"format": group_format, "targets": ["Linear"], "weights": weights, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": group_format,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


LAYERS = {"fp8_block": 12, "mxfp4": 24, "awq": 24, "ct_int4": 24}
FORMATS: dict[str, tuple[Callable[[str, int, int], list[Tensor]], dict[str, Any]]] = {
    "fp8_block": (
        fp8_block,
        {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"},
    ),
    "mxfp4": (
        mxfp4,
        _compressed_tensors(
            format="mxfp4-pack-quantized",
            type="float",
            num_bits=4,
            strategy="group",
            group_size=32,
            symmetric=True,
        ),
    ),
    "awq": (
        awq,
        {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"},
    ),
    "ct_int4": (
        ct_int4,
        _compressed_tensors(
            format="pack-quantized", type="int", num_bits=4, strategy="group", group_size=128, symmetric=True
        ),
    ),
}


def _tensors(name: str, layers: int) -> Iterator[Tensor]:
    build = FORMATS[name][0]
    for layer in range(layers):
        yield f"model.layers.{layer}.mlp.gate.weight", "BF16", (EXPERTS, HIDDEN), _scales("BF16", EXPERTS, HIDDEN)
        for expert in range(EXPERTS):
            for projection, n, k in projections():
                yield from build(f"model.layers.{layer}.mlp.experts.{expert}.{projection}", n, k)


def write_model(folder: Path, name: str, layers: int) -> Path:
    """Write a model folder of one safetensors file with random experts; the path of that file."""
    folder.mkdir(parents=True)
    header: dict[str, Any] = {}
    offset = 0
    for tensor, dtype, shape, _ in _tensors(name, layers):
        size = int(np.prod(shape)) * {"F8_E4M3": 1, "U8": 1, "F32": 4, "I32": 4, "F16": 2, "BF16": 2}[dtype]
        header[tensor] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    path = folder / "model.safetensors"
    rng = np.random.default_rng(0)
    with path.open("wb") as file:
        _write_header(file, header)
        for _, _, _, draw in _tensors(name, layers):
            file.write(np.ascontiguousarray(draw(rng)).tobytes())
    config = {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "hidden_size": HIDDEN,
        "moe_intermediate_size": INTERMEDIATE,
        "num_experts": EXPERTS,
        "num_hidden_layers": layers,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
        "quantization_config": FORMATS[name][1],
    }
    (folder / "config.json").write_text(json.dumps(config))
    return path


def _write_header(file: BinaryIO, header: dict[str, Any]) -> None:
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write(struct.pack("<Q", len(text)) + text)


@dataclass(frozen=True)
class Row:
    """One format's medians: bytes, seconds, ratios to cp (1 is as fast), peak resident bytes and their bound."""

    format: str
    layers: int
    source_bytes: int
    cp_seconds: float
    cp_sync_seconds: float
    convert_seconds: float
    ratio: float
    ratio_to_synced: float
    peak_bytes: int
    bound_bytes: int


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


def measure(name: str, layers: int, work: Path, given: argparse.Namespace) -> Row:
    """Alternate cp and humming-convert over one synthetic model, `given.runs` times each, after a warm-up of both."""
    path = write_model(work / name, name, layers)
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
    bound = 2 * size // layers + ALLOWANCE
    return Row(name, layers, size, cp, synced, convert, cp / convert, synced / convert, max(peaks), bound)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--device", default="cpu", help="cuda: against a copy of the same bytes through the GPU")
    parser.add_argument("--target", default="sm90")
    parser.add_argument("--fill-memory", action="store_true")
    parser.add_argument("--formats", default=",".join(FORMATS))
    parser.add_argument("--work", type=Path, help="folder for the files (default: a temporary one)")
    parser.add_argument("--json", type=Path, default=Path("bench-convert.json"))
    parser.add_argument("extra", nargs="*", help="further options for humming-convert, after --")
    given = parser.parse_args()
    rows = []
    print("| format | layers | GB | cp MB/s | cp+sync MB/s | convert MB/s | of cp | of cp+sync | peak MB | bound MB |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory(dir=given.work) as folder:
        for name in given.formats.split(","):
            row = measure(name, given.layers or LAYERS[name], Path(folder), given)
            rows.append(row)
            speeds = (row.source_bytes / 1e6 / t for t in (row.cp_seconds, row.cp_sync_seconds, row.convert_seconds))
            print(
                f"| {name} | {row.layers} | {row.source_bytes / 1e9:.1f} | "
                + " | ".join(f"{speed:.0f}" for speed in speeds)
                + f" | {row.ratio:.2f} | {row.ratio_to_synced:.2f} | {row.peak_bytes / 1e6:.0f} "
                f"| {row.bound_bytes / 1e6:.0f} |",
                flush=True,
            )
    machine = {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()}
    settings = {"runs": given.runs, "fill_memory": given.fill_memory, "device": given.device}
    document = {"machine": machine, **settings, "rows": [asdict(row) for row in rows]}
    given.json.write_text(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
