"""Edited manifests and damaged experts files, each refused before any kernel runs."""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from scripts.serve_layers import Result, build


def refusals(work: Path) -> Result:
    """Edited manifests and damaged files are refused before any kernel; the messages."""
    import humming.ops

    launched: Counter[str] = Counter()
    original = humming.ops.humming_gemm

    def counted(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - passed through
        launched["gemm"] += 1
        return original(*args, **kwargs)

    humming.ops.humming_gemm = counted
    flags = (
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
    cases: dict[str, Callable[[dict[str, Any], Path], None]] = {
        "other SM": lambda document, _: document["target"].update(sm=100),
        "other version": lambda document, _: document.update(humming_version="0.1.3"),
        "truncated file": lambda _, folder: _experts_file(
            folder, lambda path: os.truncate(path, path.stat().st_size - 7)
        ),
        "flipped byte": lambda _, folder: _experts_file(folder, _flip),
    }
    for flag in flags:
        cases[f"flag {flag}"] = partial(_toggle, flag)
    source = work / "qwen3-fp8-block-e8.out"
    messages, ok = {}, True
    for case, edit in {"untouched": lambda *_: None, **cases}.items():
        folder = work / "refusal.out"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(source, folder)
        document = json.loads((folder / "humming/manifest.json").read_text())
        edit(document, folder)
        (folder / "humming/manifest.json").write_text(json.dumps(document))
        os.environ["HUMMING_LOADER_VERIFY"] = "1"
        try:
            build(folder)
            messages[case] = "loaded"
        except Exception as error:
            messages[case] = f"{type(error).__name__}: {error}"
        wanted = {"untouched": "loaded", "truncated file": "FileError", "flipped byte": "ChecksumError"}
        ok &= messages[case].startswith(wanted.get(case, "HostMismatchError"))
    return {"ok": ok and not launched, "messages": messages, "kernels": dict(launched)}


def _toggle(flag: str, document: dict[str, Any], _: Path) -> None:
    for layer in document["layers"].values():
        values = layer["sublayers"]["w13"]["fingerprint"]["flags"]
        values[flag] = not values[flag]


def _experts_file(folder: Path, damage: Callable[[Path], None]) -> None:
    damage(sorted((folder / "humming").glob("experts-*.safetensors"))[0])


def _flip(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))
