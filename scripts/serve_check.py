"""Show on a GPU, with real vLLM, that converted checkpoints serve as their sources do: `serve_check.py --out DIR`.

`--tensor-parallel-size N` and `--enable-expert-parallel` serve a few of them on N GPUs instead, source and output, and
compare what every rank holds (with N = 1 on one GPU: the same parts, no cut).

Every part runs in a process of its own with a time limit, so one that fails stops no other. A table goes to stdout;
DIR gets `results.json` (facts and tracebacks) and `logs.tar.gz`. vLLM and humming must be importable.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
import tomllib
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "loader")]

from scripts.serve_models import MODELS  # noqa: E402 - the path comes first
from scripts.serve_parallel import run_parallel  # noqa: E402

GEMM_TYPES = ("indexed", "grouped", "grouped_masked")
RANK_PARTS = ("expert-ranks", "tensor-ranks")
SINGLE_PARTS = ("alone", "refusals", "extras")
GROUPS = ("models", "classes", *RANK_PARTS, *SINGLE_PARTS, "memory")
BASE_MODELS = ("qwen3-fp8-block", "qwen3-nvfp4", "mixtral-awq")  # what the parts without a list of models use
MODELS_A_PROCESS = 2
LOG_TAIL = 4000
# What Humming's experts read; anything else that stock leaves on a layer is listed, not compared.
TENSORS = ("_weight", "_weight_scale", "_zero_point", "_weight_scale_2", "_bias", "_input_scale", "_input_scale_2")


@dataclass(frozen=True, slots=True)
class Part:
    """One process: a part of serve_parts and its arguments."""

    name: str
    arguments: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """Unique, and fit for a file's name."""
        return "-".join((self.name, *self.arguments))


class Runner:
    """Runs parts in subprocesses below `work`; keeps results by label, and in `out` after every part."""

    def __init__(self, work: Path, out: Path, limit: float, deadline: float) -> None:
        self.work, self.out, self.limit, self.deadline = work, out, limit, deadline
        self._lock = threading.Lock()
        self.results: dict[str, dict[str, Any]] = {}
        self.logs = work / "logs"
        self.logs.mkdir(parents=True, exist_ok=True)
        self.environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(
                [
                    str(_metadata(work)),
                    *(str(ROOT / part) for part in ("", "loader", "converter")),
                    os.environ.get("PYTHONPATH", ""),
                ]
            ),
        }

    def chain(self, parts: Iterable[Part]) -> None:
        """Run parts one after another."""
        for part in parts:
            self.run(part)

    def run(self, part: Part) -> dict[str, Any]:
        """Run one part; its result, or what became of it."""
        target, log = self.work / f"{part.label}.json", self.logs / f"{part.label}.log"
        target.unlink(missing_ok=True)
        left = min(self.limit, self.deadline - time.monotonic())
        started = time.monotonic()
        result: dict[str, Any] = {"ok": False}
        if left < 5:
            result["error"] = "not run: no time left"
        else:
            command = [sys.executable, str(ROOT / "scripts/serve_parts.py"), part.name, str(self.work), str(target)]
            status = self._call([*command, *part.arguments], log, left)
            if target.is_file():
                result = json.loads(target.read_text())
            if not target.is_file() or status != "exit status 0":
                result |= {"ok": False, "error": status, "log": log.read_text(errors="replace")[-LOG_TAIL:]}
        result["wall_seconds"] = round(time.monotonic() - started, 1)
        with self._lock:
            self.results[part.label] = result
            write(self.out, self.results)
        print(f"{'ok  ' if result['ok'] else 'FAIL'} {result['wall_seconds']:6.1f} s  {part.label}", flush=True)
        return result

    def run_with_log(self, name: str, arguments: tuple[str, ...]) -> tuple[dict[str, Any], str]:
        """Run one part; its result and what it printed."""
        part = Part(name, arguments)
        return self.run(part), (self.logs / f"{part.label}.log").read_text(errors="replace")

    def _call(self, command: list[str], log: Path, limit: float) -> str:
        with log.open("wb") as output:
            process = subprocess.Popen(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self.environment,
                start_new_session=True,
                cwd=self.work,
            )
            try:
                return f"exit status {process.wait(limit)}"
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, 9)
                process.wait()
                return f"killed after {limit:.0f} s"


def _metadata(work: Path) -> Path:
    """A folder that makes this checkout's entry points known without installing it."""
    from humming_loader._version import __version__

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    folder = work / "metadata" / f"humming_convert-{__version__}.dist-info"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: humming-convert\nVersion: {__version__}\n")
    lines = []
    for group, entries in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {target}" for name, target in entries.items())]
        if group == "vllm.general_plugins":
            lines.append("humming_read_counter = scripts.serve_parallel:read_counter")
    (folder / "entry_points.txt").write_text("\n".join(lines) + "\n")
    return folder.parent


