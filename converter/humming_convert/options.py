"""Everything that a conversion may be told, as one frozen object, and the parsing of its values."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from humming_convert.errors import Problem, UnsupportedError
from humming_convert.hub_destination import PushOptions
from humming_convert.hub_id import HubId
from humming_convert.target import Target

DEFAULT_SHARD_BYTES = 5 * 10**9
PARAM_DTYPES = ("bfloat16", "float16")

_SIZE_UNITS = {
    "": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertOptions:
    """One conversion: where from, where to, for which target, and how.

    `device` is `cpu` or `cuda[:i]`; `dtype` is the parameter dtype (None: the checkpoint's own);
    `max_shard_bytes` bounds each file of passed-through tensors; `workers` converts that many slices at once.
    `tp_size` above 1 packs each tensor-parallel rank's part for itself.
    `low_disk` keeps no more of a repository on the disk than the layers under way need; `push` publishes the output.
    """

    source: Path | HubId
    out: Path
    target: Target
    activation: str = "a16"
    dtype: str | None = None
    device: str = "cpu"
    quant_config: Path | None = None
    max_shard_bytes: int = DEFAULT_SHARD_BYTES
    overwrite: bool = False
    workers: int = 1
    hash_source: bool = False
    tp_size: int = 1
    low_disk: bool = False
    push: PushOptions | None = None


def parse_size(text: str) -> int:
    """Bytes of `5GB`, `500MB`, `2GiB` or a plain number. Raises UnsupportedError for anything else or for 0."""
    match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,15})?)\s*([A-Za-z]*)", text.strip())
    unit = _SIZE_UNITS.get(match[2].upper()) if match else None
    size = int(float(match[1]) * unit) if match and unit else 0
    if size <= 0:
        raise UnsupportedError([Problem("--max-shard-size", "a size such as 5GB or 500MB", repr(text))])
    return size


def default_workers() -> int:
    """The number of processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
