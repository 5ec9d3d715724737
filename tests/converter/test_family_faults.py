"""Removing, duplicating or renaming any one tensor of a family's experts is an error that names it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.checkpoints import Tensors, write_safetensors
from tests.support.family_case import Case
from tests.support.family_cases import CASES
from tests.support.family_checkpoints import expert_tensors, make_values, other_tensors, write_model
from tests.support.plans import plan_of

from humming_convert.errors import CheckpointError, ConvertError, UnsupportedError

FORMATS = ("fp8_tensor", "fp8_block", "ct_mxfp4", "awq", "ct_int4", "ct_w8a8_asym", "ct_nvfp4")
# A companion that says nothing that is not also said elsewhere may be gone; nothing else may.
SILENT = ("weight_shape", "input_global_scale")


class Chosen(NamedTuple):
    """A family, a format, and one of its experts' or routers' tensors that matters."""

    case: Case
    format: str
    name: str

    def tensors(self) -> Tensors:
        """All tensors of the model."""
        return all_tensors(self.case, self.format)


def all_tensors(case: Case, format: str) -> Tensors:
    values, _ = make_values(case, format)
    naming = "own" if not case.stacked or format == "fp8_block" else "gate_proj"
    return other_tensors(case) | expert_tensors(case, values, naming)


@st.composite
def chosen(draw: st.DrawFn) -> Chosen:
    case, format = draw(st.sampled_from(CASES)), draw(st.sampled_from(FORMATS))
    others = {name for name in other_tensors(case) if not name.endswith(case.router)}
    names = [name for name in all_tensors(case, format) if name not in others and not name.endswith(SILENT)]
    return Chosen(case, format, draw(st.sampled_from(names)))


examples = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)


def refused(folder: Path, case: Case, format: str, tensors: Tensors) -> str:
    path = write_model(folder, case, tensors, make_values(case, format)[1])
    with pytest.raises(ConvertError) as raised:
        plan_of(path)
    assert isinstance(raised.value, CheckpointError | UnsupportedError)
    return str(raised.value)


def layer_of(case: Case, name: str) -> str:
    """The words that a message about this tensor must hold: its layer, by number and prefix."""
    return name[: name.index("layers.") + len("layers.0.")]


@pytest.mark.slow
@examples
@given(one=chosen())
def test_removed(one: Chosen, tmp_path_factory: pytest.TempPathFactory) -> None:
    (case, format, name), tensors = one, one.tensors()
    del tensors[name]
    text = refused(tmp_path_factory.mktemp("m"), case, format, tensors)
    if not case.stacked or ".experts." in name or name.endswith(case.router):
        assert name in text
    assert layer_of(case, name) in text


@pytest.mark.slow
@examples
@given(one=chosen(), ending=st.sampled_from(["x", "_2", ".weight"]))
def test_renamed(one: Chosen, ending: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    (case, format, name), tensors = one, one.tensors()
    tensors[name + ending] = tensors.pop(name)
    text = refused(tmp_path_factory.mktemp("m"), case, format, tensors)
    assert layer_of(case, name) in text
    if not case.stacked:
        assert name in text


@pytest.mark.slow
@examples
@given(one=chosen())
def test_in_two_files(one: Chosen, tmp_path_factory: pytest.TempPathFactory) -> None:
    # Grok-2 was published so: one name in several files, each with a slice; the last one must not win.
    (case, format, name), tensors = one, one.tensors()
    path = write_model(tmp_path_factory.mktemp("m"), case, tensors, make_values(case, format)[1], shards=2)
    places = json.loads((path / "model.safetensors.index.json").read_text())["weight_map"]
    other = next(file for file in places.values() if file != places[name])
    held = {key: tensor for key, tensor in tensors.items() if places[key] == other}
    write_safetensors(path / other, held | {name: tensors[name]})
    with pytest.raises(CheckpointError, match="in one file") as raised:
        plan_of(path)
    assert f"tensor {name}: " in str(raised.value)


@pytest.mark.slow
@examples
@given(one=chosen())
def test_under_two_names(one: Chosen, tmp_path_factory: pytest.TempPathFactory) -> None:
    (case, format, name), tensors = one, one.tensors()
    others = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2", "w1": "linear", "w3": "up_proj", "w2": "down_proj"}
    others |= {"wgate": "w1", "linear": "w1", "linear_v": "w3", "linear_1": "w2"}
    head, separator, tail = name.rpartition(".experts.")
    if not separator:
        return  # a router, or a tensor that has no other name
    number, leaf, parameter = tail.split(".", 2)
    second = f"{head}.experts.{number}.{others[leaf]}.{parameter}"
    tensors[second] = tensors[name]
    text = refused(tmp_path_factory.mktemp("m"), case, format, tensors)
    assert f"tensor {second}: expected one name for it, found also {name}" in text
