"""However a family's experts are named, fused, sharded and ordered, the packed bytes are those of the plain form."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.checkpoints import RawTensor, Tensors, bf16
from tests.support.family_case import Case, E, H
from tests.support.family_cases import CASES
from tests.support.family_checkpoints import LINEARS, expert_tensors, make_values, other_tensors, write_model
from tests.support.plans import plan_of

from humming_convert.errors import CheckpointError, NothingToConvertError
from humming_convert.options import ConvertOptions
from humming_convert.pipeline import convert_checkpoint
from humming_convert.target import Target
from humming_convert.verify import verify
from humming_convert.verify_output import read_manifest

FORMATS = (
    "fp8_tensor",
    "fp8_block",
    "ct_mxfp4",
    "awq",
    "ct_int4",
    "ct_int8_asym",
    "ct_w8a8",
    "ct_fp8_block",
    "ct_nvfp4",
)
# What may stand before `layers.` where a case has `model.`, and what vLLM makes of it.
PREFIXES = {
    "model.": "model.",
    "model.language_model.": "language_model.model.",
    "language_model.model.": "language_model.model.",
    "": "model.",
}

Digests = dict[str, dict[str, str]]


def packed(path: Path, out: Path) -> Digests:
    """Checksums of the packed tensors by layer and key, of an output that was verified against its source."""
    convert_checkpoint(ConvertOptions(source=path, out=out, target=Target(90), workers=1))
    verify(out, path)
    return {
        name: {
            f"{part}_{key}": tensor.sha256
            for part, sub in layer.sublayers.items()
            for key, tensor in sub.tensors.items()
        }
        for name, layer in read_manifest(out).layers.items()
    }


@st.composite
def variants(draw: st.DrawFn) -> tuple[Case, str, str, int, int, str]:
    """A family, a format, a naming, a number of shards, a seed for the order, and a prefix."""
    case = draw(st.sampled_from(CASES))
    format = draw(st.sampled_from(FORMATS))
    namings = ["own", *LINEARS]
    if case.stacked and format not in ("fp8_block", "fp8_tensor"):
        namings.remove("own")  # one tensor for all experts is written by no producer in these formats
    if format == "fp8_block" and case.gated and ".experts" in case.place:
        namings += ["fused", "transposed"]
    prefix = draw(st.sampled_from(list(PREFIXES))) if case.vllm.startswith("model.layers") and case.served else None
    if prefix is not None and not case.place.startswith("model.layers"):
        prefix = None
    naming, shards, seed = draw(st.sampled_from(namings)), draw(st.integers(1, 5)), draw(st.integers(0, 2**31))
    return case, format, naming, shards, seed, "model." if prefix is None else prefix


@pytest.mark.slow
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
@given(variant=variants())
def test_same_bytes_in_every_form(variant: tuple[Case, str, str, int, int, str]) -> None:
    case, format, naming, shards, seed, prefix = variant
    values, writer = make_values(case, format, seed)
    if format == "fp8_tensor" and case.gated:  # one scale for both, so that no form has to repeat it for every row
        for held in (held for experts in values.values() for held in experts):
            held[1]["weight_scale"] = held[0]["weight_scale"]
    place = case.place.replace("model.layers", f"{prefix}layers", 1) if prefix != "model." else case.place
    tensors = other_tensors(case, place=place) | expert_tensors(case, values, naming, place)
    names = list(tensors)
    np.random.default_rng(seed).shuffle(names)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        plain = other_tensors(case) | expert_tensors(case, values, "gate_proj")
        expected = packed(write_model(root / "plain", case, plain, writer), root / "plain-out")
        shuffled = {name: tensors[name] for name in names}
        found = packed(write_model(root / "varied", case, shuffled, writer, shards=shards), root / "varied-out")
    layers = [case.vllm.format(layer) for layer in case.layers]
    assert list(expected) == layers
    vllm = PREFIXES[prefix] if prefix != "model." else "model."
    renamed = [name.replace("model.layers", f"{vllm}layers", 1) if prefix != "model." else name for name in layers]
    assert list(found) == renamed
    assert list(found.values()) == list(expected.values())


GPT_OSS = Case(
    "gpt_oss",
    {"num_local_experts": E, "intermediate_size": 96, "hidden_act": "silu"},
    intermediate=96,
    router="mlp.router.weight",
    beside=("mlp.router.bias",),
)


def gpt_oss_twins(tmp_path: Path) -> tuple[Path, Path]:
    """The same MXFP4 experts with biases as OpenAI stores them and as llm-compressor does, one by one."""
    values, writer = make_values(GPT_OSS, "ct_mxfp4", bias=True)
    single = other_tensors(GPT_OSS) | expert_tensors(GPT_OSS, values)
    fused: Tensors = dict(other_tensors(GPT_OSS))
    for layer, experts in values.items():
        head = GPT_OSS.place.format(layer)
        for name, indexes in (("gate_up_proj", (0, 1)), ("down_proj", (2,))):
            for parameter, suffix in (("weight_packed", "blocks"), ("weight_scale", "scales"), ("bias", "bias")):
                rows = [np.stack([held[index][parameter].array for index in indexes], 1) for held in experts]
                whole = np.stack([turn.reshape(-1, *turn.shape[2:]) for turn in rows])
                if suffix == "blocks":
                    whole = whole.reshape(*whole.shape[:2], -1, 16)
                fused[f"{head}.{name}_{suffix}"] = RawTensor(experts[0][2][parameter].dtype, whole)
    one = write_model(tmp_path / "single", GPT_OSS, single, writer)
    other = write_model(tmp_path / "fused", GPT_OSS, fused, make_values(GPT_OSS, "mxfp4_gpt_oss")[1])
    return one, other


def test_gpt_oss_rows_alternate_whether_stored_so_or_not(tmp_path: Path) -> None:
    single, fused = gpt_oss_twins(tmp_path)
    expected = packed(fused, tmp_path / "fused-out")
    assert packed(single, tmp_path / "single-out") == expected
    for out in ("fused-out", "single-out"):
        layer = next(iter(read_manifest(tmp_path / out).layers.values()))
        assert (layer.gate_up, layer.has_bias, layer.activation_function) == ("interleaved", True, "swigluoai")


def test_step3_scales_that_differ_between_gate_and_up_become_rows_own(tmp_path: Path) -> None:
    case = next(case for case in CASES if case.stacked)
    values, writer = make_values(case, "fp8_tensor")
    plain = other_tensors(case) | expert_tensors(case, values, "gate_proj")
    stacked = other_tensors(case) | expert_tensors(case, values)
    assert f"{case.place.format(1)}.gate_proj.weight" in stacked
    expected = packed(write_model(tmp_path / "plain", case, plain, writer), tmp_path / "plain-out")
    assert packed(write_model(tmp_path / "stacked", case, stacked, writer), tmp_path / "stacked-out") == expected


def test_gpt_oss_scales_of_gate_and_up_must_be_one(tmp_path: Path) -> None:
    values, writer = make_values(GPT_OSS, "ct_nvfp4", bias=True)
    tensors = other_tensors(GPT_OSS) | expert_tensors(GPT_OSS, values)
    for name in [name for name in tensors if name.endswith("up_proj.weight_global_scale")]:
        tensors[name] = tensors[name.replace("up_proj", "gate_proj")]
    head = "model.layers.1.mlp.experts.2"
    path = write_model(tmp_path / "equal", GPT_OSS, tensors, writer)
    assert len(packed(path, tmp_path / "equal-out")) == 3
    other = f"{head}.up_proj.weight_global_scale"
    tensors[other] = RawTensor("F32", tensors[other].array * np.float32(2))
    path = write_model(tmp_path / "unequal", GPT_OSS, tensors, writer)
    with pytest.raises(CheckpointError) as raised:
        packed(path, tmp_path / "unequal-out")
    assert str(raised.value) == (
        f"tensor {other}: expected the scale of gate, whose rows alternate with those of up in this family's kernels, "
        "found another"
    )


def test_gpt_oss_rows_that_are_packed_together_stay_apart_and_are_noted(tmp_path: Path) -> None:
    values, writer = make_values(GPT_OSS, "awq", group_size=32)
    tensors = other_tensors(GPT_OSS) | expert_tensors(GPT_OSS, values)
    path = write_model(tmp_path / "m", GPT_OSS, tensors, writer)
    plan = plan_of(path)
    assert not plan.layers[0].is_interleaved
    assert any("gate and up rows stay apart, as they are packed: " in note for note in plan.notes)
    packed(path, tmp_path / "out")


@pytest.mark.parametrize("count", [2, 3])
def test_ernie_vl_has_a_layer_for_text_and_one_for_vision(tmp_path: Path, count: int) -> None:
    base = next(case for case in CASES if case.model_type == "ernie4_5_moe")
    config = base.config | {
        "moe_num_experts": [count, 2],
        "moe_intermediate_size": [256, 128],
        "moe_layer_start_index": [1, 1],
        "moe_layer_end_index": [2, 2],
    }
    case = Case("ernie4_5_moe_vl", config, layers=(1, 2), experts=2, beside=("mlp.gate.weight_1",))
    text, vision = (Case("", {}, layers=(1, 2), experts=n, intermediate=i) for n, i in ((count, 256), (2, 128)))
    (texts, writer), (visions, _) = make_values(text, "fp8_block"), make_values(vision, "fp8_block", seed=1)
    both = {layer: texts[layer] + visions[layer] for layer in texts}
    path = write_model(tmp_path / "both", case, other_tensors(case) | expert_tensors(case, both), writer)
    found = packed(path, tmp_path / "out")
    head = "language_model.model.layers"
    assert list(found) == [f"{head}.{n}.mlp.{kind}_experts" for n in (1, 2) for kind in ("text", "vision")]
    for kind, one, values in (("text", text, texts), ("vision", vision, visions)):
        told = {"num_experts": one.experts, "mlp_only_layers": [0]}
        alone = Case("qwen3_moe", told, layers=(1, 2), experts=one.experts)
        tensors = other_tensors(alone) | expert_tensors(alone, values)
        expected = packed(write_model(tmp_path / kind, alone, tensors, writer), tmp_path / f"{kind}-out")
        assert [digests for name, digests in found.items() if kind in name] == list(expected.values())


def test_bf16_granite_of_fused_linears_is_told_to_have_nothing_quantized(tmp_path: Path) -> None:
    case = next(case for case in CASES if case.model_type == "granitemoe")
    tensors = other_tensors(case)
    for layer in case.layers:
        head = f"model.layers.{layer}.block_sparse_moe"
        tensors[f"{head}.input_linear.weight"] = bf16(np.zeros((E, 2 * 128, H), np.float32))
        tensors[f"{head}.output_linear.weight"] = bf16(np.zeros((E, H, 128), np.float32))
    path = write_model(tmp_path / "m", case, tensors, make_values(case, "fp8_block")[1])
    with pytest.raises(NothingToConvertError, match="its routed experts are stored as BF16, not quantized"):
        packed(path, tmp_path / "out")
