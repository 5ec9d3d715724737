"""Against vLLM 0.33's own code: the activations that it hands Humming, and when the plugin offers kernels."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.support.vllm_layers import layer_of, quant_config

from humming_convert.kernel_requests import ACTIVATIONS
from humming_loader import kernels
from humming_loader.checkpoint import read_manifest

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_are_spelt_as_vllm_does(serving: SimpleNamespace, name: str) -> None:
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.quantization.utils.humming.activation import get_humming_activation

    assert ACTIVATIONS[name] == get_humming_activation(MoEActivation(name))


def test_packed_layers_offer_the_checkpoint_s_kernels(
    serving: SimpleNamespace,
    on_gpu: SimpleNamespace,
    converted: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = converted["qwen3-fp8-block"]
    on_gpu.know(read_manifest(folder))
    asked: list[tuple[str, str | None]] = []
    monkeypatch.setattr(kernels, "offer", lambda name, revision, log: asked.append((name, revision)))
    config = quant_config(serving, folder)
    assert asked == []
    layer_of(config, folder)
    assert asked == [(str(folder), None)]
