"""The plugin in vLLM 0.33 without a GPU: registration, configuration, pickling, delegation, layers and refusals."""

from __future__ import annotations

import copy
import importlib
import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from scripts.serve_models import MODELS, write_model
from tests.support.vllm_layers import parallel_config, routed_experts

from humming_convert.options import ConvertOptions
from humming_convert.pipeline import convert_checkpoint
from humming_convert.target import Target
from humming_loader import humming_host, plugin
from humming_loader.checkpoint import read_manifest
from humming_loader.errors import LoaderError, OutputMissingError, ParallelismError, ServingError
from humming_loader.host_layout import Host

pytestmark = pytest.mark.vllm

METHOD = "humming_prepacked"


@pytest.fixture(scope="module")
def vllm() -> Iterator[SimpleNamespace]:
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
        pytest.skip(f"vLLM does not import here: {error}")
    plugin.register()
    plugin.register()
    found = SimpleNamespace(**modules)
    config = found.config.VllmConfig(device_config=found.config.DeviceConfig(device="cpu"))
    with found.config.set_current_vllm_config(config):
        yield found


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Every tiny model, converted for sm90; its source lies beside it, without `.out`."""
    folder = tmp_path_factory.mktemp("models")
    outs = {}
    for name in MODELS:
        source, outs[name] = write_model(folder / name, name), folder / f"{name}.out"
        convert_checkpoint(ConvertOptions(source=source, out=outs[name], target=Target(90), hash_source=False))
    return outs


@pytest.fixture
def on_gpu(vllm: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A stand-in for the parts that need a GPU; `host` is what the probes see, `flags` overrides layout flags."""
    from humming_loader import experts, vllm_compat

    found = SimpleNamespace(host=Host(90, "0.1.19", (13, 0)), flags={}, kernels=[])

    def flags(layer_config: str, sm: int) -> dict[str, bool]:
        for manifest_flags, text in known:
            if text == layer_config:
                return dict(manifest_flags) | found.flags
        raise AssertionError("a LayerConfig that no manifest has")

    known: list[tuple[dict[str, bool], str]] = []
    found.know = lambda manifest: known.extend(
        (dict(entry.fingerprint.flags), entry.layer_config)
        for layer in manifest.layers.values()
        for entry in layer.sublayers.values()
    )

    def make_kernel(*args: Any, **kwargs: Any) -> SimpleNamespace:
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


def model_config(vllm: SimpleNamespace, folder: Path, **options: Any) -> Any:
    """vLLM's ModelConfig of a folder."""
    return vllm.config.ModelConfig(
        model=str(folder), tokenizer=str(folder), skip_tokenizer_init=True, max_model_len=64, **options
    )


def quant_config(vllm: SimpleNamespace, folder: Path) -> Any:
    """The quantization configuration that vLLM makes for a folder, as VllmConfig does."""
    model = model_config(vllm, folder)
    config = vllm.weights.get_quant_config(model, vllm.load.LoadConfig())
    config.maybe_update_config(model.model, hf_config=model.hf_config, revision=model.revision)
    return config


def layer_of(config: Any, folder: Path, **options: Any) -> Any:
    """The first packed layer as vLLM builds it, on the CPU."""
    manifest = read_manifest(folder)
    name, entry = next(iter(manifest.layers.items()))
    given: dict[str, Any] = {
        "layer_name": name,
        "experts": entry.num_experts,
        "hidden": entry.hidden_size,
        "intermediate": entry.intermediate_size,
        "dtype": getattr(torch, manifest.param_dtype),
        "device": "cpu",
        "activation": "swigluoai" if entry.gate_up == "interleaved" else "silu",
        "has_bias": entry.has_bias,
    }
    return routed_experts(config, **(given | options))


def test_registered_once(vllm: SimpleNamespace) -> None:
    assert vllm.quantization.QUANTIZATION_METHODS.count(METHOD) == 1
    assert vllm.quantization.get_quantization_config(METHOD).__name__ == "HummingPrepackedConfig"


@pytest.mark.parametrize("name", MODELS)
def test_model_config_finds_the_method(vllm: SimpleNamespace, converted: dict[str, Path], name: str) -> None:
    assert model_config(vllm, converted[name]).quantization == METHOD
    assert model_config(vllm, converted[name], quantization="humming").quantization == METHOD


