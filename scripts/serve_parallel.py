"""Ranks of vLLM on GPUs of their own: what each rank holds, what it read of the experts files, what the model says.

`read_counter` is a plugin of vLLM's in `serve_check`'s own entry points: it counts, in every worker, the bytes that the
loader reads. Everything that runs in a worker is a function of this module, sent there by `collective_rpc`.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from scripts.serve_models import MODELS, write_model

Result = dict[str, Any]

# Small enough for a test, and no multiple of the packed layout's 64 rows: a rank's part cannot be cut out of the whole.
UNCUTTABLE = 416
UNCUTTABLE_NAME = "qwen3-fp8-channel"

_read: Counter[str] = Counter()


def read_counter() -> None:
    """Count the bytes that the loader reads in this process. vLLM calls it in every worker before it loads."""
    from humming_loader.reader import ExpertsFile

    original = ExpertsFile.read_into

    def counted(self: ExpertsFile, name: str, buffer: memoryview, start: int = 0) -> None:
        _read["bytes"] += buffer.nbytes
        original(self, name, buffer, start)

    if original.__name__ != counted.__name__:
        ExpertsFile.read_into = counted  # type: ignore[method-assign]


def in_worker(worker: Any) -> Result:  # noqa: ANN401 - vLLM's worker
    """Run in every rank: its parameters (dtype, shape, sha256), its experts' part, the bytes it read."""
    import torch.distributed as dist

    from scripts.serve_parts import parameters

    rank = dist.get_rank() if dist.is_initialized() else 0
    return {"rank": rank, "parameters": parameters(worker.get_model()), "read": _read["bytes"]}


def prepare_ranks(work: Path, size: int, names: tuple[str, ...]) -> Result:
    """Write and convert the models, and the one that cannot be cut: whole, and with `--tp size`."""
    from humming_convert.options import ConvertOptions
    from humming_convert.pipeline import convert_checkpoint
    from humming_convert.target import Target

    def convert(source: Path, out: Path, tp_size: int) -> None:
        convert_checkpoint(
            ConvertOptions(source=source, out=out, target=Target(90), workers=4, overwrite=True, tp_size=tp_size)
        )

    for name in names:
        source = write_model(work / f"{name}-e8", name)
        convert(source, work / f"{name}-e8.out", 1)
    uncuttable = write_model(work / UNCUTTABLE_NAME, UNCUTTABLE_NAME, intermediate=UNCUTTABLE)
    convert(uncuttable, work / f"{UNCUTTABLE_NAME}.out", 1)
    convert(uncuttable, work / f"{UNCUTTABLE_NAME}.tp.out", size)
    return {"ok": True}


def serve_ranks(work: Path, folder: str, kind: str, size: int, is_expert_parallel: bool) -> Result:
    """One folder of `work` at `size` ranks, each on a GPU of its own: what every rank holds, tokens, log-probabilities.

    `kind` is `stock` (vLLM converts the source) or `ours`.
    """
    from scripts.serve_parts import engine, generate

    os.environ.update(next((model.environment for name, model in MODELS.items() if folder.startswith(name)), {}))
    options: Result = {"tensor_parallel_size": size, "enable_expert_parallel": is_expert_parallel}
    if size > 1:
        options["distributed_executor_backend"] = "mp"
    if kind == "stock":
        options["moe_backend"] = "humming"
    started = time.perf_counter()
    llm = engine(work / folder, **options)
    loaded = time.perf_counter() - started
    ranks = sorted(llm.collective_rpc(in_worker), key=lambda rank: int(rank["rank"]))
    return {"ranks": ranks, "load_seconds": round(loaded, 1)} | generate(llm) | {"ok": len(ranks) == size}


def refused_ranks(work: Path, folder: str, size: int) -> Result:
    """Whether vLLM stops at a folder whose packed layout cannot be cut for `size`; why stands in the part's log."""
    from scripts.serve_parts import engine

    try:
        engine(work / folder, tensor_parallel_size=size, distributed_executor_backend="mp" if size > 1 else None)
    except Exception as error:
        return {"ok": True, "raised": f"{type(error).__name__}: {error}"[:500]}
    return {"ok": False, "raised": "nothing"}


