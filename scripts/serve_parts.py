"""The parts of `serve_check`, each run in a process of its own: `serve_parts.py PART WORK JSON [ARGUMENT ...]`."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

for name, value in {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
    "VLLM_LOGGING_LEVEL": "INFO",
}.items():
    os.environ.setdefault(name, value)
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch  # noqa: E402 - the environment comes first

from scripts import serve_alone, serve_layers, serve_memory, serve_parallel, serve_refusals  # noqa: E402
from scripts.serve_models import MODELS, write_model  # noqa: E402

Result = dict[str, Any]
PROMPT = [5, 17, 99, 1000, 7, 3]


def prepare(work: Path, *names: str) -> Result:
    """Write and convert every model, on the CPU; plus ones with an expert count that ranks do not divide."""
    from humming_convert.options import ConvertOptions
    from humming_convert.pipeline import convert_checkpoint
    from humming_convert.target import Target

    cuda = tuple(int(part) for part in (torch.version.cuda or "13.0").split(".")[:2])
    done: Result = {}
    for name in names or MODELS:
        for experts in (8, 10):
            source = write_model(work / f"{name}-e{experts}", name, experts=experts)
            out = work / f"{name}-e{experts}.out"
            options = ConvertOptions(
                source=source, out=out, target=Target(90, (cuda[0], cuda[1])), workers=4, overwrite=True
            )
            started = time.perf_counter()
            report = convert_checkpoint(options)
            done[out.name] = {"layers": report.layers, "seconds": round(time.perf_counter() - started, 2)}
    return {"ok": True, "cuda": cuda, "models": done}


def spy() -> Counter[str]:
    """Count the calls of everything that converts; to be called before vLLM builds a model."""
    import humming.ops
    import humming.schema
    import humming.transform
    import vllm.model_executor.layers.quantization.utils.humming.moe as vllm_moe
    import vllm.utils.humming as facade

    calls: Counter[str] = Counter()

    def count(holder: Any, name: str) -> None:  # noqa: ANN401 - modules and classes
        original = getattr(holder, name)

        def counted(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - passed through
            calls[name] += 1
            return original(*args, **kwargs)

        setattr(holder, name, counted)

    for name in (
        "pack_weight",
        "unpack_weight",
        "repack_weight",
        "convert_weight",
        "dequant_weight",
        "quant_weight",
        "process_mxfp4_w4a8_weight",
    ):
        if hasattr(humming.ops, name):
            count(humming.ops, name)
    count(humming.transform, "prepare_and_transform_humming_tensors")
    count(humming.transform, "transform_humming_tensors")
    facade.prepare_and_transform_humming_tensors = humming.transform.prepare_and_transform_humming_tensors
    count(vllm_moe, "convert_to_humming_moe_kernel_format")
    count(vllm_moe, "_process_single_sublayer")
    for schema in vars(humming.schema).values():
        if isinstance(schema, type) and "convert_humming" in vars(schema):
            count(schema, "convert_humming")
    return calls


def engine(model: Path, **options: Any) -> Any:  # noqa: ANN401 - vLLM's LLM
    """vLLM on `model`, small and eager."""
    from vllm import LLM

    given = {
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "attention_backend": "TRITON_ATTN",
        "max_model_len": 256,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 256,
        "gpu_memory_utilization": 0.1,
        "kv_cache_memory_bytes": 1 << 28,
    }
    return LLM(model=str(model), **(given | options))


def generate(llm: Any, tokens: int = 24) -> Result:  # noqa: ANN401 - vLLM's LLM
    """Greedy tokens and their log-probabilities."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False, logprobs=1)
    output = llm.generate([{"prompt_token_ids": PROMPT}], params)[0].outputs[0]
    per_token = [entry[token].logprob for entry, token in zip(output.logprobs, output.token_ids, strict=True)]
    return {"tokens": list(output.token_ids), "logprobs": per_token, "sum": output.cumulative_logprob}


