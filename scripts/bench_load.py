"""On a GPU host: how fast packed experts reach the GPU, against what the same run reaches in other ways.

    python scripts/bench_load.py [--layers 12] [--runs 5] [--work DIR] [--json FILE]

Writes synthetic Qwen3-30B layers in block FP8 (128 experts, w13 1536 x 2048, w2 2048 x 768; 12 layers are 7.3 GB),
converts them, and loads all layers warm (page cache) and cold (pages dropped): `humming_loader.load_layer`, plain
safetensors, safetensors in six threads, a pinned copy (the limit of the link), and the way without this project: one
tensor per expert and projection, copied into fused parameters, then converted by Humming on the GPU. Prints medians,
GB/s of what arrives, ratios to the per-expert way and to `dd`, peak pinned memory, and the bytes that a rank reads.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file

from humming_convert.kernel_format import convert_to_humming_moe_kernel_format
from humming_convert.options import ConvertOptions, default_workers
from humming_convert.pipeline import convert_checkpoint
from humming_convert.target import Target
from humming_loader import load_layer, read_manifest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.bench_models import SHAPES, write_model

SHAPE = SHAPES["qwen3-30b"]
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}


@dataclass(frozen=True)
class Row:
    """One way of loading: median seconds for `nbytes`, and whether the page cache was warm."""

    way: str
    warm: bool
    nbytes: int
    seconds: float

    @property
    def speed(self) -> float:
        """GB/s."""
        return self.nbytes / self.seconds / 1e9


def drop_pages(files: Sequence[Path]) -> None:
    """Let the page cache forget `files`, which are flushed."""
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def read_pages(files: Sequence[Path]) -> None:
    """Bring `files` into the page cache."""
    block = bytearray(16 << 20)
    for path in files:
        with path.open("rb", buffering=0) as file:
            while file.readinto(block):
                pass


def timed(
    way: str, nbytes: int, files: Sequence[Path], work: Callable[[], object], runs: int, *, warm: bool = True
) -> Row:
    """Median of `runs` runs after one that does not count; the GPU is done before the clock stops."""
    seconds = []
    for _ in range(runs + 1):
        (read_pages if warm else drop_pages)(files)
        torch.cuda.synchronize()
        start = time.perf_counter()
        kept = work()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
        del kept
    return Row(way, warm, nbytes, statistics.median(seconds[1:]))


def with_safetensors(files: Sequence[Path], threads: int) -> object:
    """Every tensor of `files`, plainly."""
    if threads == 1:
        return [load_file(file, device="cuda") for file in files]

    def load(job: tuple[Path, str]) -> torch.Tensor:
        with safe_open(job[0], framework="pt", device="cuda") as opened:
            tensor: torch.Tensor = opened.get_tensor(job[1])
            return tensor

    jobs = []
    for file in files:
        with safe_open(file, framework="pt") as opened:
            jobs += [(file, name) for name in opened.keys()]  # noqa: SIM118 - no mapping
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(load, jobs))


def per_expert(source: Path, layers: int, sm: int) -> object:
    """What a start does without this project: a tensor per expert and projection, fused, then converted on the GPU."""
    converted = []
    shapes = {"w13": (2 * SHAPE.intermediate, SHAPE.hidden), "w2": (SHAPE.hidden, SHAPE.intermediate)}
    with safe_open(source, framework="pt") as opened:
        for layer in range(layers):
            weights = {
                key: torch.empty((SHAPE.experts, n, k), dtype=torch.float8_e4m3fn, device="cuda")
                for key, (n, k) in shapes.items()
            }
            scales = {
                key: torch.empty((SHAPE.experts, n // 128, k // 128), device="cuda") for key, (n, k) in shapes.items()
            }
            for expert in range(SHAPE.experts):
                for projection, key, half in (("gate_proj", "w13", 0), ("up_proj", "w13", 1), ("down_proj", "w2", 0)):
                    name = f"model.layers.{layer}.mlp.experts.{expert}.{projection}.weight"
                    for target, tensor in ((weights, name), (scales, f"{name}_scale_inv")):
                        loaded = opened.get_tensor(tensor)
                        rows = slice(half * loaded.shape[0], (half + 1) * loaded.shape[0])
                        target[key][expert, rows].copy_(loaded)
            for key, (n, k) in shapes.items():
                converted.append(
                    convert_to_humming_moe_kernel_format(
                        {"weight": weights.pop(key), "weight_scale_inv": scales.pop(key)},
                        FP8,
                        None,
                        shape_n=n,
                        shape_k=k,
                        shape_n_stacks=[n // 2, n // 2] if key == "w13" else [n],
                        num_experts=SHAPE.experts,
                        has_bias=False,
                        param_dtype="bfloat16",
                        target=Target(sm),
                    ).tensors
                )
    return converted


def pinned_limit(nbytes: int, runs: int) -> Row:
    """The link: one large pinned buffer, copied as often as needed."""
    buffer = torch.empty(256 << 20, dtype=torch.uint8, pin_memory=True)
    target = torch.empty_like(buffer, device="cuda")

    def copy() -> None:
        for _ in range(nbytes // buffer.numel()):
            target.copy_(buffer, non_blocking=True)

    return timed("pinned copy (the link)", nbytes // buffer.numel() * buffer.numel(), [], copy, runs)


def with_dd(files: Sequence[Path]) -> None:
    """Every file through `dd` with 8 MB blocks, past nothing: as the disk gives them."""
    for file in files:
        subprocess.run(["dd", f"if={file}", "of=/dev/null", "bs=8M"], check=True, capture_output=True)


def read_by(work: Callable[[], object]) -> int:
    """Bytes that this process asks files for while `work` runs."""

    def asked() -> int:
        return int(Path("/proc/self/io").read_text().split("rchar: ")[1].split()[0])

    before = asked()
    work()
    return asked() - before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--work", type=Path)
    parser.add_argument("--json", type=Path, default=Path("bench-load.json"))
    given = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("no CUDA device: this benchmark is about one")
    major, minor = torch.cuda.get_device_capability()
    sm = major * 10 + minor
    with tempfile.TemporaryDirectory(dir=given.work) as folder:
        source = write_model(Path(folder) / "source", "fp8_block", SHAPE, given.layers)
        out = Path(folder) / "out"
        options = ConvertOptions(
            source=source.parent,
            out=out,
            target=Target(sm),
            activation="a16",
            device="cpu",
            workers=default_workers(),
            hash_source=False,
        )
        print(convert_checkpoint(options))
        files = sorted((out / "humming").glob("experts-*.safetensors"))
        names = list(read_manifest(out).layers)
        nbytes = sum(file.stat().st_size for file in files)

        def ours() -> object:
            return [load_layer(out, name, "cuda") for name in names]

        rows = [
            timed("load_layer", nbytes, files, ours, given.runs),
            timed("safetensors", nbytes, files, lambda: with_safetensors(files, 1), given.runs),
            timed("safetensors, 6 threads", nbytes, files, lambda: with_safetensors(files, 6), given.runs),
            pinned_limit(nbytes, given.runs),
            timed("per expert, then convert", nbytes, [source], lambda: per_expert(source, given.layers, sm), 2),
            timed("load_layer", nbytes, files, ours, given.runs, warm=False),
            timed("dd", nbytes, files, lambda: with_dd(files), given.runs, warm=False),
        ]
        ranks = {
            "all": read_by(lambda: load_layer(out, names[0], "cuda")),
            "tp rank 1 of 2": read_by(lambda: load_layer(out, names[0], "cuda", tp_rank=1, tp_size=2)),
            "ep, 32 of 128 experts": read_by(lambda: load_layer(out, names[0], "cuda", expert_ids=range(32, 64))),
        }
    report(rows, ranks, given.json)


def report(rows: Sequence[Row], ranks: dict[str, int], path: Path) -> None:
    """The table on standard output and everything in `path`."""
    pinned = int(torch.cuda.host_memory_stats().get("allocated_bytes.peak", 0))
    speeds = {(row.way, row.warm): row.speed for row in rows}
    print("| way | page cache | GB/s | of per-expert | of dd |\n|---|---|---|---|---|")
    for row in rows:
        base = "-" if not row.warm else f"{row.speed / speeds['per expert, then convert', True]:.1f}"
        disk = "-" if row.warm else f"{row.speed / speeds['dd', False]:.2f}"
        print(f"| {row.way} | {'warm' if row.warm else 'cold'} | {row.speed:.1f} | {base} | {disk} |")
    print(f"peak pinned memory {pinned / 2**20:.0f} MiB; bytes read for one layer: {ranks}")
    device = {"gpu": torch.cuda.get_device_name(), "cores": os.cpu_count(), "torch": torch.__version__}
    document = {"machine": device, "pinned_peak": pinned, "rank_bytes": ranks, "rows": [asdict(row) for row in rows]}
    path.write_text(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