def compare_ranks(stock: Mapping[str, Any], ours: Mapping[str, Any]) -> Result:
    """Every rank's parameters beside stock's, and the tokens."""
    if "ranks" not in stock or "ranks" not in ours:
        return {"ok": False, "error": "one of the two did not run"}
    ranks = []
    for expected, found in zip(stock["ranks"], ours["ranks"], strict=True):
        held, packed = expected["parameters"], found["parameters"]
        differing = sorted(name for name in packed if packed[name] != held.get(name))
        ranks.append({"rank": found["rank"], "compared": len(packed), "differing": differing, "read": found["read"]})
    tokens = stock.get("tokens") == ours.get("tokens") and "tokens" in ours
    logprobs = stock.get("logprobs") == ours.get("logprobs")
    is_equal = tokens and all(rank["compared"] and not rank["differing"] and rank["read"] for rank in ranks)
    return {"ok": bool(is_equal), "ranks": ranks, "tokens_equal": tokens, "logprobs_equal": logprobs}


def parallel_parts(size: int, is_expert_parallel: bool, models: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    """Label and arguments of every part, in the order in which they have to run."""
    mode = "ep" if is_expert_parallel else "tp"
    common = (str(size), mode)
    parts: dict[str, tuple[str, ...]] = {"prepare": ("prepare-ranks", str(size), *models)}
    for name in models:
        parts[f"{name} stock"] = ("serve-ranks", f"{name}-e8", "stock", *common)
        parts[f"{name} ours"] = ("serve-ranks", f"{name}-e8.out", "ours", *common)
    if size > 1 and not is_expert_parallel:
        parts["refused"] = ("refused-ranks", f"{UNCUTTABLE_NAME}.out", str(size))
        parts["cut before packing"] = ("serve-ranks", f"{UNCUTTABLE_NAME}.tp.out", "ours", *common)
        parts["cut before packing, stock"] = ("serve-ranks", UNCUTTABLE_NAME, "stock", *common)
    return parts


PARTS: dict[str, Callable[..., Result]] = {
    "prepare-ranks": lambda work, size, *names: prepare_ranks(work, int(size), names),
    "serve-ranks": lambda work, folder, kind, size, mode: serve_ranks(work, folder, kind, int(size), mode == "ep"),
    "refused-ranks": lambda work, folder, size: refused_ranks(work, folder, int(size)),
}


def run_parallel(
    run: Callable[[str, tuple[str, ...]], tuple[Result, str]],
    options: Any,  # noqa: ANN401 - argparse's
) -> Result:
    """The comparisons, after every part ran through `run(name, arguments)`, one at a time, since each takes all GPUs.

    `run` gives a part's result and its log: the reason of a refusal stands in a worker's lines there, vLLM's own error
    only says that a worker ended.
    """
    models = tuple(options.models or ("qwen3-fp8-block", "gpt-oss-mxfp4", "qwen3-ct-int4"))
    size, is_expert_parallel = options.tensor_parallel_size, options.enable_expert_parallel
    parts = parallel_parts(size, is_expert_parallel, models)
    ran = {label: run(name, tuple(arguments)) for label, (name, *arguments) in parts.items()}
    found = {label: result for label, (result, _) in ran.items()}
    mode = f"{'ep' if is_expert_parallel else 'tp'}{size}"
    compared = {
        f"compare-{mode}-{name}": compare_ranks(found[f"{name} stock"], found[f"{name} ours"]) for name in models
    }
    if "refused" in found:
        said = [line for line in ran["refused"][1].splitlines() if "ParallelismError" in line]
        is_named = any(f"--tp {size}" in line for line in said)
        compared[f"refused-{mode}"] = {"ok": found["refused"]["ok"] and is_named, "said": said[-1:]}
        compared[f"compare-{mode}-cut"] = compare_ranks(
            found["cut before packing, stock"], found["cut before packing"]
        )
    return compared
