"""vLLM with the plugin on a CPU: its modules, converted tiny models, and stand-ins for what needs a GPU."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from scripts.serve_models import MODELS, write_model

from humming_convert.options import ConvertOptions
from humming_convert.pipeline import convert_checkpoint
from humming_convert.target import Target
from humming_loader import humming_host, plugin
from humming_loader.host_layout import Host


@pytest.fixture(scope="session")
def serving() -> Iterator[SimpleNamespace]:
    """vLLM's modules with the plugin registered, and a configuration for a CPU."""
    try:
        names = {
            "config": "vllm.config",
            "load": "vllm.config.load",
            "weights": "vllm.model_executor.model_loader.weight_utils",
            "quantization": "vllm.model_executor.layers.quantization",
            "linear": "vllm.model_executor.layers.linear",
            "moe": "vllm.model_executor.layers.fused_moe",
            "utils": "vllm.model_executor.models.utils",
        }
        modules = {key: importlib.import_module(name) for key, name in names.items()}
    except ImportError as error:
        if os.environ.get("HUMMING_EXPECT_VLLM"):
            raise
        pytest.skip(f"vLLM does not import here: {error}")
    plugin.register()
    plugin.register()
    found = SimpleNamespace(**modules)
    config = found.config.VllmConfig(device_config=found.config.DeviceConfig(device="cpu"))
    with found.config.set_current_vllm_config(config):
        yield found


@pytest.fixture(scope="session")
def converted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Every tiny model, converted for sm90; its source lies beside it, without `.out`."""
    folder = tmp_path_factory.mktemp("models")
    outs = {}
    for name in MODELS:
        source, outs[name] = write_model(folder / name, name), folder / f"{name}.out"
        convert_checkpoint(ConvertOptions(source=source, out=outs[name], target=Target(90), hash_source=False))
    return outs


@pytest.fixture
def on_gpu(serving: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A stand-in for the parts that need a GPU; `host` is what the probes see, `flags` overrides layout flags."""
    from humming_loader import experts, vllm_compat

    found = SimpleNamespace(host=Host(90, "0.1.19", (13, 0)), flags={}, kernels=[])

    def flags(layer_config: str, sm: int) -> dict[str, bool]:
        for manifest_flags, text in known:
            if text == layer_config:
                return {**manifest_flags, **found.flags}
        raise AssertionError("a LayerConfig that no manifest has")

    known: list[tuple[dict[str, bool], str]] = []
    found.know = lambda manifest: known.extend(
        (dict(entry.fingerprint.flags), entry.layer_config)
        for layer in manifest.layers.values()
        for entry in layer.sublayers.values()
    )

    def make_kernel(*args: object, **kwargs: object) -> SimpleNamespace:
        found.kernels.append((args, kwargs))
        return SimpleNamespace(fused_experts=SimpleNamespace(consumes_expert_mask=False))

    is_cuda = SimpleNamespace(is_cuda=lambda: True, device_name="stand-in")
    monkeypatch.setattr(vllm_compat, "current_platform", is_cuda, raising=False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(humming_host, "probe_host", lambda device: found.host)
    monkeypatch.setattr(humming_host, "resolve_flags", flags)
    monkeypatch.setattr(vllm_compat, "make_humming_moe_kernel", make_kernel, raising=False)
    monkeypatch.setattr(vllm_compat.HummingExperts, "_supports_current_device", staticmethod(lambda: True))
    monkeypatch.setattr(experts.PrepackedHummingMoEMethod, "is_monolithic", False)
    return found