def compare(stock: Mapping[str, Any], ours: Mapping[str, Any]) -> dict[str, Any]:
    """Whether OUT left the same parameters and gave the same tokens and log-probabilities, and converted nothing."""
    missing = {"error": "one of the two did not run"}
    if "parameters" not in stock or "parameters" not in ours:
        return {"ok": False} | missing
    expected, found = stock["parameters"], ours["parameters"]
    leftover = {name for name in expected if name not in found and not name.endswith(TENSORS)}
    expected = {name: value for name, value in expected.items() if name not in leftover}
    differing = {
        name: [expected.get(name), found.get(name)]
        for name in expected | found
        if expected.get(name) != found.get(name)
    }
    result: dict[str, Any] = {"compared": len(expected), "differing": differing, "only_stock": sorted(leftover)}
    result["tokens_equal"] = stock.get("tokens") == ours.get("tokens") and "tokens" in ours
    result["logprobs_equal"] = stock.get("logprobs") == ours.get("logprobs") and "logprobs" in ours
    result["largest_logprob_difference"] = max(
        (abs(a - b) for a, b in zip(stock.get("logprobs", []), ours.get("logprobs", []), strict=False)), default=None
    )
    result["stock_converting_calls"] = sum(stock.get("converting_calls", {}).values())
    result["our_converting_calls"] = ours.get("converting_calls")
    result["load_seconds"] = [stock.get("load_seconds"), ours.get("load_seconds")]
    # The counts of the stock run show that what is counted would have been seen.
    nothing_converted = result["stock_converting_calls"] > 0 and ours.get("converting_calls") == {}
    is_equal = bool(expected) and not differing and result["tokens_equal"] and result["logprobs_equal"]
    result["ok"] = bool(is_equal and nothing_converted)
    return result


def run_all(options: argparse.Namespace) -> dict[str, Any]:
    """Run the parts asked for; results by label, comparisons of models under `compare-NAME`."""
    options.work.mkdir(parents=True, exist_ok=True)
    runner = Runner(options.work.resolve(), options.out, options.limit, time.monotonic() + options.deadline)
    if options.tensor_parallel_size:
        return runner.results | run_parallel(runner.run_with_log, options)
    models = tuple(options.models or MODELS)
    served = models if options.serve_models is None else tuple(options.serve_models)
    if not options.no_prepare:
        runner.run(Part("prepare", tuple(dict.fromkeys((*models, *served, *BASE_MODELS)))))
    chains: list[list[Part]] = []
    if "models" in options.parts:
        chains += [[Part("serve", (name, "stock")), Part("serve", (name, "ours"))] for name in served]
    if "classes" in options.parts:
        chains += [[Part("classes", (gemm_type, *models))] for gemm_type in GEMM_TYPES]
    some = [models[first : first + MODELS_A_PROCESS] for first in range(0, len(models), MODELS_A_PROCESS)]
    chains += [[Part(name, names)] for name in RANK_PARTS if name in options.parts for names in some]
    chains += [[Part(name)] for name in SINGLE_PARTS if name in options.parts]
    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(runner.chain, chains))
    if "memory" in options.parts:
        runner.run(Part("memory"))  # alone on the machine: it measures time too
    if "models" in options.parts:
        for name in served:
            pair = (runner.results.get(f"serve-{name}-{kind}", {}) for kind in ("stock", "ours"))
            runner.results[f"compare-{name}"] = compare(*pair)
    return runner.results


def table(results: Mapping[str, dict[str, Any]]) -> str:
    """One line a result, and one a case inside it."""
    lines = []
    for label, result in sorted(results.items()):
        facts = {
            key: value
            for key, value in result.items()
            if key not in ("ok", "cases", "parameters", "tokens", "logprobs", "log", "methods", "converting_calls")
        }
        lines.append(f"{'ok  ' if result['ok'] else 'FAIL'} {label}: {json.dumps(facts, default=str)[:600]}")
        if result["ok"] is False and "log" in result:
            lines.append("     " + result["log"][-1500:].replace("\n", "\n     "))
        for name, case in result.get("cases", {}).items():
            text = case.get("traceback", "")[-500:] or json.dumps({k: v for k, v in case.items() if k != "ok"})[:300]
            lines.append(f"  {'ok  ' if case['ok'] else 'FAIL'} {name}: {text}")
    return "\n".join(lines)


def write(out: Path, results: Mapping[str, dict[str, Any]]) -> None:
    """`results.json` and `table.txt`, whole whenever they are read."""
    for name, text in (("results.json", json.dumps(results, indent=1, default=str)), ("table.txt", table(results))):
        partial = out / f"{name}.partial"
        partial.write_text(text + "\n")
        partial.replace(out / name)


def main() -> None:
    """Run, print the table, write the files; status 1 when anything failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    work = Path(tempfile.gettempdir()) / "serve-check"
    parser.add_argument("--work", type=Path, default=work, help="models and outputs; several GB")
    parser.add_argument("--parts", nargs="*", choices=GROUPS, default=list(GROUPS))
    parser.add_argument("--models", nargs="*", choices=list(MODELS), default=None)
    parser.add_argument("--serve-models", nargs="*", choices=list(MODELS), default=None, help="of `models` only")
    parser.add_argument("--tensor-parallel-size", type=int, default=0, metavar="N", help="serve on N GPUs")
    parser.add_argument("--enable-expert-parallel", action="store_true", help="with it: experts, not their columns")
    parser.add_argument("--jobs", type=int, default=4, help="processes on the GPU at once")
    parser.add_argument("--limit", type=float, default=300, help="seconds a part may take")
    parser.add_argument("--deadline", type=float, default=540, help="seconds for everything")
    parser.add_argument("--no-prepare", action="store_true", help="the models are in --work already")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    results = run_all(options)
    write(options.out, results)
    with tarfile.open(options.out / "logs.tar.gz", "w:gz") as archive:
        archive.add(options.work / "logs", "logs")
    print(table(results))
    sys.exit(0 if all(result["ok"] for result in results.values()) else 1)


if __name__ == "__main__":
    main()
