"""What Humming asks a GPU before it chooses kernels: its answers for GPUs that were looked at, or from a file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from humming_convert.errors import Problem, UnsupportedError
from humming_convert.files import read_regular
from humming_convert.target import Target

# Humming's names and units: bytes, kHz, bits, GB/s, and tera operations a second by dtype.
TYPES: dict[str, type] = {
    "name": str,
    "sm_version": int,
    "sm_count": int,
    "max_threads_per_block": int,
    "max_threads_per_sm": int,
    "max_registers_per_sm": int,
    "l1_cache_size": int,
    "l2_cache_size": int,
    "default_smem_size": int,
    "max_smem_size": int,
    "memory_clock_khz": int,
    "memory_bus_width": int,
    "sm_clock_khz": int,
    "memory_bandwidth_gbps": float,
    "tensorcore_tops": dict,
}

# Only GPUs whose answers were seen; for any other they come from a file.
KNOWN: dict[str, dict[str, Any]] = {
    "NVIDIA H200": {
        "name": "NVIDIA H200",
        "sm_version": 90,
        "sm_count": 132,
        "max_threads_per_block": 1024,
        "max_threads_per_sm": 2048,
        "max_registers_per_sm": 65536,
        "l1_cache_size": 262144,
        "l2_cache_size": 62914560,
        "default_smem_size": 49152,
        "max_smem_size": 232448,
        "memory_clock_khz": 3201000,
        "memory_bus_width": 6144,
        "sm_clock_khz": 1980000,
        "memory_bandwidth_gbps": 4916.736,
        "tensorcore_tops": {
            "float16": 1070.53056,
            "bfloat16": 1070.53056,
            "float8e4m3": 2141.06112,
            "float8e5m2": 2141.06112,
            "int8": 2141.06112,
            "int4": 4282.12224,
        },
    }
}

_PRINT = "python -m humming_convert.device_facts > FILE"


def find_facts(target: Target, name: str | None, file: Path | None) -> dict[str, Any]:
    """The facts of the GPU `name` (None: the one that is known for `target`), or those in `file`, by `TYPES`.

    Raises UnsupportedError for a GPU that is not known, one of another architecture, or a file of another form.
    """
    hint = f"give --device-facts FILE, made on a machine with that GPU by: {_PRINT}"
    if file is not None:
        found = _from_file(file)
    else:
        same = [key for key, facts in KNOWN.items() if facts["sm_version"] == target.sm]
        wanted = name or next(iter(same), None)
        if wanted not in KNOWN:
            expected = "one whose facts are known: " + ", ".join(KNOWN)
            raise UnsupportedError([Problem("--device-name", expected, wanted or f"none of {target}", hint)])
        found = KNOWN[wanted]
    if found["sm_version"] != target.sm:
        other = f"{found['name']}, sm{found['sm_version']}"
        raise UnsupportedError([Problem("--device-name", f"a GPU of {target}", other, hint)])
    return found


def facts_of_this_gpu() -> dict[str, Any]:
    """The facts of this machine's first GPU. Raises RuntimeError or ImportError where there is none."""
    from humming_convert.host.target import humming

    info = humming().device.DeviceInfo(0)
    return {name: getattr(info, name) for name in TYPES}


def _from_file(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(read_regular(path))
    except (OSError, ValueError) as error:
        raise UnsupportedError([Problem(str(path), "the facts of a GPU in JSON", str(error))]) from error
    if not isinstance(document, Mapping):
        raise UnsupportedError([Problem(str(path), "an object", type(document).__name__)])
    problems = [
        Problem(f"{path}: {name}", f"a value of type {kind.__name__}", repr(document.get(name))[:80])
        for name, kind in TYPES.items()
        if not isinstance(document.get(name), (int, float) if kind is float else kind)
    ]
    if problems:
        raise UnsupportedError(problems)
    return {name: document[name] for name in TYPES}


if __name__ == "__main__":
    print(json.dumps(facts_of_this_gpu(), indent=1))