def test_other_checkpoints_are_left_alone(vllm: SimpleNamespace, converted: dict[str, Path]) -> None:
    source = converted["qwen3-fp8-block"].with_suffix("")
    assert model_config(vllm, source).quantization == "fp8"


@pytest.mark.parametrize("name", MODELS)
def test_configuration_is_the_source_s_own(vllm: SimpleNamespace, converted: dict[str, Path], name: str) -> None:
    ours, theirs = quant_config(vllm, converted[name]), quant_config(vllm, converted[name].with_suffix(""))
    assert isinstance(ours, type(theirs))
    assert ours.get_name() == theirs.get_name()
    assert ours.get_min_capability() == theirs.get_min_capability()
    assert ours.get_supported_act_dtypes() == theirs.get_supported_act_dtypes()
    state = {key: value for key, value in vars(ours).items() if key != METHOD}
    assert {key: str(value) for key, value in state.items()} == {k: str(v) for k, v in vars(theirs).items()}


@pytest.mark.parametrize("name", MODELS)
def test_configuration_travels_to_other_processes(vllm: SimpleNamespace, converted: dict[str, Path], name: str) -> None:
    config = quant_config(vllm, converted[name])
    for again in (pickle.loads(pickle.dumps(config)), copy.deepcopy(config)):
        assert type(again) is type(config)
        assert again.humming_prepacked == config.humming_prepacked
        assert again.humming_prepacked.manifest().layers.keys() == config.humming_prepacked.manifest().layers.keys()


def test_unquantized_linear_layers(vllm: SimpleNamespace, converted: dict[str, Path]) -> None:
    config = quant_config(vllm, converted["qwen3-fp8-block"])
    config.packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
    linear = torch.nn.Module.__new__(vllm.linear.LinearBase)
    method = config.get_quant_method(linear, "model.layers.0.self_attn.o_proj")
    assert isinstance(method, vllm.linear.UnquantizedLinearMethod)


def test_layers_that_were_not_converted_are_the_source_s(
    vllm: SimpleNamespace, converted: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = quant_config(vllm, converted["qwen3-fp8-block"])
    layer = torch.nn.Module.__new__(vllm.moe.RoutedExperts)
    torch.nn.Module.__init__(layer)
    layer.layer_name = "model.mtp.layers.0.mlp.experts"
    asked: list[str] = []
    original = type(config).__mro__[2]
    monkeypatch.setattr(original, "get_quant_method", lambda self, layer, prefix: asked.append(prefix))
    config.get_quant_method(layer, layer.layer_name)
    assert asked == ["model.mtp.layers.0.mlp.experts"]


def test_names_are_mapped_as_the_model_maps_them(vllm: SimpleNamespace, converted: dict[str, Path]) -> None:
    config = quant_config(vllm, converted["qwen3-fp8-block"])
    stored = "model.layers.0.mlp.experts"
    assert config.humming_prepacked.stored_name("language_model.model.layers.0.mlp.experts") == stored
    assert config.humming_prepacked.stored_name("mtp.layers.0.mlp.experts") is None
    config.apply_vllm_mapper(vllm.utils.WeightsMapper(orig_to_new_prefix={"model.": "backbone."}))
    assert config.humming_prepacked.stored_name("backbone.layers.0.mlp.experts") == stored


@pytest.mark.parametrize("name", MODELS)
def test_packed_layer_has_the_file_s_bytes(
    vllm: SimpleNamespace, converted: dict[str, Path], on_gpu: SimpleNamespace, name: str
) -> None:
    manifest = read_manifest(converted[name])
    on_gpu.know(manifest)
    layer = layer_of(quant_config(vllm, converted[name]), converted[name])
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
    vllm: SimpleNamespace, converted: dict[str, Path], on_gpu: SimpleNamespace
) -> None:
    folder = converted["qwen3-ct-int4"]
    on_gpu.know(read_manifest(folder))
    config = quant_config(vllm, folder)
    options = {"parallel": parallel_config(ep=(1, 3))}
    linear = layer_of(config, folder, **options)
    assert linear.quant_method.part.experts == (3, 4, 5)
    assert linear.quant_method.experts_cls.__name__ == "HummingGroupedExperts"
    turns = layer_of(config, folder, placement="round_robin", expert_groups=2, **options)
    assert turns.quant_method.part.experts == (1, 4, 7)
    redundant = layer_of(config, folder, redundant=4, parallel=parallel_config(ep=(3, 4)))
    assert redundant.quant_method.part.experts == (1, 2, 3)


