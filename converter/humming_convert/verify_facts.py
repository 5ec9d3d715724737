"""Hold what the manifest says of each layer against the source's plan, and against Humming asked again.

The packed bytes are decoded elsewhere; here are the facts that a loader believes without looking at bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from humming_convert.activation import input_schema_for
from humming_convert.errors import Problem
from humming_convert.plan import LayerPlan, SublayerPlan
from humming_convert.source import Checkpoint, Payload
from humming_convert.target import Target
from humming_loader.entries import LayerEntry, Manifest, SublayerEntry

Facts = dict[str, object]


def installed_humming() -> str | None:
    """The installed version of humming-kernels, None when there is none."""
    try:
        return version("humming-kernels")
    except PackageNotFoundError:
        return None


def layer_problems(layer: LayerPlan, entry: LayerEntry) -> Iterator[Problem]:
    """Every fact of a layer's entry that is not the plan's."""
    wanted: Facts = {
        "family": layer.family,
        "num_experts": layer.num_experts,
        "hidden_size": layer.hidden_size,
        "intermediate_size": layer.intermediate_size,
        "activation_function": layer.activation_function,
        "is_gated": layer.is_gated,
        "gate_up": "interleaved" if layer.is_interleaved else "split",
        "has_bias": layer.has_bias,
        "format": " + ".join(sorted({sublayer.format for sublayer in layer.sublayers})),
        "tensor_parallel": _part_facts(layer),
    }
    found_part = None if entry.tensor_parallel is None else asdict(entry.tensor_parallel)
    found_facts = {name: getattr(entry, name) for name in wanted} | {"tensor_parallel": found_part}
    yield from _differences(layer.layer_name, wanted, found_facts)
    for sublayer in layer.sublayers:
        packed = entry.sublayers[sublayer.name]
        facts: Facts = {
            "source_schema": sublayer.source_schema,
            "source_input_schema": sublayer.input_schema,
            "shape_n": sublayer.shape_n,
            "shape_k": sublayer.shape_k,
            "shape_n_stacks": sublayer.shape_n_stacks,
        }
        found: Facts = {name: getattr(packed, name) for name in facts}
        yield from _differences(f"{layer.layer_name} {sublayer.name}", facts, found)


def _part_facts(layer: LayerPlan) -> Facts | None:
    if layer.part is None:
        return None
    return {key: value for key, value in asdict(layer.part).items() if key != "scale_fill"}


def layout_problems(
    layer: LayerPlan, entry: LayerEntry, manifest: Manifest, checkpoint: Checkpoint, payload: Payload
) -> Iterator[Problem]:
    """Every fact of the layout that Humming, asked again about the source's scales, answers otherwise.

    The installed humming-kernels must be the manifest's. Raises UnsupportedError when it does not take the source.
    """
    for sublayer in layer.sublayers:
        packed = entry.sublayers[sublayer.name]
        wanted = _resolved(layer, sublayer, packed, manifest, checkpoint, payload)
        found: Facts = {
            "weight_schema": packed.weight_schema,
            "input_schema": packed.input_schema,
            "layer_config": json.loads(packed.layer_config),
            "fingerprint flags": dict(packed.fingerprint.flags),
            "fingerprint probe": packed.fingerprint.probe,
            "slicing": packed.slicing,
        }
        yield from _differences(f"{layer.layer_name} {sublayer.name}", wanted, found)


def _resolved(
    layer: LayerPlan,
    sublayer: SublayerPlan,
    packed: SublayerEntry,
    manifest: Manifest,
    checkpoint: Checkpoint,
    payload: Payload,
) -> Facts:
    # torch and Humming are imported only where they are needed: the rest of verify does without them.
    from humming_convert.gather import Gatherer
    from humming_convert.kernel_format import SublayerConverter
    from humming_convert.layout_probe import fingerprint, layer_config_to_str, probe_digest
    from humming_convert.schemas import schema_to_dict
    from humming_convert.slicing_rules import slicing_rules

    gatherer = Gatherer(checkpoint, payload)
    schema = input_schema_for(manifest.activation, sublayer.input_schema)
    inputs = sublayer.input_tensors if schema is not None else ()
    given = manifest.target
    target = Target(given.sm, given.cuda, given.is_ppu)
    converter = SublayerConverter(
        sublayer.weight_schema,
        schema,
        shape_n=sublayer.shape_n,
        shape_k=sublayer.shape_k,
        shape_n_stacks=sublayer.shape_n_stacks,
        num_experts=layer.num_experts,
        has_bias=sublayer.has_bias,
        param_dtype=manifest.param_dtype,
        target=target,
        small={one.name: gatherer.stack(one) for one in (*sublayer.tensors, *inputs) if not one.is_weight},
    )
    # Whether the lowest code occurs is the codes' business, which are compared one by one: here either answer will do.
    converter.decide(has_lowest_code="e0m" not in str(packed.weight_schema.get("b_dtype")))
    flags = fingerprint(converter.config, target)
    has_input = converter.input_schema is not None and converter.config.a_dtype.num_bits != 16
    facts: Facts = {
        "weight_schema": schema_to_dict(converter.weight_schema),
        "input_schema": schema_to_dict(converter.input_schema) if has_input else None,
        "fingerprint flags": flags,
        "fingerprint probe": probe_digest(converter),
        "slicing": slicing_rules(sublayer.name, converter.config, flags),
    }
    # Where every weight has a say, so it has in the config.
    return facts if converter.whole else facts | {"layer_config": json.loads(layer_config_to_str(converter.config))}


def _differences(where: str, wanted: Mapping[str, object], found: Mapping[str, object]) -> Iterator[Problem]:
    for name, value in wanted.items():
        expected, actual = _plain(value), _plain(found[name])
        if expected == actual:
            continue
        if isinstance(expected, dict) and isinstance(actual, dict):
            keys = sorted(key for key in expected.keys() | actual.keys() if expected.get(key) != actual.get(key))
            expected, actual = ({key: side.get(key) for key in keys} for side in (expected, actual))
        yield Problem(f"{where}: {name}", f"{expected}, from the source", f"{actual}")


def _plain(value: object) -> Any:  # noqa: ANN401 - JSON
    return json.loads(json.dumps(value))
