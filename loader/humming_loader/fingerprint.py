"""What the packed bytes depend on beside the source: Humming's layout flags, and a probe's digest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

# Properties of humming.config.LayerConfig that decide where a weight or scale lies and how it is coded.
FLAGS: tuple[str, ...] = (
    "use_packed_k_layout",
    "use_fused_e8m0_scale",
    "use_int_weight_scale",
    "use_raw_weight",
    "use_flat_weight",
    "use_ldmatrix_dequant",
    "use_native_dequant",
    "use_block_scaled_mma",
    "should_apply_bs_on_c",
)

PROBE = "probe"


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """The nine `FLAGS` as resolved for a target; `probe`: sha256 of a fixed small conversion."""

    flags: Mapping[str, bool]
    probe: str


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing in which the host's layout is not the checkpoint's; `name` is a flag or `probe`."""

    name: str
    expected: bool | str
    actual: bool | str


def compare(expected: Fingerprint, actual: Fingerprint) -> list[Difference]:
    """Every difference between a checkpoint's fingerprint and a host's, flags first, then the probe."""
    found = [
        Difference(name, expected.flags[name], actual.flags[name])
        for name in FLAGS
        if expected.flags[name] != actual.flags[name]
    ]
    if expected.probe != actual.probe:
        found.append(Difference(PROBE, expected.probe, actual.probe))
    return found
