"""The plugin's routed-experts layers in vLLM 0.33 without a GPU: bytes, ranks, dummy weights, refusals."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from scripts.serve_models import MODELS
from tests.support.vllm_layers import layer_of, parallel_config, quant_config

from humming_loader.checkpoint import read_manifest
from humming_loader.errors import LoaderError, ParallelismError, ServingError
from humming_loader.host_layout import Host

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize("name", MODELS)
def test_packed_layer_has_the_file_s_bytes(
    serving: SimpleNamespace, converted: dict[str, Path], on_gpu: SimpleNamespace, name: str
) -> None:
    manifest = read_manifest(converted[name])
    on_gpu.know(manifest)
    layer = layer_of(quant_config(serving, converted[name]), converted[name])
    method = layer.quant_method
    assert method.experts_cls.__name__ == "HummingIndexedExperts"
    method.process_weights_after_loading(layer)
    method.process_weights_after_loading(layer)
    assert len(on_gpu.kernels) == 1
    entry = manifest.layers[layer.layer_name]
    expected = {
        f"{key}_{tensor}": found for key, sub in entry.sublayers.items() for tensor, found in sub.tensors.items()
    }
    parameters = dict(layer.named_parameters())
    assert parameters.keys() == expected.keys()
    for key, tensor in expected.items():
        assert tuple(parameters[key].shape) == tensor.shape
        data = parameters[key].data.reshape(-1).view(torch.uint8).numpy().tobytes()
        stored = _stored_bytes(converted[name] / tensor.file, tensor.name)
        assert data == stored, key
    for key, sub in entry.sublayers.items():
        assert layer.humming_configs[key].to_str() == sub.layer_config


def _stored_bytes(path: Path, name: str) -> bytes:
    """A tensor's bytes by the format's own definition."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    begin, end = json.loads(data[8 : 8 + length])[name]["data_offsets"]
    return data[8 + length + begin : 8 + length + end]


def test_expert_ranks_take_the_rows_of_vllm_s_map(
    serving: SimpleNamespace, converted: dict[str, Path], on_gpu: SimpleNamespace
) -> None:
    folder = converted["qwen3-ct-int4"]
    on_gpu.know(read_manifest(folder))
    config = quant_config(serving, folder)
    options = {"parallel": parallel_config(ep=(1, 3))}
    linear = layer_of(config, folder, **options)
    assert linear.quant_method.part.experts == (3, 4, 5)
    assert linear.quant_method.experts_cls.__name__ == "HummingGroupedExperts"
    turns = layer_of(config, folder, placement="round_robin", expert_groups=2, **options)
    assert turns.quant_method.part.experts == (1, 4, 7)
    redundant = layer_of(config, folder, redundant=4, parallel=parallel_config(ep=(3, 4)))
    assert redundant.quant_method.part.experts == (1, 2, 3)


def test_tensor_ranks_set_the_intermediate_size(
    serving: SimpleNamespace, converted: dict[str, Path], on_gpu: SimpleNamespace
) -> None:
    folder = converted["qwen3-ct-int4"]
    on_gpu.know(read_manifest(folder))
    layer = layer_of(quant_config(serving, folder), folder, parallel=parallel_config(tp=(1, 2)))
    assert layer.moe_config.intermediate_size_per_partition == 256
    assert tuple(layer.w13_weight.shape) == (8, 32, 1024)
    layer.quant_method.process_weights_after_loading(layer)
    assert layer.humming_configs["w13"].shape_n == 512
    assert layer.humming_configs["w2"].shape_k == 256


def test_checkpoint_tensors_for_packed_parameters_are_refused(
    serving: SimpleNamespace, converted: dict[str, Path], on_gpu: SimpleNamespace
) -> None:
    folder = converted["qwen3-ct-int4"]
    on_gpu.know(read_manifest(folder))
    layer = layer_of(quant_config(serving, folder), folder)
    with pytest.raises(ServingError, match="read from humming/, found a checkpoint tensor for them"):
        layer.w13_weight.weight_loader(layer.w13_weight, torch.zeros(1))


def test_reload_of_weights_is_refused(
    serving: SimpleNamespace, converted: dict[str, Path], on_gpu: SimpleNamespace
) -> None:
    reload = importlib.import_module("vllm.model_executor.model_loader.reload.layerwise")
    folder = converted["qwen3-ct-int4"]
    on_gpu.know(read_manifest(folder))
    layer = layer_of(quant_config(serving, folder), folder)
    reload.record_metadata_for_reloading(layer)
    with pytest.raises(ServingError, match="which stay as they were loaded, found a reload of weights; start again"):
        reload.initialize_layerwise_reload(layer)


