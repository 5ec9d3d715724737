"""GPU memory and time of loading one layer of a large model, packed and by vLLM's own conversion."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tests.support.vllm_layers import routed_experts

from humming_loader.checkpoint import read_manifest
from humming_loader.dtypes import tensor_nbytes
from humming_loader.entries import SublayerEntry, TensorEntry
from humming_loader.manifest import layer_metadata, to_json
from scripts.serve_layers import Cases, Result, build, quant_config, sizes, vllm_context


def memory(work: Path) -> Cases:
    """Extra GPU memory and time of loading one layer of Qwen3-30B's and of DeepSeek-V3's size; stock beside it."""
    shapes = {"Qwen3-30B": (128, 2048, 768), "DeepSeek-V3": (256, 7168, 2048)}
    cases: Cases = {}
    for name, (experts, hidden, size) in shapes.items():
        cases[f"{name} ours"] = partial(_memory_ours, work, name, experts, hidden, size)
        cases[f"{name} stock"] = partial(_memory_stock, work, experts, hidden, size)
    return cases


def _measured(prepare: Callable[[], Any], process: Callable[[Any], None]) -> tuple[Any, int, float]:
    layer = prepare()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    started = time.perf_counter()
    process(layer)
    torch.cuda.synchronize()
    return layer, torch.cuda.max_memory_allocated() - before, time.perf_counter() - started


def _process(layer: Any) -> None:  # noqa: ANN401 - vLLM's RoutedExperts
    with vllm_context():
        layer.quant_method.process_weights_after_loading(layer)


def _layer_bytes(layer: Any) -> int:  # noqa: ANN401 - vLLM's RoutedExperts
    return sum(p.numel() * p.element_size() for p in layer.parameters(recurse=False))


def _memory_ours(work: Path, name: str, experts: int, hidden: int, size: int) -> Result:
    folder = _big_output(work, name, experts, hidden, size)
    layer, extra, seconds = _measured(lambda: build(folder, process=False), _process)
    nbytes = _layer_bytes(layer)
    del layer
    again = _measured(lambda: build(folder, process=False), _process)[2]
    return {
        "ok": extra <= 0.05 * nbytes,
        "layer_bytes": nbytes,
        "extra_bytes": extra,
        "extra_ratio": extra / nbytes,
        "seconds": [seconds, again],
        "GB/s": nbytes / min(seconds, again) / 1e9,
    }


def _one_process() -> None:
    """vLLM's process groups for a world of one: its own methods ask for the tensor-parallel size."""
    from vllm.distributed import parallel_state

    if parallel_state.model_parallel_is_initialized():
        return
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    with tempfile.NamedTemporaryFile(prefix="serve-memory-") as rendezvous, vllm_context():
        parallel_state.init_distributed_environment(1, 0, f"file://{rendezvous.name}", 0, backend)
        parallel_state.ensure_model_parallel_initialized(1, 1)


def _memory_stock(work: Path, experts: int, hidden: int, size: int) -> Result:
    source = work / "qwen3-fp8-block-e8"
    manifest = read_manifest(Path(f"{source}.out"))
    name, entry = next(iter(manifest.layers.items()))
    options = sizes(name, entry, manifest) | {
        "experts": experts,
        "hidden": hidden,
        "intermediate": size,
        "moe_backend": "humming",
    }

    def prepare() -> Any:  # noqa: ANN401 - vLLM's RoutedExperts
        with vllm_context():
            layer = routed_experts(quant_config(source), **options)
        for parameter in layer.parameters(recurse=False):
            parameter.data.view(torch.uint8).fill_(0x30)
        return layer

    _one_process()
    layer, extra, seconds = _measured(prepare, _process)
    nbytes = _layer_bytes(layer)
    del layer
    again = _measured(prepare, _process)[2]
    return {
        "ok": True,
        "layer_bytes": nbytes,
        "extra_bytes": extra,
        "extra_ratio": extra / nbytes,
        "seconds": [seconds, again],
    }


def _big_output(work: Path, name: str, experts: int, hidden: int, size: int) -> Path:
    """A converted checkpoint of one layer of the given size, its payload a hole of zeros: only sizes matter here."""
    small = work / "qwen3-fp8-block-e8.out"
    folder = work / f"{name}.out"
    (folder / "humming").mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_bytes((small / "config.json").read_bytes())
    manifest = read_manifest(small)
    layer_name, entry = next(iter(manifest.layers.items()))
    shapes = {"w13": (2 * size, hidden), "w2": (hidden, size)}
    sublayers = {key: _big_sublayer(entry.sublayers[key], experts, *shape) for key, shape in shapes.items()}
    big = replace(entry, num_experts=experts, hidden_size=hidden, intermediate_size=size, sublayers=sublayers)
    tensors = [tensor for sublayer in sublayers.values() for tensor in sublayer.tensors.values()]
    header: dict[str, Any] = {"__metadata__": layer_metadata({layer_name: big}, "0")}
    offset = 0
    for tensor in tensors:
        nbytes = tensor_nbytes(tensor.dtype, tensor.shape, tensor.name)
        header[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + nbytes],
        }
        offset += nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (folder / tensors[0].file).open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + offset)
    (folder / "humming/manifest.json").write_text(to_json(replace(manifest, layers={layer_name: big})))
    return folder


def _big_sublayer(entry: SublayerEntry, experts: int, n: int, k: int) -> SublayerEntry:
    config = json.loads(entry.layer_config) | {
        "shape_n": n,
        "shape_k": k,
        "pad_shape_n": 0,
        "pad_shape_k": 0,
        "num_experts": experts,
    }
    shapes = {"weight": (experts, k // 16, n * 4), "weight_scale": (experts, k // 128, n)}
    tensors = {
        key: TensorEntry(
            "humming/experts-00001-of-00001.safetensors", tensor.name, tensor.dtype, shapes[key], tensor.sha256
        )
        for key, tensor in entry.tensors.items()
    }
    return replace(
        entry,
        tensors=tensors,
        shape_n=n,
        shape_k=k,
        layer_config=json.dumps(config),
        shape_n_stacks=(n // 2, n // 2) if len(entry.shape_n_stacks) == 2 else (n,),
    )
