"""The parity cases: random source tensors of one sublayer, under Humming's own schema names."""

from __future__ import annotations

import gzip
import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

DATA = Path(__file__).parent.parent / "data" / "parity"


def load_cases() -> list[dict[str, Any]]:
    """Every case of cases.json."""
    cases: list[dict[str, Any]] = json.loads(gzip.decompress((DATA / "cases.json.gz").read_bytes()))
    return cases


def source_tensors(case: dict[str, Any], schema: Any) -> dict[str, torch.Tensor]:  # noqa: ANN401
    """The case's source tensors, as inputs.py says; `schema` is Humming's weight schema object."""
    spec = importlib.util.spec_from_file_location("parity_inputs", DATA / "inputs.py")
    if spec is None or spec.loader is None:
        raise FileNotFoundError(DATA / "inputs.py")
    inputs = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(inputs)
    attrs = schema.get_tensors_attrs(
        case["n"],
        case["k"],
        param_dtype=getattr(torch, case["dtype"]),
        num_experts=case["experts"],
        has_bias=case["bias"],
        stack_size=len(case["stacks"]),
    )
    rng = np.random.default_rng(case["seed"])
    return {
        name: inputs.source_tensor(rng, name, tuple(attrs[name]["shape"]), attrs[name]["dtype"])
        for name in sorted(attrs)
    }