def test_tensor_ranks_set_the_intermediate_size(
    vllm: SimpleNamespace, converted: dict[str, Path], on_gpu: SimpleNamespace
) -> None:
    folder = converted["qwen3-ct-int4"]
    on_gpu.know(read_manifest(folder))
    layer = layer_of(quant_config(vllm, folder), folder, parallel=parallel_config(tp=(1, 2)))
    assert layer.moe_config.intermediate_size_per_partition == 256
    assert tuple(layer.w13_weight.shape) == (8, 32, 1024)
    layer.quant_method.process_weights_after_loading(layer)
    assert layer.humming_configs["w13"].shape_n == 512
    assert layer.humming_configs["w2"].shape_k == 256


def test_checkpoint_tensors_for_packed_parameters_are_refused(
    vllm: SimpleNamespace, converted: dict[str, Path], on_gpu: SimpleNamespace
) -> None:
    folder = converted["qwen3-ct-int4"]
    on_gpu.know(read_manifest(folder))
    layer = layer_of(quant_config(vllm, folder), folder)
    with pytest.raises(ServingError, match="read from humming/, found a checkpoint tensor for them"):
        layer.w13_weight.weight_loader(layer.w13_weight, torch.zeros(1))


def test_reload_of_weights_is_refused(
    vllm: SimpleNamespace, converted: dict[str, Path], on_gpu: SimpleNamespace
) -> None:
    reload = importlib.import_module("vllm.model_executor.model_loader.reload.layerwise")
    folder = converted["qwen3-ct-int4"]
    on_gpu.know(read_manifest(folder))
    layer = layer_of(quant_config(vllm, folder), folder)
    reload.record_metadata_for_reloading(layer)
    with pytest.raises(ServingError, match="which stay as they were loaded, found a reload of weights; start again"):
        reload.initialize_layerwise_reload(layer)


def test_dummy_weights_are_not_read(
    vllm: SimpleNamespace, converted: dict[str, Path], on_gpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    from humming_loader import experts, vllm_compat

    folder = converted["qwen3-ct-int4"]
    on_gpu.know(read_manifest(folder))
    config = quant_config(vllm, folder)
    monkeypatch.setattr(vllm_compat, "load_format", lambda: "dummy")

    def no_reading(*args: object, **kwargs: object) -> None:
        raise AssertionError("dummy weights were read")

    monkeypatch.setattr(experts, "fill", no_reading)
    layer = layer_of(config, folder)
    layer.quant_method.process_weights_after_loading(layer)
    assert len(on_gpu.kernels) == 1


def test_load_format_is_vllm_s(vllm: SimpleNamespace) -> None:
    from humming_loader import vllm_compat

    assert vllm_compat.load_format() == "auto"


def refused(vllm: SimpleNamespace, folder: Path, on_gpu: SimpleNamespace, **options: Any) -> str:
    """The message with which building the layer is refused; nothing was made by then."""
    on_gpu.know(read_manifest(folder))
    config = quant_config(vllm, folder)
    with pytest.raises(LoaderError) as caught:
        layer_of(config, folder, **options)
    assert not on_gpu.kernels
    return f"{type(caught.value).__name__}: {caught.value}"


def test_other_gpu(vllm: SimpleNamespace, converted: dict[str, Path], on_gpu: SimpleNamespace) -> None:
    on_gpu.host = Host(100, "0.1.19", (13, 0))
    assert refused(vllm, converted["qwen3-ct-int4"], on_gpu) == (
        "HostMismatchError: converted checkpoint: packed for sm90, this GPU is sm100. Convert again for this host: "
        "humming-convert qwen3-ct-int4 OUT --target sm100 --cuda 13.0 --activation a16 --dtype bfloat16 (with "
        "humming-kernels 0.1.19)"
    )


def test_other_humming(vllm: SimpleNamespace, converted: dict[str, Path], on_gpu: SimpleNamespace) -> None:
    on_gpu.host = Host(90, "0.3.0", (13, 0))
    assert "0.3.0 is installed here and its layout is not known to be the same" in refused(
        vllm, converted["qwen3-ct-int4"], on_gpu
    )


def test_other_flag(vllm: SimpleNamespace, converted: dict[str, Path], on_gpu: SimpleNamespace) -> None:
    on_gpu.flags = {"use_native_dequant": True}
    message = refused(vllm, converted["qwen3-ct-int4"], on_gpu)
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
    vllm: SimpleNamespace, converted: dict[str, Path], on_gpu: SimpleNamespace, options: dict[str, Any], text: str
) -> None:
    message = refused(vllm, converted["qwen3-ct-int4"], on_gpu, **options)
    assert message.startswith(f"ServingError: model.layers.0.mlp.experts: {text}")


