from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import pytest

from humming_loader.errors import ManifestError
from humming_loader.fields import is_plain_relative
from humming_loader.fingerprint import FLAGS, Difference, Fingerprint, compare
from humming_loader.manifest import (
    FileEntry,
    LayerEntry,
    Manifest,
    Passthrough,
    Producer,
    Source,
    SourceFileEntry,
    SublayerEntry,
    TargetEntry,
    TensorEntry,
    from_json,
    layer_metadata,
    parse_layer_metadata,
    stored_name,
    to_json,
)

LAYER = "model.layers.3.mlp.experts"
ABC = "abcdef0123456789" * 4


def sublayer(name: str, n: int, stacks: tuple[int, ...]) -> SublayerEntry:
    file = "humming/experts-00001.safetensors"
    weight = TensorEntry(file, stored_name(LAYER, name, "weight"), "I32", (4, 8, 512), ABC)
    scale = TensorEntry(file, stored_name(LAYER, name, "weight_scale"), "BF16", (4, 1, n), ABC)
    return SublayerEntry(
        tensors={"weight": weight, "weight_scale": scale},
        shape_n=n,
        shape_k=128,
        shape_n_stacks=stacks,
        source_schema={"quant_method": "awq", "bits": 4},
        source_input_schema=None,
        weight_schema={"quant_method": "humming", "b_dtype": "uint4"},
        input_schema={"a_dtype": "float8e4m3"},
        layer_config='{"shape_n": 256}',
        fingerprint=Fingerprint({flag: flag == "use_raw_weight" for flag in FLAGS}, ABC),
        slicing={"weight": {"n": 64}},
    )


def example() -> Manifest:
    layer = LayerEntry(
        family="qwen3_moe",
        num_experts=4,
        hidden_size=128,
        intermediate_size=64,
        activation_function="silu",
        is_gated=True,
        gate_up="split",
        has_bias=False,
        format="awq",
        sublayers={"w13": sublayer("w13", 128, (64, 64)), "w2": sublayer("w2", 128, (128,))},
    )
    return Manifest(
        format_version=1,
        producer=Producer("humming-convert", "0.1.0"),
        created="2026-12-01T00:00:00Z",
        source=Source("org/model", None, (SourceFileEntry("model.safetensors", 12, None),)),
        target=TargetEntry(90, (13, 0), False),
        humming_version="0.1.19",
        param_dtype="bfloat16",
        activation="a16",
        layers={LAYER: layer},
        passthrough=Passthrough((FileEntry("model.safetensors", 10, ABC),), 3, 99),
        side_files=(FileEntry("tokenizer.json", 5, ABC),),
    )


def test_round_trip_is_equal_and_immutable() -> None:
    manifest = example()
    assert from_json(to_json(manifest)) == manifest
    assert from_json(to_json(manifest).encode()) == manifest
    with pytest.raises(AttributeError):
        manifest.activation = "fp8"  # type: ignore[misc]


def test_experts_files_are_listed_once() -> None:
    assert example().experts_files() == ("humming/experts-00001.safetensors",)


def test_layer_metadata_round_trip_through_strings() -> None:
    layers = example().layers
    metadata = layer_metadata(layers, "0.1.0")
    assert metadata["format"] == "pt"
    assert metadata["humming_convert"] == "0.1.0"
    assert parse_layer_metadata(metadata) == layers


def test_file_without_layers_is_refused() -> None:
    with pytest.raises(ManifestError) as caught:
        parse_layer_metadata({"format": "pt"})
    assert str(caught.value) == "__metadata__: expected the key humming_layers, found format"


Edit = Callable[[dict[str, Any]], object]
W13 = f"layers['{LAYER}'].sublayers['w13']"


