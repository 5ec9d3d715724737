"""Every integer format, packed and decoded again, held against the numbers that it was written from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.checkpoints import Edit
from tests.support.integer_checkpoints import (
    Config,
    Integers,
    Writer,
    auto_round_config,
    ct_bytes_config,
    gptq_config,
    humming_config,
    make_integers,
    quark_config,
    write_awq,
    write_ct_bytes,
    write_gptq,
    write_gptq_with_borrows,
    write_humming,
    write_quark,
)
from tests.support.values import dequantized

from humming_convert.options import ConvertOptions
from humming_convert.pipeline import convert_checkpoint
from humming_convert.target import Target
from humming_convert.verify import verify
from humming_convert.verify_output import read_manifest

PROJECTIONS = {"w13": ("gate_proj", "up_proj"), "w2": ("down_proj",)}
GPTQMODEL = {"meta": {"quantizer": ["gptqmodel:7.7.0"]}}


def assert_values(
    path: Path,
    integers: Integers,
    writer: Writer,
    quantization: Config,
    *,
    activation: str = "a16",
    sm: int = 90,
    edit: Edit | None = None,
    **options: Any,  # noqa: ANN401 - of make_integers
) -> None:
    """Convert, verify against the source, and compare every packed weight with what was drawn."""
    source = make_integers(path / "source", integers, writer, quantization, edit=edit, **options)
    out = path / "out"
    convert_checkpoint(ConvertOptions(source=source, out=out, target=Target(sm), workers=2, activation=activation))
    report = verify(out, source)
    assert report.source is not None
    compared = 0
    for layer_name, layer in read_manifest(out).layers.items():
        for name, entry in layer.sublayers.items():
            found = dequantized(out, entry)
            for expert in range(layer.num_experts):
                parts = [integers.values[f"{layer_name}.{expert}.{part}"] for part in PROJECTIONS[name]]
                np.testing.assert_array_equal(found[expert], np.concatenate(parts))
                compared += found[expert].size
    assert compared == report.source.weights > 0


@pytest.mark.parametrize("group", [32, -1])
@pytest.mark.parametrize("sym", [True, False])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
def test_gptq(version: str, bits: int, sym: bool, group: int, tmp_path: Path) -> None:
    integers = Integers(bits=bits, group=group, sym=sym, negative_scales=sym)
    writer = write_gptq(1 if version == "gptq" else 0)
    config = gptq_config(integers, checkpoint_format=version)
    assert_values(tmp_path, integers, writer, config, layers=1, experts=2)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_zero_points_of_zero_that_gptqmodel_borrowed_for(bits: int, tmp_path: Path) -> None:
    integers = Integers(bits=bits, sym=False, least_zero=0, most_zero=1)
    config = gptq_config(integers, **GPTQMODEL)
    assert_values(tmp_path, integers, write_gptq_with_borrows, config, layers=1, experts=2)


def test_zero_points_of_zero_at_3_bit_are_taken_modulo_8(tmp_path: Path) -> None:
    integers = Integers(bits=3, sym=False, least_zero=0, most_zero=1)
    assert_values(tmp_path, integers, write_gptq(1), gptq_config(integers, **GPTQMODEL), layers=1, experts=2)


@pytest.mark.parametrize("sym", [True, False])
@pytest.mark.parametrize("zeros_of", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("label", ["gptq", "gptq_v2"])
def test_a_label_that_lies_does_no_harm_to_symmetric_weights(
    label: str, zeros_of: str, sym: bool, tmp_path: Path
) -> None:
    integers = Integers(sym=sym, most_zero=14)
    writer = write_gptq(1 if zeros_of == "gptq" else 0)
    config = gptq_config(integers, checkpoint_format=label)
    if sym or label == zeros_of:
        assert_values(tmp_path, integers, writer, config, layers=1, experts=2)
    else:
        with pytest.raises(AssertionError):  # nothing in such a file tells
            assert_values(tmp_path, integers, writer, config, layers=1, experts=2)


@pytest.mark.parametrize("sym", [True, False])
def test_a_last_group_that_is_shorter(sym: bool, tmp_path: Path) -> None:
    integers = Integers(group=128, sym=sym)
    assert_values(
        tmp_path, integers, write_gptq(1), gptq_config(integers), hidden=320, intermediate=192, layers=1, experts=2
    )


@pytest.mark.parametrize("sym", [True, False])
@pytest.mark.parametrize(
    ("packing", "offset", "bits"),
    [
        *(("auto_round:auto_gptq", 1, bits) for bits in (3, 4, 5, 8)),
        *(("auto_round", 0, bits) for bits in (2, 6)),
        *(("auto_round:gptqmodel", 0, bits) for bits in (4, 7)),
    ],
)
def test_auto_round(packing: str, offset: int, bits: int, sym: bool, tmp_path: Path) -> None:
    integers = Integers(bits=bits, sym=sym, group=64, negative_scales=sym)
    writer = write_gptq(offset, g_idx=packing != "auto_round")
    assert_values(tmp_path, integers, writer, auto_round_config(integers, packing), layers=1, experts=2)


@pytest.mark.parametrize("sym", [True, False])
def test_auto_round_in_awq_packing(sym: bool, tmp_path: Path) -> None:
    integers = Integers(sym=sym)
    config = auto_round_config(integers, "auto_round:auto_awq")
    assert_values(tmp_path, integers, write_awq, config, layers=1, experts=2)


def test_symmetric_weights_of_a_packing_that_is_not_known(tmp_path: Path) -> None:
    integers = Integers()
    config = auto_round_config(integers, "auto_round:exllamav2")
    assert_values(tmp_path, integers, write_gptq(1), config, layers=1, experts=2)


@pytest.mark.parametrize(("sym", "group"), [(True, 64), (False, 64), (False, -1)])
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 7, 8])
def test_ct_bytes(bits: int, sym: bool, group: int, tmp_path: Path) -> None:
    integers = Integers(bits=bits, group=group, sym=sym, least_zero=0)
    assert_values(tmp_path, integers, write_ct_bytes, ct_bytes_config(integers), layers=1, experts=2)


@pytest.mark.parametrize("kind", ["int", "float"])
@pytest.mark.parametrize("activation", ["checkpoint", "int8", "fp8"])
def test_ct_w4a8_for_activations_of_8_bit(activation: str, kind: str, tmp_path: Path) -> None:
    inputs = {"num_bits": 8, "type": kind, "strategy": "token", "dynamic": True, "symmetric": True}
    integers = Integers(group=-1)
    config = ct_bytes_config(integers, inputs)
    assert_values(tmp_path, integers, write_ct_bytes, config, activation=activation, layers=1, experts=2)


@pytest.mark.parametrize("order", ["reorder", "order"])
@pytest.mark.parametrize(
    ("dtype", "symmetric", "sym"), [("int4", True, True), ("int4", False, False), ("uint4", None, False)]
)
def test_quark(dtype: str, symmetric: bool | None, sym: bool, order: str, tmp_path: Path) -> None:
    integers = Integers(sym=sym, least_zero=0, group=32)
    config = quark_config(integers, dtype, order, symmetric)
    assert_values(tmp_path, integers, write_quark(dtype, order), config, layers=1, experts=2)


@pytest.mark.parametrize(("sym", "group"), [(True, 128), (False, 128), (False, -1)])
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 7, 8])
def test_humming(bits: int, sym: bool, group: int, tmp_path: Path) -> None:
    integers = Integers(bits=bits, group=group, sym=sym, least_zero=0)
    assert_values(tmp_path, integers, write_humming, humming_config(integers), layers=1, experts=2)


@pytest.mark.parametrize("sm", [80, 100, 120])
def test_other_architectures(sm: int, tmp_path: Path) -> None:
    integers = Integers(sym=False)
    assert_values(tmp_path, integers, write_gptq(1), gptq_config(integers), sm=sm, layers=1, experts=2)


def test_codes_without_the_lowest_become_sign_and_magnitude_and_stay_the_same_numbers(tmp_path: Path) -> None:
    integers = Integers(lowest=False)
    assert_values(tmp_path, integers, write_gptq(1), gptq_config(integers), layers=1, experts=2)
    (layer,) = read_manifest(tmp_path / "out").layers.values()
    assert layer.sublayers["w13"].weight_schema["b_dtype"] == "float4e0m3"


def test_biases_follow(tmp_path: Path) -> None:
    integers = Integers()
    assert_values(tmp_path, integers, write_gptq(1), gptq_config(integers), bias=True, layers=1, experts=2)


FORMATS: dict[str, tuple[tuple[int, ...], Any]] = {
    "gptq": ((2, 3, 4, 8), lambda i: (write_gptq(1), gptq_config(i))),
    "gptq_v2": ((2, 3, 4, 8), lambda i: (write_gptq(0), gptq_config(i, checkpoint_format="gptq_v2"))),
    "auto_round": ((2, 3, 4, 5, 6, 7, 8), lambda i: (write_gptq(0), auto_round_config(i, "auto_round"))),
    "awq": ((4,), lambda i: (write_awq, auto_round_config(i, "auto_round:auto_awq"))),
    "ct_bytes": ((2, 3, 4, 5, 6, 7, 8), lambda i: (write_ct_bytes, ct_bytes_config(i))),
    "quark": ((4,), lambda i: (write_quark("uint4", "reorder"), quark_config(i, "uint4", "reorder", None))),
    "humming": ((2, 3, 4, 5, 6, 7, 8), lambda i: (write_humming, humming_config(i))),
}


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    form=st.sampled_from(sorted(FORMATS)),
    data=st.data(),
    group=st.sampled_from([16, 32, 64, 128, 48, -1]),
    sym=st.booleans(),
    sizes=st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3)),
    shards=st.integers(1, 5),
    seed=st.integers(0, 1000),
)
def test_any_width_group_shape_and_sharding(
    form: str,
    data: st.DataObject,
    group: int,
    sym: bool,
    sizes: tuple[int, int, int],
    shards: int,
    seed: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    bits, made = FORMATS[form]
    integers = Integers(bits=data.draw(st.sampled_from(bits)), group=group, sym=sym and form != "quark")
    unit = 96 if group == 48 else 128 if group == 128 else 64
    if group == -1 and form in ("awq", "quark"):
        # AWQ's schema has no scale for a whole row, and Quark writes none.
        integers.group = 64
    writer, config = made(integers)
    hidden, intermediate, experts = unit * sizes[0], unit * sizes[1], sizes[2]
    assert_values(
        tmp_path_factory.mktemp("any"),
        integers,
        writer,
        config,
        hidden=hidden,
        intermediate=intermediate,
        experts=experts,
        layers=1,
        shards=shards,
        seed=seed,
    )
