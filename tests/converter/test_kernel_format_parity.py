"""The kernel format of small random sublayers is what Humming's own kernels made of them on a GPU."""

from __future__ import annotations

import gzip
import hashlib
import importlib.metadata
import json
import os
from pathlib import Path
from typing import Any

import pytest
from tests.support.sublayers import raw, sources

from humming_convert.errors import UnsupportedError
from humming_convert.kernel_format import PackedSublayer, convert_to_humming_moe_kernel_format
from humming_convert.target import Target

PARITY = Path(__file__).parent.parent / "data" / "parity"
CASES: list[dict[str, Any]] = json.loads(gzip.decompress((PARITY / "cases.json.gz").read_bytes()))
VERSIONS = ("0.1.19", "0.1.20")


def humming_version() -> str:
    """The version that is tested; HUMMING_EXPECTED names the one that must be."""
    version = importlib.metadata.version("humming-kernels")
    assert version == os.environ.get("HUMMING_EXPECTED", version)
    assert version in VERSIONS
    return version


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_equals_what_a_gpu_made(case: dict[str, Any]) -> None:
    expected = case["expect"]
    if isinstance(expected, dict):
        own = expected[humming_version()]
        expected = next(expected[v] for v in VERSIONS if expected[v] != "same") if own == "same" else own
    shape = {"n": case["n"], "k": case["k"]}
    tensors = sources(
        case["weight"],
        **shape,
        experts=case["experts"],
        seed=case["seed"],
        dtype=case["dtype"],
        bias=case["bias"],
    )
    before = {name: raw(tensor) for name, tensor in tensors.items()}

    def convert() -> PackedSublayer:
        return convert_to_humming_moe_kernel_format(
            tensors,
            case["weight"],
            case["input"],
            shape_n=case["n"],
            shape_k=case["k"],
            shape_n_stacks=case["stacks"],
            num_experts=case["experts"],
            has_bias=case["bias"],
            param_dtype=case["dtype"],
            target=Target(case["sm"], tuple(case["cuda"])),
        )

    if expected == "incompatible":
        with pytest.raises(UnsupportedError, match=f"that Humming's kernels take with them on sm{case['sm']}"):
            convert()
        return
    packed = convert()
    digests = {
        name: [
            str(tensor.dtype).removeprefix("torch."),
            list(tensor.shape),
            hashlib.sha256(raw(tensor)).hexdigest()[:24],
        ]
        for name, tensor in packed.tensors.items()
    }
    assert digests == expected["out"]
    config = json.loads(packed.config.to_str())
    assert {name: config[name] for name in expected["config"]} == expected["config"]
    assert {name: raw(tensor) for name, tensor in tensors.items()} == before


def test_every_recorded_case_is_there() -> None:
    refused = [case for case in CASES if case["expect"] == "incompatible" or "incompatible" in case["expect"].values()]
    assert (len(CASES) - len(refused), len(refused)) == (449, 461)
