"""Turn what the user typed into one frozen `ConvertOptions`, looking at the machine where `auto` was asked for."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

from humming_convert.errors import Problem, UnsupportedError
from humming_convert.hub_destination import PushOptions
from humming_convert.hub_id import HubId, parse_hub_id
from humming_convert.options import ConvertOptions, default_workers, parse_size
from humming_convert.target import DEFAULT_CUDA, Target, parse_cuda, parse_sm

DEFAULT_SM = 90


def resolve_options(
    source: Path | HubId,
    out: Path,
    *,
    target: str,
    cuda: str | None,
    activation: str,
    dtype: str | None,
    device: str,
    quant_config: Path | None,
    max_shard_size: str,
    overwrite: bool,
    workers: int | None,
    hash_source: bool,
    tp: int,
    low_disk: bool = False,
    push: str | None = None,
    private: bool = False,
) -> tuple[ConvertOptions, tuple[str, ...]]:
    """The options of a conversion and what the user should be told about choices made for them.

    Raises UnsupportedError for a value that cannot be, a device that is not there, or a GPU asked to
    convert for another architecture than its own.
    """
    notes: list[str] = []
    if low_disk and isinstance(source, Path):
        notes.append("--low-disk: nothing to save, the source is no repository of the Hub")
    if private and push is None:
        raise UnsupportedError([Problem("--private", "--push ORG/NAME with it", "none")])
    device_sm = None if device == "cpu" and target != "auto" else visible_sm(device)
    sm = _resolve_sm(target, device_sm, notes)
    chosen = _resolve_device(device, device_sm, sm)
    options = ConvertOptions(
        source=source,
        out=out,
        target=Target(sm, parse_cuda(cuda) if cuda else DEFAULT_CUDA),
        activation=activation,
        dtype=dtype,
        device=chosen,
        quant_config=quant_config,
        max_shard_bytes=parse_size(max_shard_size),
        overwrite=overwrite,
        workers=workers or default_workers(),
        hash_source=hash_source,
        tp_size=tp,
        low_disk=low_disk,
        push=push_options(push, private=private) if push is not None else None,
    )
    return options, tuple(notes)


def push_options(
    text: str, *, revision: str | None = None, private: bool = False, create_pr: bool = False, dry_run: bool = False
) -> PushOptions:
    """Where to publish: `ORG/NAME`. Raises UnsupportedError for what is no name of a repository."""
    found = parse_hub_id(text)
    if found is None or found.revision is not None:
        raise UnsupportedError([Problem("the repository to push to", "ORG/NAME", repr(text))])
    return PushOptions(found.repo, revision, private, create_pr, dry_run)


def visible_sm(device: str) -> int | None:
    """The architecture of the GPU that `device` names (or the first), None when there is no GPU.

    Raises UnsupportedError when `device` names a GPU that is not there or is no device name.
    """
    match = re.fullmatch(r"auto|cpu|cuda(?::(\d+))?", device)
    if match is None:
        raise UnsupportedError([Problem("--device", "auto, cpu, cuda or cuda:i", repr(device))])
    index = int(match[1] or 0)
    sms = _visible_sms()
    if index < len(sms):
        return sms[index]
    if device in ("auto", "cpu"):
        return None
    found = f"{len(sms)} CUDA device(s) here"
    raise UnsupportedError([Problem("--device", f"a CUDA device for {device!r}", found, "use --device cpu")])


def _visible_sms() -> list[int]:
    """The architecture of every visible GPU. Without NVIDIA's driver there is none, and torch is not imported."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return []
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [major * 10 + minor for major, minor in map(torch.cuda.get_device_capability, range(count))]


def _resolve_sm(target: str, device_sm: int | None, notes: list[str]) -> int:
    if target.strip().lower() != "auto":
        return parse_sm(target)
    if device_sm is not None:
        notes.append(f"target: sm{device_sm}, this machine's GPU (choose another with --target)")
        return device_sm
    notes.append(
        f"target: sm{DEFAULT_SM} (Hopper), because this machine has no GPU (choose another with --target)"
    )
    return DEFAULT_SM


def _resolve_device(device: str, device_sm: int | None, sm: int) -> str:
    if device == "auto":
        return "cuda" if device_sm == sm else "cpu"
    if device != "cpu" and device_sm != sm:
        expected = f"a GPU of the target's architecture, sm{sm}"
        hint = "Humming's kernels run only there: use --device cpu, which converts for any target"
        raise UnsupportedError([Problem("--device", expected, f"sm{device_sm}", hint)])
    return device
