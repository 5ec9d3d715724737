"""Whether this host's GPU and Humming lay weights out as the checkpoint was: by version, SM and layout flag.

The decision takes plain values; what asks Humming and the GPU for them is `probe_host` and `resolve_flags`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from humming_loader.entries import Manifest, SublayerEntry
from humming_loader.errors import HostMismatchError
from humming_loader.fingerprint import FLAGS, Fingerprint, compare
from humming_loader.layout import bits_of, parse_layer_config
from humming_loader.parts import convert_call, tp_size_of

# Versions whose bytes were found equal for 16-bit activations in every recorded case; with narrower ones they differ.
SAME_A16_LAYOUT: frozenset[str] = frozenset({"0.1.19", "0.1.20"})


@dataclass(frozen=True, slots=True)
class Host:
    """The serving host: compute capability (90), Humming's version, CUDA compiler version, PPU or not."""

    sm: int
    humming_version: str
    cuda: tuple[int, int]
    is_ppu: bool = False


def check_host(manifest: Manifest, host: Host) -> None:
    """Raises HostMismatchError for another GPU architecture or a Humming version of another layout."""
    problems = []
    if manifest.target.sm != host.sm:
        problems.append(f"packed for sm{manifest.target.sm}, this GPU is sm{host.sm}")
    if manifest.target.is_ppu != host.is_ppu:
        problems.append(f"packed for {_kind(manifest.target.is_ppu)}, this is {_kind(host.is_ppu)}")
    if not _same_version(manifest, host.humming_version):
        problems.append(
            f"packed with humming-kernels {manifest.humming_version}, {host.humming_version} is installed here "
            "and its layout is not known to be the same"
        )
    if problems:
        raise HostMismatchError("converted checkpoint", tuple(problems), mend(manifest, host))


def check_flags(where: str, manifest: Manifest, entry: SublayerEntry, actual: Mapping[str, bool], host: Host) -> None:
    """Raises HostMismatchError naming each layout flag that this host resolves otherwise, with both values."""
    resolved = Fingerprint({name: actual[name] for name in FLAGS}, entry.fingerprint.probe)
    problems = tuple(
        f"layout flag {found.name} is {found.expected} in the checkpoint and {found.actual} on this host"
        for found in compare(entry.fingerprint, resolved)
    )
    if problems:
        raise HostMismatchError(where, problems, mend(manifest, host))


def mend(manifest: Manifest, host: Host) -> str:
    """The call that makes the checkpoint for `host`."""
    return convert_call(
        manifest, tp_size_of(manifest.layers), sm=host.sm, cuda=host.cuda, humming_version=host.humming_version
    )


def _kind(is_ppu: bool) -> str:
    return "a PPU" if is_ppu else "an NVIDIA GPU"


def _same_version(manifest: Manifest, installed: str) -> bool:
    if manifest.humming_version == installed:
        return True
    return {manifest.humming_version, installed} <= SAME_A16_LAYOUT and all(
        bits_of(parse_layer_config(entry.layer_config)["a_dtype"]) == 16
        for layer in manifest.layers.values()
        for entry in layer.sublayers.values()
    )
