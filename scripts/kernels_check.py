"""Show on a GPU what kernels that came with a checkpoint save at start-up, and that they are the bytes compiled there.

    python scripts/kernels_check.py prepare FILE      # anywhere, without a GPU: kernels of the tiny models, 1 MB packed
    python scripts/kernels_check.py run FILE --out DIR    # on the GPU host, with vLLM and humming importable

`run` serves each model in processes of their own: once to fill every other cache (Triton's, the page cache), then cold
(Humming's cache empty) without and with shipped kernels, and warm. It counts Humming's compiler processes while the
model is loaded and while it generates at batch 1 and 64. Then every kernel that Humming compiled there is compared with
the shipped one, by bytes and, where those differ, by instructions. A table goes to stdout, `kernels.json` to DIR.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "loader"), str(ROOT / "converter")]

MODELS = ("qwen3-fp8-block", "gpt-oss-mxfp4")
BATCHES = (1, 64)
TOKENS = 16
GOAL = 1.10  # of the warm start
LIMIT = 240
Result = dict[str, Any]


def convert(work: Path, name: str) -> Path:
    """A tiny model, the same everywhere, written and converted on the CPU; its output folder."""
    from humming_convert.options import ConvertOptions
    from humming_convert.pipeline import convert_checkpoint
    from humming_convert.target import Target
    from scripts.serve_models import write_model

    out = work / f"{name}.out"
    source = write_model(work / name, name)
    convert_checkpoint(ConvertOptions(source=source, out=out, target=Target(90), workers=4, overwrite=True))
    return out


def compile_for(out: Path) -> str:
    """Compile the kernels of `out` as `humming-convert kernels` does; what it says."""
    from humming_convert.kernels import KernelOptions, build_kernels
    from humming_convert.options import default_workers

    options = KernelOptions(device_name="NVIDIA H200", gemm_types=("indexed",), workers=default_workers())
    return build_kernels(out, options).text()


def prepare(packed: Path) -> None:
    """Write `packed`: the kernels of every model."""
    packed.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, tarfile.open(packed, "w:xz") as archive:
        for name in MODELS:
            out = convert(Path(folder), name)
            print(compile_for(out), flush=True)
            archive.add(out / "humming/kernels", name)
    print(f"{packed}: {packed.stat().st_size / 1e6:.2f} MB")


def serve(folder: Path, target: Path) -> None:
    """In a process of its own: load `folder`, generate, and write seconds and compilations to `target`."""
    started = time.perf_counter()
    import humming.jit.compiler as jit

    from scripts.serve_parts import PROMPT, engine

    count = 0

    def counted(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - passed through
        nonlocal count
        count += 1
        return subprocess.run(*args, **kwargs)

    names = {name: getattr(subprocess, name) for name in ("PIPE", "DEVNULL", "STDOUT")}
    jit.subprocess = SimpleNamespace(run=counted, **names)
    result: Result = {"imported": time.perf_counter() - started}

    def phase(name: str, since: float, before: int) -> None:
        result[name] = {"seconds": time.perf_counter() - since, "compilations": count - before}

    since, before = time.perf_counter(), count
    llm = engine(folder, max_num_seqs=max(BATCHES))
    phase("load", since, before)
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
    for batch in BATCHES:
        prompts = [{"prompt_token_ids": [*PROMPT, 10 + row]} for row in range(batch)]
        since, before = time.perf_counter(), count
        outputs = llm.generate(prompts, params, use_tqdm=False)
        phase(f"batch {batch}", since, before)
        tokens = [list(output.outputs[0].token_ids) for output in outputs]
        result[f"tokens {batch}"] = hashlib.sha256(json.dumps(tokens).encode()).hexdigest()
    from humming_loader import kernels

    offer = kernels.offer(folder)
    result |= {"used": len(offer.used) if offer else 0, "summary": offer.summary() if offer else "none shipped"}
    target.write_text(json.dumps(result))
    sys.stdout.flush()
    os._exit(0)  # engines hold threads that outlive them


class Check:
    """One run of everything on the GPU host, in `work`."""

    def __init__(self, work: Path, out: Path) -> None:
        from scripts.serve_check import _metadata

        self.work, self.out = work, out
        paths = [str(_metadata(work)), str(ROOT / "loader"), str(ROOT / "converter"), os.environ.get("PYTHONPATH", "")]
        self.environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
        self.results: Result = {"runs": {}, "bytes": {}, "toolchain": {}}

    def process(self, label: str, arguments: list[str], **environment: str) -> Result:
        """This script with `arguments` in a process of its own; its JSON, and its wall seconds."""
        target, log = self.work / f"{label}.json", self.out / f"{label}.log"
        target.unlink(missing_ok=True)
        started = time.perf_counter()
        command = [sys.executable, __file__, *arguments, str(target)]
        with log.open("wb") as output:
            try:
                status = subprocess.run(
                    command, stdout=output, stderr=subprocess.STDOUT, env=self.environment | environment, timeout=LIMIT
                ).returncode
            except subprocess.TimeoutExpired:
                status = -1
        seconds = round(time.perf_counter() - started, 2)
        if not target.is_file():
            return {"error": f"exit status {status}", "log": log.read_text(errors="replace")[-3000:], "wall": seconds}
        found: Result = json.loads(target.read_text())
        return found | {"wall": seconds}

    def model(self, name: str, packed: Path) -> None:
        """All runs of one model."""
        bare = convert(self.work, name)
        shipped = self.work / f"{name}.shipped"
        shutil.rmtree(shipped, ignore_errors=True)
        shutil.copytree(bare, shipped)
        with tarfile.open(packed) as archive:
            archive.extractall(self.work / "carried", filter="data")
        shutil.copytree(self.work / "carried" / name, shipped / "humming/kernels")
        runs = self.results["runs"].setdefault(name, {})

        def run(kind: str, folder: Path, cache: str) -> Result:
            place = self.work / f"cache-{name}-{cache}"
            found = self.process(
                f"{name}-{kind}".replace(" ", "-"), ["serve", str(folder)], HUMMING_CACHE_DIR=str(place)
            )
            runs[kind] = found
            print(f"{name} {kind}: {json.dumps(found)[:400]}", flush=True)
            self.save()
            return found

        run("first of all", bare, "full")
        run("cold, nothing shipped", bare, "empty-1")
        with_shipped = run("cold, shipped", shipped, "empty-2")
        if not with_shipped.get("used"):
            # Another compiler or other headers than where they were made: what they save is shown all the same.
            shutil.rmtree(shipped / "humming/kernels")
            hidden = self.process(f"{name}-compile", ["compile", str(shipped)], CUDA_VISIBLE_DEVICES="")
            runs["compiled there without the GPU"] = hidden
            run("cold, shipped from there", shipped, "empty-3")
        run("warm", bare, "full")
        run("cold, shipped, again", shipped, "empty-4")
        run("warm, again", bare, "full")
        self.results["bytes"][name] = compare(self.work / f"cache-{name}-full", self.work / "carried" / name)
        self.save()

    def save(self) -> None:
        """`kernels.json`, whole whenever it is read."""
        partial = self.out / "kernels.json.partial"
        partial.write_text(json.dumps(self.results, indent=1, default=str))
        partial.replace(self.out / "kernels.json")


def compare(cache: Path, shipped: Path) -> Result:
    """The kernels that Humming compiled into `cache` beside the shipped ones of the same text."""
    manifest = json.loads((shipped / "manifest.json").read_text())
    by_text = {(one["identity"]["source"], one["identity"]["expression"]): one for one in manifest["kernels"]}
    result: Result = {"compiled": 0, "equal": 0, "not shipped": [], "other bytes": {}}
    for path in sorted(cache.glob("*/kernel.cubin")):
        command = json.loads((path.parent / "cmdline.json").read_text())
        expression = command[command.index("--name-expression") + 1]
        digest = hashlib.sha256((path.parent / "kernel.cu").read_bytes()).hexdigest()
        result["compiled"] += 1
        entry = by_text.pop((digest, expression), None)
        if entry is None:
            result["not shipped"].append(expression[:200])
        elif (shipped / Path(entry["file"]["name"]).name).read_bytes() == path.read_bytes():
            result["equal"] += 1
        else:
            ours = shipped / Path(entry["file"]["name"]).name
            result["other bytes"][expression[:200]] = {"same instructions": sass(ours) == sass(path)}
    result["never asked for"] = [one["identity"]["expression"][:200] for one in by_text.values()]
    return result


def sass(cubin: Path) -> str:
    """The instructions of a cubin, without the names of files."""
    tool = shutil.which("cuobjdump") or "/usr/local/cuda/bin/cuobjdump"
    text = subprocess.run([tool, "-sass", str(cubin)], capture_output=True, text=True, check=True).stdout
    return re.sub(r"(?m)^(Fatbin|=+|compressed|host|compile_size|identifier).*$", "", text)


def facts(target: Path) -> None:
    """In a process of its own: what Humming says of this GPU and its compiler."""
    from humming_convert.device_facts import KNOWN, facts_of_this_gpu

    found = facts_of_this_gpu()
    known = KNOWN.get(str(found["name"]), {})
    from humming_loader.toolchain import Toolchain

    toolchain = Toolchain()
    tops = ("humming", "humming_ws", "process_input")
    includes = {top: toolchain.headers.digest(f"#include <humming/kernel/{top}.cuh>") for top in tops}
    differing = {key: [known.get(key), value] for key, value in found.items() if known.get(key) != value}
    document = {"facts": found, "differs from what is known": differing}
    target.write_text(json.dumps(document | {"compiler": toolchain.name, "headers": includes}, default=str))


def table(results: Result) -> str:
    """One line a run, the goals, and the comparison of bytes."""
    lines = [f"{'model':<16} {'run':<28} {'load s':>7} {'b1 s':>6} {'b64 s':>6} {'wall s':>7}  compilations  used"]
    for name, runs in results["runs"].items():
        for kind, run in runs.items():
            if "load" not in run:
                lines.append(f"{name:<16} {kind:<28} {json.dumps(run, default=str)[:1500]}")
                continue
            phases = [run["load"], *(run[f"batch {batch}"] for batch in BATCHES)]
            seconds = [phase["seconds"] for phase in phases]
            counts = "/".join(str(phase["compilations"]) for phase in phases)
            lines.append(
                f"{name:<16} {kind:<28} {seconds[0]:>7.2f} {seconds[1]:>6.2f} {seconds[2]:>6.2f} {run['wall']:>7.2f}  "
                f"{counts:<12}  {run['used']}"
            )
        for kind in ("cold, shipped", "cold, shipped from there", "cold, shipped, again"):
            lines += _goal(name, runs.get(kind, {}), kind, [runs.get("warm", {}), runs.get("warm, again", {})])
    lines += [f"{name}: bytes {json.dumps(found, default=str)[:1500]}" for name, found in results["bytes"].items()]
    lines.append(f"host: {json.dumps(results['toolchain'], default=str)[:3000]}")
    return "\n".join(lines)


def _goal(name: str, run: Result, kind: str, warm: list[Result]) -> list[str]:
    def seconds(one: Result) -> float:
        return float(one["load"]["seconds"]) + sum(float(one[f"batch {batch}"]["seconds"]) for batch in BATCHES)

    warm = [one for one in warm if "load" in one]
    if "load" not in run or not warm:
        return []
    ratio = seconds(run) / (sum(map(seconds, warm)) / len(warm))
    count = sum(int(run[key]["compilations"]) for key in ("load", *(f"batch {batch}" for batch in BATCHES)))
    same = all(run[f"tokens {batch}"] == warm[0][f"tokens {batch}"] for batch in BATCHES)
    verdict = "ok  " if ratio <= GOAL and count == 0 and same else "FAIL"
    return [f"{verdict} {name}, {kind}: {ratio:.3f} of the warm start, {count} compilations, tokens equal: {same}"]


def main() -> None:
    """Run one command; the last three are its own processes."""
    command, *arguments = sys.argv[1:]
    if command == "prepare":
        prepare(Path(arguments[0]))
    elif command == "serve":
        serve(Path(arguments[0]), Path(arguments[1]))
    elif command == "facts":
        facts(Path(arguments[0]))
    elif command == "compile":
        Path(arguments[1]).write_text(json.dumps({"said": compile_for(Path(arguments[0]))}))
    else:
        parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
        parser.add_argument("command", choices=["run"])
        parser.add_argument("packed", type=Path)
        parser.add_argument("--out", type=Path, required=True)
        parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "kernels-check")
        parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
        options = parser.parse_args()
        for folder in (options.out, options.work):
            folder.mkdir(parents=True, exist_ok=True)
        check = Check(options.work.resolve(), options.out.resolve())
        check.results["toolchain"] = check.process("facts", ["facts"])
        for name in options.models:
            check.model(name, options.packed)
        print(table(check.results))


if __name__ == "__main__":
    main()
