"""The plugin's configuration in vLLM 0.33 without a GPU: registration, pickling, delegation, names, versions."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from scripts.serve_models import MODELS
from tests.support.vllm_layers import model_config, quant_config

from humming_loader.errors import OutputMissingError, ServingError

pytestmark = pytest.mark.vllm

METHOD = "humming_prepacked"


def test_registered_once(serving: SimpleNamespace) -> None:
    assert serving.quantization.QUANTIZATION_METHODS.count(METHOD) == 1
    assert serving.quantization.get_quantization_config(METHOD).__name__ == "HummingPrepackedConfig"


@pytest.mark.parametrize("name", MODELS)
def test_model_config_finds_the_method(serving: SimpleNamespace, converted: dict[str, Path], name: str) -> None:
    assert model_config(serving, converted[name]).quantization == METHOD
    assert model_config(serving, converted[name], quantization="humming").quantization == METHOD


def test_other_checkpoints_are_left_alone(serving: SimpleNamespace, converted: dict[str, Path]) -> None:
    source = converted["qwen3-fp8-block"].with_suffix("")
    assert model_config(serving, source).quantization == "fp8"


@pytest.mark.parametrize("name", MODELS)
def test_configuration_is_the_source_s_own(serving: SimpleNamespace, converted: dict[str, Path], name: str) -> None:
    ours, theirs = quant_config(serving, converted[name]), quant_config(serving, converted[name].with_suffix(""))
    assert isinstance(ours, type(theirs))
    assert ours.get_name() == theirs.get_name()
    assert ours.get_min_capability() == theirs.get_min_capability()
    assert ours.get_supported_act_dtypes() == theirs.get_supported_act_dtypes()
    state = {key: value for key, value in vars(ours).items() if key != METHOD}
    assert {key: str(value) for key, value in state.items()} == {k: str(v) for k, v in vars(theirs).items()}


@pytest.mark.parametrize("name", MODELS)
def test_configuration_travels_to_other_processes(
    serving: SimpleNamespace, converted: dict[str, Path], name: str
) -> None:
    config = quant_config(serving, converted[name])
    for again in (pickle.loads(pickle.dumps(config)), copy.deepcopy(config)):
        assert type(again) is type(config)
        assert again.humming_prepacked == config.humming_prepacked
        assert again.humming_prepacked.manifest().layers.keys() == config.humming_prepacked.manifest().layers.keys()


def test_unquantized_linear_layers(serving: SimpleNamespace, converted: dict[str, Path]) -> None:
    config = quant_config(serving, converted["qwen3-fp8-block"])
    config.packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
    linear = torch.nn.Module.__new__(serving.linear.LinearBase)
    method = config.get_quant_method(linear, "model.layers.0.self_attn.o_proj")
    assert isinstance(method, serving.linear.UnquantizedLinearMethod)


def test_layers_that_were_not_converted_are_the_source_s(
    serving: SimpleNamespace, converted: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = quant_config(serving, converted["qwen3-fp8-block"])
    layer = torch.nn.Module.__new__(serving.moe.RoutedExperts)
    torch.nn.Module.__init__(layer)
    layer.layer_name = "model.mtp.layers.0.mlp.experts"
    asked: list[str] = []
    original = type(config).__mro__[2]
    monkeypatch.setattr(original, "get_quant_method", lambda self, layer, prefix: asked.append(prefix))
    config.get_quant_method(layer, layer.layer_name)
    assert asked == ["model.mtp.layers.0.mlp.experts"]


def test_names_are_mapped_as_the_model_maps_them(serving: SimpleNamespace, converted: dict[str, Path]) -> None:
    config = quant_config(serving, converted["qwen3-fp8-block"])
    stored = "model.layers.0.mlp.experts"
    assert config.humming_prepacked.stored_name("language_model.model.layers.0.mlp.experts") == stored
    assert config.humming_prepacked.stored_name("mtp.layers.0.mlp.experts") is None
    assert config.humming_prepacked.stored_name("model.layers.2.mlp.experts") is None
    config.apply_vllm_mapper(serving.utils.WeightsMapper(orig_to_new_prefix={"model.": "backbone."}))
    assert config.humming_prepacked.stored_name("backbone.layers.0.mlp.experts") == stored


def test_dense_layers_and_mtp_layers_of_glm_are_not_packed(
    serving: SimpleNamespace, converted: dict[str, Path]
) -> None:
    state = quant_config(serving, converted["glm4-ct-int4"]).humming_prepacked
    assert list(state.manifest().layers) == ["model.layers.1.mlp.experts"]
    assert state.stored_name("model.layers.1.mlp.experts") == "model.layers.1.mlp.experts"
    # The dense first layer has none; the layer behind the last is the multi-token predictor's, in vLLM another model.
    assert state.stored_name("model.layers.2.mlp.experts") is None


def test_folder_without_packed_experts(serving: SimpleNamespace, converted: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((converted["qwen3-ct-int4"] / "config.json").read_bytes())
    with pytest.raises(OutputMissingError, match=r"with humming/manifest\.json, found none"):
        quant_config(serving, tmp_path)


def test_other_format_version(serving: SimpleNamespace) -> None:
    config = serving.quantization.get_quantization_config(METHOD)
    with pytest.raises(ServingError, match=r"quantization_config\.format_version: expected 1, found 2"):
        config.from_config({"quant_method": METHOD, "format_version": 2, "source": {}})


def test_source_without_a_section(serving: SimpleNamespace) -> None:
    config = serving.quantization.get_quantization_config(METHOD)
    found = config.from_config({"quant_method": METHOD, "format_version": 1, "source": {}})
    linear = torch.nn.Module.__new__(serving.linear.LinearBase)
    assert isinstance(found.get_quant_method(linear, "x"), serving.linear.UnquantizedLinearMethod)


def test_untested_versions(serving: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
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
