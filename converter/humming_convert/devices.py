"""Where slices are converted: the devices of a run, a stream for each of its threads, and the way back to the host."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from humming_convert.target import Target

_local = threading.local()


def devices_of(device: str, target: Target) -> tuple[torch.device, ...]:
    """What `--device` stands for: the CPU, one GPU, or with `cuda` every visible GPU of the target's architecture."""
    chosen = torch.device(device)
    if chosen.type != "cuda" or chosen.index is not None:
        return (chosen,)
    found = [
        torch.device("cuda", index)
        for index, (major, minor) in enumerate(map(torch.cuda.get_device_capability, range(torch.cuda.device_count())))
        if major * 10 + minor == target.sm
    ]
    return tuple(found) or (chosen,)


@contextmanager
def on_device(device: torch.device) -> Iterator[None]:
    """On a GPU, queue this thread's work in a stream of its own: copies and kernels of different threads overlap."""
    if device.type != "cuda":
        yield
        return
    streams: dict[torch.device, torch.cuda.Stream] = _local.__dict__.setdefault("streams", {})
    if device not in streams:
        streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(streams[device]):
        yield


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` in host memory, complete; from a GPU through pinned memory, which torch keeps and uses again."""
    if tensor.device.type != "cuda":
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    host.copy_(tensor, non_blocking=True)
    torch.cuda.current_stream(tensor.device).synchronize()
    return host