def parameters(model: torch.nn.Module) -> dict[str, list[Any]]:
    """dtype, shape and sha256 of every parameter of every routed-experts module, aliases of one storage once."""
    from vllm.model_executor.layers.fused_moe import RoutedExperts

    found = {}
    for module in model.modules():
        if not isinstance(module, RoutedExperts):
            continue
        seen = set()
        # The shorter of two names of one storage is the one that Humming's experts use.
        for name, parameter in sorted(module.named_parameters(recurse=False), key=lambda item: len(item[0])):
            if parameter.data_ptr() in seen and parameter.numel():
                continue
            seen.add(parameter.data_ptr())
            data = parameter.detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy()
            digest = hashlib.sha256(data.tobytes()).hexdigest()
            found[f"{module.layer_name}.{name}"] = [str(parameter.dtype), list(parameter.shape), digest]
    return found


def serve(work: Path, name: str, kind: str) -> Result:
    """One model, `stock` (the source, converted by vLLM) or `ours`: parameters, tokens, calls that convert."""
    os.environ.update(MODELS[name].environment)
    calls = spy()
    source = work / f"{name}-e8"
    started = time.perf_counter()
    llm = engine(source, moe_backend="humming") if kind == "stock" else engine(Path(f"{source}.out"))
    loaded = time.perf_counter() - started
    found: list[dict[str, list[Any]]] = []
    llm.apply_model(lambda model: found.append(parameters(model)))
    methods: list[Counter[str]] = []
    llm.apply_model(lambda model: methods.append(_methods(model)))
    result: Result = {"parameters": found[0], "methods": methods[0], "load_seconds": round(loaded, 1)}
    try:
        result |= generate(llm) | {"ok": True}
    except Exception:
        result |= {"ok": False, "error": traceback.format_exc()[-3000:]}
    result["converting_calls"] = dict(calls)
    if kind == "ours":
        result["reload"] = _reload(llm)
        result["ok"] &= "a reload of weights" in result["reload"]
    return result


def _reload(llm: Any) -> str:  # noqa: ANN401 - vLLM's LLM
    """What vLLM says when asked to load weights into the running model."""
    try:
        llm.collective_rpc("reload_weights")
    except Exception as error:
        return _chain(error)
    return "not refused"


def _methods(model: torch.nn.Module) -> Counter[str]:
    return Counter(
        type(module.quant_method).__name__
        for module in model.modules()
        if getattr(module, "quant_method", None) is not None
    )


def extras(work: Path) -> Result:
    """load_format=dummy serves, and reads nothing of the experts files."""
    from humming_loader import experts

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("dummy weights were read from the experts files")

    vars(experts)["fill"] = refuse
    tokens = generate(engine(work / "qwen3-fp8-block-e8.out", load_format="dummy"), 4)["tokens"]
    return {"ok": len(tokens) == 4, "tokens": tokens}


def _chain(error: BaseException | None) -> str:
    parts = []
    while error is not None:
        parts.append(f"{type(error).__name__}: {error}")
        error = error.__cause__ or error.__context__
    return " <- ".join(parts)[:2000]


PARTS: dict[str, Callable[..., Result]] = {
    "prepare": prepare,
    "serve": serve,
    "extras": extras,
    "refusals": serve_refusals.refusals,
    **serve_parallel.PARTS,
}
# Parts of several cases: what came out so far is written after each.
CASES: dict[str, Callable[..., serve_layers.Cases]] = {
    "classes": serve_layers.classes,
    "expert-ranks": serve_layers.expert_ranks,
    "tensor-ranks": serve_layers.tensor_ranks,
    "memory": serve_memory.memory,
    "alone": serve_alone.alone,
}


def main() -> None:
    """Run one part and write its result; a traceback leaves by stderr and a non-zero status."""
    part, work, target, *arguments = sys.argv[1:]

    def save(result: Result) -> None:
        partial = Path(f"{target}.partial")
        partial.write_text(json.dumps(result, indent=1, default=str))
        partial.replace(target)

    if part in CASES:
        serve_layers.each(CASES[part](Path(work), *arguments), save)
    else:
        save(PARTS[part](Path(work), *arguments))
    # Engines hold threads that outlive them.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
