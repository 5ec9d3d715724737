"""What a serving host must have in common with the checkpoint, and the words in which it is refused."""

from __future__ import annotations

from typing import Any

import pytest
from tests.loader.test_slicing import int4_layer

from humming_loader.entries import LayerEntry, Manifest, Passthrough, Producer, Source, TargetEntry
from humming_loader.errors import HostMismatchError
from humming_loader.host_layout import Host, check_flags, check_host

HOST = Host(90, "0.1.19", (13, 0))


def manifest(layer: LayerEntry | None = None, **changes: Any) -> Manifest:  # noqa: ANN401 - fields of Manifest
    """A manifest for sm90 and humming-kernels 0.1.19 with one layer."""
    values: dict[str, Any] = {
        "format_version": 1,
        "producer": Producer("humming-convert", "1.0"),
        "created": "2026-12-01T00:00:00+00:00",
        "source": Source("org/model", None, ()),
        "target": TargetEntry(90, (13, 0), False),
        "humming_version": "0.1.19",
        "param_dtype": "bfloat16",
        "activation": "a16",
        "layers": {"model.layers.0.mlp.experts": layer or int4_layer()},
        "passthrough": Passthrough((), 0, 0),
        "side_files": (),
    }
    return Manifest(**(values | changes))


def test_same_host() -> None:
    check_host(manifest(), HOST)


def test_other_architecture() -> None:
    with pytest.raises(HostMismatchError) as caught:
        check_host(manifest(), Host(100, "0.1.19", (13, 1)))
    assert str(caught.value) == (
        "converted checkpoint: packed for sm90, this GPU is sm100. Convert again for this host: humming-convert "
        "org/model OUT --target sm100 --cuda 13.1 --activation a16 --dtype bfloat16 (with humming-kernels 0.1.19)"
    )


def test_versions_of_one_layout_for_16_bit_activations() -> None:
    check_host(manifest(), Host(90, "0.1.20", (13, 0)))


def test_other_version() -> None:
    with pytest.raises(HostMismatchError, match=r"packed with humming-kernels 0\.1\.19, 0\.2\.0 is installed here"):
        check_host(manifest(), Host(90, "0.2.0", (13, 0)))


def test_narrow_activations_need_the_very_version() -> None:
    layer = int4_layer()
    narrow = {
        name: type(entry)(
            **{field: getattr(entry, field) for field in entry.__slots__}
            | {"layer_config": entry.layer_config.replace('"a_dtype": "bfloat16"', '"a_dtype": "float8e4m3"')}
        )
        for name, entry in layer.sublayers.items()
    }
    changed = LayerEntry(**{field: getattr(layer, field) for field in layer.__slots__} | {"sublayers": narrow})
    with pytest.raises(HostMismatchError, match=r"0\.1\.20 is installed here"):
        check_host(manifest(changed), Host(90, "0.1.20", (13, 0)))


def test_other_kind_of_device() -> None:
    with pytest.raises(HostMismatchError, match="packed for an NVIDIA GPU, this is a PPU"):
        check_host(manifest(), Host(90, "0.1.19", (13, 0), is_ppu=True))


def test_flags_are_named_with_both_values() -> None:
    entry = int4_layer().sublayers["w13"]
    actual = dict(entry.fingerprint.flags) | {"use_native_dequant": True, "should_apply_bs_on_c": True}
    check_flags("layer.w13", manifest(), entry, entry.fingerprint.flags, HOST)
    with pytest.raises(HostMismatchError) as caught:
        check_flags("layer.w13", manifest(), entry, actual, HOST)
    assert str(caught.value) == (
        "layer.w13: layout flag use_native_dequant is False in the checkpoint and True on this host; layout flag "
        "should_apply_bs_on_c is False in the checkpoint and True on this host. Convert again for this host: "
        "humming-convert org/model OUT --target sm90 --cuda 13.0 --activation a16 --dtype bfloat16 (with "
        "humming-kernels 0.1.19)"
    )