def test_dummy_weights_are_not_read(
    serving: SimpleNamespace, converted: dict[str, Path], on_gpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    from humming_loader import experts, vllm_compat

    folder = converted["qwen3-ct-int4"]
    on_gpu.know(read_manifest(folder))
    config = quant_config(serving, folder)
    monkeypatch.setattr(vllm_compat, "load_format", lambda: "dummy")

    def no_reading(*args: object, **kwargs: object) -> None:
        raise AssertionError("dummy weights were read")

    monkeypatch.setattr(experts, "fill", no_reading)
    layer = layer_of(config, folder)
    layer.quant_method.process_weights_after_loading(layer)
    assert len(on_gpu.kernels) == 1


def test_load_format_is_vllm_s(serving: SimpleNamespace) -> None:
    from humming_loader import vllm_compat

    assert vllm_compat.load_format() == "auto"


def refused(serving: SimpleNamespace, folder: Path, on_gpu: SimpleNamespace, **options: object) -> str:
    """The message with which building the layer is refused; nothing was made by then."""
    on_gpu.know(read_manifest(folder))
    config = quant_config(serving, folder)
    with pytest.raises(LoaderError) as caught:
        layer_of(config, folder, **options)
    assert not on_gpu.kernels
    return f"{type(caught.value).__name__}: {caught.value}"


def test_other_gpu(serving: SimpleNamespace, converted: dict[str, Path], on_gpu: SimpleNamespace) -> None:
    on_gpu.host = Host(100, "0.1.19", (13, 0))
    assert refused(serving, converted["qwen3-ct-int4"], on_gpu) == (
        "HostMismatchError: converted checkpoint: packed for sm90, this GPU is sm100. Convert again for this host: "
        "humming-convert qwen3-ct-int4 OUT --target sm100 --cuda 13.0 --activation a16 --dtype bfloat16 (with "
        "humming-kernels 0.1.19)"
    )


def test_other_humming(serving: SimpleNamespace, converted: dict[str, Path], on_gpu: SimpleNamespace) -> None:
    on_gpu.host = Host(90, "0.3.0", (13, 0))
    assert "0.3.0 is installed here and its layout is not known to be the same" in refused(
        serving, converted["qwen3-ct-int4"], on_gpu
    )


def test_other_flag(serving: SimpleNamespace, converted: dict[str, Path], on_gpu: SimpleNamespace) -> None:
    on_gpu.flags = {"use_native_dequant": True}
    message = refused(serving, converted["qwen3-ct-int4"], on_gpu)
    assert message.startswith(
        "HostMismatchError: model.layers.0.mlp.experts.w13: layout flag use_native_dequant is False in the checkpoint "
        "and True on this host. Convert again for this host: humming-convert "
    )


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"is_lora_enabled": True}, "expected no LoRA, found LoRA is enabled"),
        ({"experts": 16}, "expected experts 8, as packed, found 16"),
        ({"hidden": 1024}, "expected hidden size 512, as packed, found 1024"),
        ({"intermediate": 1024}, "expected intermediate size 512, as packed, found 1024"),
        ({"has_bias": True}, "expected bias False, as packed, found True"),
        ({"activation": "swigluoai"}, "expected interleaved gate and up False, as packed, found True"),
        (
            {"dtype": torch.float16},
            "expected bfloat16 parameters, as packed, found float16; serve with --dtype bfloat16, or convert with "
            "--dtype float16",
        ),
    ],
)
def test_layer_that_is_not_the_packed_one(
    serving: SimpleNamespace, converted: dict[str, Path], on_gpu: SimpleNamespace, options: dict[str, Any], text: str
) -> None:
    message = refused(serving, converted["qwen3-ct-int4"], on_gpu, **options)
    assert message.startswith(f"ServingError: model.layers.0.mlp.experts: {text}")


def test_hidden_size_rounded_for_a_backend(
    serving: SimpleNamespace, converted: dict[str, Path], on_gpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    from humming_loader import vllm_compat

    monkeypatch.setattr(vllm_compat.FusedMoEMethodBase, "maybe_roundup_sizes", lambda *args: (768, 512))
    message = refused(serving, converted["qwen3-ct-int4"], on_gpu)
    assert "expected a hidden size of 512, as packed, found 768, rounded up for the all-to-all backend" in message


def test_tensor_parallel_size_that_does_not_work(
    serving: SimpleNamespace, converted: dict[str, Path], on_gpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    from humming_loader import slicing

    monkeypatch.setattr(slicing, "_refusal", lambda layer, size: "it is a test" if size == 4 else "")
    folder = converted["qwen3-ct-int4"]
    on_gpu.know(read_manifest(folder))
    with pytest.raises(ParallelismError, match="tensor parallelism of 4: it is a test; sizes that work: 1, 2, 3, 5"):
        layer_of(quant_config(serving, folder), folder, parallel=parallel_config(tp=(0, 4)))


def test_experts_that_vllm_does_not_take(
    serving: SimpleNamespace, converted: dict[str, Path], on_gpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    from humming_loader import vllm_compat

    monkeypatch.setattr(vllm_compat.HummingExperts, "_supports_current_device", staticmethod(lambda: False))
    message = refused(serving, converted["qwen3-ct-int4"], on_gpu)
    assert "expected a format and a parallel configuration that vLLM's Humming experts take" in message


def test_no_gpu(serving: SimpleNamespace, converted: dict[str, Path]) -> None:
    config = quant_config(serving, converted["qwen3-ct-int4"])
    with pytest.raises(ServingError, match="expected a CUDA device, for Humming's kernels"):
        layer_of(config, converted["qwen3-ct-int4"])