def test_hidden_size_rounded_for_a_backend(
    vllm: SimpleNamespace, converted: dict[str, Path], on_gpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    from humming_loader import vllm_compat

    monkeypatch.setattr(vllm_compat.FusedMoEMethodBase, "maybe_roundup_sizes", lambda *args: (768, 512))
    message = refused(vllm, converted["qwen3-ct-int4"], on_gpu)
    assert "expected a hidden size of 512, as packed, found 768, rounded up for the all-to-all backend" in message


def test_tensor_parallel_size_that_does_not_work(
    vllm: SimpleNamespace, converted: dict[str, Path], on_gpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    from humming_loader import slicing

    monkeypatch.setattr(slicing, "_refusal", lambda layer, size: "it is a test" if size == 4 else "")
    folder = converted["qwen3-ct-int4"]
    on_gpu.know(read_manifest(folder))
    with pytest.raises(ParallelismError, match="tensor parallelism of 4: it is a test; sizes that work: 1, 2, 3, 5"):
        layer_of(quant_config(vllm, folder), folder, parallel=parallel_config(tp=(0, 4)))


def test_experts_that_vllm_does_not_take(
    vllm: SimpleNamespace, converted: dict[str, Path], on_gpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    from humming_loader import vllm_compat

    monkeypatch.setattr(vllm_compat.HummingExperts, "_supports_current_device", staticmethod(lambda: False))
    message = refused(vllm, converted["qwen3-ct-int4"], on_gpu)
    assert "expected a format and a parallel configuration that vLLM's Humming experts take" in message


def test_no_gpu(vllm: SimpleNamespace, converted: dict[str, Path]) -> None:
    config = quant_config(vllm, converted["qwen3-ct-int4"])
    with pytest.raises(ServingError, match="expected a CUDA device, for Humming's kernels"):
        layer_of(config, converted["qwen3-ct-int4"])


def test_folder_without_packed_experts(vllm: SimpleNamespace, converted: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((converted["qwen3-ct-int4"] / "config.json").read_bytes())
    with pytest.raises(OutputMissingError, match=r"with humming/manifest\.json, found none"):
        quant_config(vllm, tmp_path)


def test_other_format_version(vllm: SimpleNamespace) -> None:
    config = vllm.quantization.get_quantization_config(METHOD)
    with pytest.raises(ServingError, match=r"quantization_config\.format_version: expected 1, found 2"):
        config.from_config({"quant_method": METHOD, "format_version": 2, "source": {}})


def test_source_without_a_section(vllm: SimpleNamespace) -> None:
    config = vllm.quantization.get_quantization_config(METHOD)
    found = config.from_config({"quant_method": METHOD, "format_version": 1, "source": {}})
    linear = torch.nn.Module.__new__(vllm.linear.LinearBase)
    assert isinstance(found.get_quant_method(linear, "x"), vllm.linear.UnquantizedLinearMethod)


def test_untested_versions(vllm: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    from humming_loader import vllm_compat

    assert vllm_compat.check_version() is None
    original = vllm_compat._find
    monkeypatch.setattr(vllm_compat, "_find", lambda name: "0.34.1" if name == "__version__" else original(name))
    assert vllm_compat.check_version() == "humming_prepacked was tested with vLLM 0.33.x, this is 0.34.1: trying"
    monkeypatch.setitem(vllm_compat._NAMES, "RoutedExperts", "vllm.model_executor.layers.fused_moe:Renamed")
    with pytest.raises(ServingError) as caught:
        vllm_compat.check_version()
    assert str(caught.value) == (
        "vLLM: expected a version like 0.33.x, found 0.34.1, without vllm.model_executor.layers.fused_moe.Renamed"
    )
