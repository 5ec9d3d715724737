from __future__ import annotations

import copy
from typing import Any

import pytest

from humming_convert.hf_config import converted_config, from_quant_file


def test_the_original_section_is_kept_whole_inside_the_new_one() -> None:
    original = {"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "ue8m0"}
    config: dict[str, Any] = {"model_type": "deepseek_v3", "quantization_config": original, "vocab_size": 5}
    before = copy.deepcopy(config)
    assert converted_config(config, original) == {
        "model_type": "deepseek_v3",
        "vocab_size": 5,
        "quantization_config": {
            "quant_method": "humming_prepacked",
            "format_version": 1,
            "source": original,
            "scale_fmt": "ue8m0",
        },
    }
    assert config == before


@pytest.mark.parametrize("key", ["quantization_config", "compression_config"])
def test_no_older_section_stays_where_a_reader_could_find_it(key: str) -> None:
    config = {"model_type": "x", key: {"quant_method": "a"}, "text_config": {"hidden_size": 4, key: {"b": 1}}}
    result = converted_config(config, {"quant_method": "a"})
    assert result["text_config"] == {"hidden_size": 4}
    assert set(result) == {"model_type", "text_config", "quantization_config"}


def test_a_section_from_another_file_is_written_into_the_config() -> None:
    result = converted_config({"model_type": "x"}, {"quant_method": "awq", "bits": 4})
    assert result["quantization_config"]["source"] == {"quant_method": "awq", "bits": 4}


@pytest.mark.parametrize(
    ("content", "method", "expected"),
    [
        ({"quantization_config": {"quant_method": "fp8"}}, "", {"quant_method": "fp8"}),
        ({"quantization": {"quant_algo": "FP8"}}, "", {"quant_algo": "FP8", "quant_method": "modelopt"}),
        ({"bits": 4}, "gptq", {"bits": 4, "quant_method": "gptq"}),
        ({"quant_method": "awq", "bits": 4}, "gptq", {"quant_method": "awq", "bits": 4}),
        ({"bits": 4}, "", {"bits": 4}),
    ],
)
def test_a_section_in_a_file_of_its_own(content: dict[str, Any], method: str, expected: dict[str, Any]) -> None:
    assert from_quant_file(content, method) == expected
