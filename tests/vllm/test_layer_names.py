"""The module names that the families' table gives vLLM's layers are in vLLM's own model files."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from humming_convert.families import BY_MODEL_TYPE, FAMILIES

pytestmark = pytest.mark.vllm

# model_type: the file that builds the layer, and the one that builds its experts.
FILES: dict[str, tuple[str, str]] = {
    "mixtral": ("mixtral", "mixtral"),
    "phimoe": ("phimoe", "phimoe"),
    "minimax_m2": ("minimax_m2", "minimax_m2"),
    "granitemoe": ("granitemoe", "granitemoe"),
    "granitemoehybrid": ("granitemoehybrid", "granitemoe"),
    "qwen2_moe": ("qwen2_moe", "qwen2_moe"),
    "qwen3_moe": ("qwen3_moe", "qwen3_moe"),
    "qwen3_next": ("qwen3_next", "qwen3_next"),
    "qwen3_5_moe": ("qwen3_5", "qwen3_next"),
    "deepseek_v2": ("deepseek_v2", "deepseek_v2"),
    "glm4_moe": ("glm4_moe", "glm4_moe"),
    "glm4_moe_lite": ("glm4_moe_lite", "glm4_moe"),
    "gpt_oss": ("gpt_oss", "gpt_oss"),
    "olmoe": ("olmoe", "olmoe"),
    "jamba": ("jamba", "jamba"),
    "lfm2_moe": ("lfm2_moe", "lfm2_moe"),
    "llama4": ("llama4", "llama4"),
    "ernie4_5_moe": ("ernie45_moe", "ernie45_moe"),
    "ernie4_5_moe_vl": ("ernie45_vl_moe", "ernie45_vl_moe"),
    "hy_v3": ("hy_v3", "hy_v3"),
    "nemotron_h": ("nemotron_h", "nemotron_h"),
    "step3_text": ("step3_text", "step3_text"),
    "step3p5": ("step3p5", "step3p5"),
    "bailing_moe": ("bailing_moe", "bailing_moe"),
    "afmoe": ("afmoe", "afmoe"),
    "exaone_moe": ("exaone_moe", "exaone_moe"),
    "cohere2_moe": ("cohere2_moe", "cohere2_moe"),
    "mimo_v2": ("mimo_v2", "mimo_v2"),
    "sarvam_moe": ("sarvam", "sarvam"),
    "longcat_flash": ("longcat_flash", "longcat_flash"),
    "aria": ("aria", "aria"),
    "deepseek_v32": ("vllm.models.deepseek_v32.nvidia.model", "deepseek_v2"),
    "deepseek_v4": ("vllm.models.deepseek_v4.nvidia.model", "vllm.models.deepseek_v4.nvidia.model"),
    "deepseek_v41": ("vllm.models.deepseek_v41.nvidia.model", "vllm.models.deepseek_v4.nvidia.model"),
    "kimi_linear": ("vllm.models.kimi_k3.nvidia.model", "vllm.models.kimi_k3.nvidia.model"),
    "kimi_k3": ("vllm.models.kimi_k3.nvidia.model", "vllm.models.kimi_k3.nvidia.model"),
    "minimax_m3": ("vllm.models.minimax_m3.nvidia.model", "vllm.models.minimax_m3.nvidia.model"),
    "glm5_next": ("vllm.models.glm5next.common.model", "vllm.models.glm5next.common.model"),
    "hy_v4": ("vllm.models.hy_v4.nvidia.model", "vllm.models.hy_v4.nvidia.moe"),
}


def text_of(module: str) -> str:
    found = importlib.util.find_spec("vllm")
    assert found is not None
    assert found.submodule_search_locations is not None
    name = module.removeprefix("vllm.") if module.startswith("vllm.") else f"model_executor.models.{module}"
    return (Path(found.submodule_search_locations[0]) / f"{name.replace('.', '/')}.py").read_text()


@pytest.mark.parametrize("model_type", FILES)
def test_a_layer_is_built_under_the_name_in_the_table(model_type: str) -> None:
    layer, experts = (text_of(module) for module in FILES[model_type])
    family = BY_MODEL_TYPE[model_type]
    for parent in family.parents.values():
        assert re.search(rf'prefix=\(?f"\{{prefix\}}\.{parent}"', layer)
    for own in family.groups or ("experts",):
        assert f'prefix=f"{{prefix}}.{own}"' in experts


def test_gemma4_has_experts_beside_its_mlp() -> None:
    assert BY_MODEL_TYPE["gemma4"].parents == {"": ""}
    assert re.search(r'self\.experts = FusedMoEFactory\([^)]*prefix=f"\{prefix\}\.experts"', text_of("gemma4"))


@pytest.mark.parametrize(
    ("architecture", "family"),
    [("ArcticForCausalLM", "arctic"), ("Grok1ForCausalLM", "grok")],
)
def test_what_is_said_to_have_no_model_has_none(architecture: str, family: str) -> None:
    assert not next(row for row in FAMILIES if row.name == family).is_served
    assert re.search(rf'"{architecture}": "0\.\d+\.\d+"', text_of("registry"))  # the version that dropped it
