"""Experts packed for tensor-parallel ranks in vLLM 0.33 without a GPU, and what its loaders leave on such a rank."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from scripts.serve_models import MODELS, write_model
from tests.support.vllm_layers import layer_of, parallel_config, quant_config

from humming_convert.options import ConvertOptions
from humming_convert.pipeline import convert_checkpoint
from humming_convert.target import Target
from humming_loader.checkpoint import read_manifest
from humming_loader.errors import PreshardedError
from humming_loader.parts import find_part, layer_names
from humming_loader.reader import ExpertsFile

pytestmark = pytest.mark.vllm

RANKS = 2


@pytest.fixture(scope="module")
def cut(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Some of the tiny models, packed for two ranks."""
    folder, outs = tmp_path_factory.mktemp("ranks"), {}
    for name in ("qwen3-fp8-block", "gpt-oss-mxfp4", "qwen3-ct-int4"):
        source, outs[name] = write_model(folder / name, name), folder / f"{name}.out"
        convert_checkpoint(ConvertOptions(source=source, out=outs[name], target=Target(90), tp_size=RANKS))
    return outs


@pytest.mark.parametrize("rank", range(RANKS))
@pytest.mark.parametrize("name", ["qwen3-fp8-block", "gpt-oss-mxfp4", "qwen3-ct-int4"])
def test_a_rank_has_the_bytes_of_its_own_file(
    serving: SimpleNamespace, cut: dict[str, Path], on_gpu: SimpleNamespace, name: str, rank: int
) -> None:
    assert name in MODELS
    folder = cut[name]
    manifest = read_manifest(folder)
    on_gpu.know(manifest)
    layer = layer_of(quant_config(serving, folder), folder, parallel=parallel_config(tp=(rank, RANKS)))
    layer.quant_method.process_weights_after_loading(layer)
    entry = find_part(manifest, layer.layer_name, rank, RANKS)
    assert layer.moe_config.intermediate_size_per_partition == entry.intermediate_size == 256
    parameters = dict(layer.named_parameters())
    for key, sublayer in entry.sublayers.items():
        assert layer.humming_configs[key].to_str() == sublayer.layer_config
        for tensor, stored in sublayer.tensors.items():
            found = parameters.pop(f"{key}_{tensor}")
            assert tuple(found.shape) == stored.shape
            with ExpertsFile(folder / stored.file) as opened:
                data = bytearray(opened.tensors[stored.name].nbytes)
                opened.read_into(stored.name, memoryview(data))
            assert found.data.reshape(-1).view(torch.uint8).numpy().tobytes() == bytes(data)
    assert not parameters


@pytest.mark.parametrize("parallel", [{}, {"tp": (0, 4)}, {"ep": (0, 2)}])
def test_other_sizes_and_expert_parallelism_are_refused(
    serving: SimpleNamespace, cut: dict[str, Path], on_gpu: SimpleNamespace, parallel: dict[str, Any]
) -> None:
    folder = cut["qwen3-ct-int4"]
    on_gpu.know(read_manifest(folder))
    with pytest.raises(PreshardedError) as caught:
        layer_of(quant_config(serving, folder), folder, parallel=parallel_config(**parallel))
    assert caught.value.layer == layer_names(read_manifest(folder).layers)[0]
    assert ("--tp 4" in caught.value.mend) == (parallel == {"tp": (0, 4)})
    assert not on_gpu.kernels