def w13(document: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = document["layers"][LAYER]["sublayers"]["w13"]
    return found


REFUSALS: dict[str, tuple[Edit, str]] = {
    "unknown key": (lambda d: d.update(extra=1), "manifest: expected no other keys, found extra"),
    "missing key": (lambda d: d.pop("activation"), "activation: expected a value, found nothing"),
    "newer version": (
        lambda d: d.update(format_version=2),
        "format_version: expected 1, the one this version reads, found 2",
    ),
    "version is no number": (
        lambda d: d.update(format_version=True),
        "format_version: expected an integer of at least 0, found True",
    ),
    "other producer": (
        lambda d: d["producer"].update(name="x"),
        "producer.name: expected one of humming-convert, found 'x'",
    ),
    "path leaves": (
        lambda d: d["side_files"][0].update(name="../a"),
        "side_files[0].name: expected a plain path inside the folder, found '../a'",
    ),
    "absolute path": (
        lambda d: w13(d)["tensors"]["weight"].update(file="/etc/x"),
        f"{W13}.tensors['weight'].file: expected a plain path inside the folder, found '/etc/x'",
    ),
    "digest": (
        lambda d: d["passthrough"]["files"][0].update(sha256="ABC"),
        "passthrough.files[0].sha256: expected 64 hexadecimal digits, found 'ABC'",
    ),
    "cuda": (lambda d: d["target"].update(cuda=[13]), "target.cuda: expected two integers, found [13]"),
    "negative shape": (
        lambda d: w13(d)["tensors"]["weight"].update(shape=[4, -1]),
        f"{W13}.tensors['weight'].shape: expected a list of integers of at least 0, found [4, -1]",
    ),
    "unknown tensor": (
        lambda d: w13(d)["tensors"].update(scales=w13(d)["tensors"]["weight"]),
        f"{W13}.tensors['scales']: expected one of weight, weight_scale, zero_point, weight_scale_2, bias, "
        "input_scale, input_scale_2, found scales",
    ),
    "name of another layer": (
        lambda d: w13(d)["tensors"]["weight"].update(name="model.layers.4.mlp.experts.w13_weight"),
        f"{W13}.tensors['weight'].name: expected one of {LAYER}.w13_weight, "
        "found 'model.layers.4.mlp.experts.w13_weight'",
    ),
    "no weight": (
        lambda d: w13(d)["tensors"].pop("weight"),
        f"{W13}.tensors: expected a weight with 4 experts on axis 0, found none",
    ),
    "experts differ": (
        lambda d: d["layers"][LAYER].update(num_experts=5),
        f"{W13}.tensors: expected a weight with 5 experts on axis 0, found shape [4, 8, 512]",
    ),
    "stacks differ": (
        lambda d: w13(d).update(shape_n_stacks=[64, 65]),
        f"{W13}.shape_n_stacks: expected a sum of 128, found [64, 65]",
    ),
    "sublayer missing": (
        lambda d: d["layers"][LAYER]["sublayers"].pop("w2"),
        f"layers['{LAYER}'].sublayers: expected w13 and w2, found w13",
    ),
    "flag missing": (
        lambda d: w13(d)["fingerprint"]["flags"].pop("use_flat_weight"),
        f"{W13}.fingerprint.flags.use_flat_weight: expected a value, found nothing",
    ),
    "flag is no boolean": (
        lambda d: w13(d)["fingerprint"]["flags"].update(use_flat_weight=1),
        f"{W13}.fingerprint.flags.use_flat_weight: expected true or false, found 1",
    ),
    "gate_up": (
        lambda d: d["layers"][LAYER].update(gate_up="mixed"),
        f"layers['{LAYER}'].gate_up: expected one of split, interleaved, found 'mixed'",
    ),
    "list for object": (lambda d: d.update(layers=[]), "layers: expected an object, found []"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refusals_name_field_expected_and_found(case: str) -> None:
    edit, message = REFUSALS[case]
    document = copy.deepcopy(json.loads(to_json(example())))
    edit(document)
    with pytest.raises(ManifestError) as caught:
        from_json(json.dumps(document))
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"format_version": 1, "format_version": 1}', "each key once, found 'format_version' twice"),
        ("[]", "manifest: expected a JSON object, found list"),
        ("{", "text that does not parse"),
        ('{"a": NaN}', "manifest: expected finite numbers, found NaN"),
        (b"\xff\xfe{", "text that does not parse"),
    ],
)
def test_text_that_is_not_one_strict_object(text: str | bytes, message: str) -> None:
    with pytest.raises(ManifestError) as caught:
        from_json(text)
    assert message in str(caught.value)


def test_every_field_of_the_document_is_required() -> None:
    document = json.loads(to_json(example()))
    opaque = ("source_schema", "weight_schema", "input_schema", "slicing")

    def paths(node: dict[str, Any], prefix: tuple[str, ...]) -> list[tuple[str, ...]]:
        found = []
        for key, value in node.items():
            found.append((*prefix, key))
            if isinstance(value, dict) and key not in opaque:
                found.extend(paths(value, (*prefix, key)))
        return found

    optional_entries = {LAYER, "weight_scale"}
    for path in paths(document, ()):
        if path[-1] in optional_entries:
            continue
        broken = copy.deepcopy(document)
        node = broken
        for key in path[:-1]:
            node = node[key]
        del node[path[-1]]
        with pytest.raises(ManifestError):
            from_json(json.dumps(broken))


@pytest.mark.parametrize(
    ("name", "plain"),
    [
        *((name, True) for name in ("a", "a/b.c", "..a")),
        *((name, False) for name in ("", "/a", "a/../b", "./a", "a//b", "a/", "a\\b", "a\0", "..")),
    ],
)
def test_plain_relative_names(name: str, plain: bool) -> None:
    assert is_plain_relative(name) is plain


def test_compare_names_every_difference() -> None:
    expected = Fingerprint(dict.fromkeys(FLAGS, False), ABC)
    assert compare(expected, replace(expected)) == []
    actual = Fingerprint(dict(expected.flags) | {"use_flat_weight": True}, "0" * 64)
    assert compare(expected, actual) == [
        Difference("use_flat_weight", False, True),
        Difference("probe", ABC, "0" * 64),
    ]


def test_the_document_holds_plain_values_only() -> None:
    assert json.loads(to_json(example()))["layers"][LAYER] == json.loads(
        json.dumps(asdict(example().layers[LAYER]))
    )
