"""On a GPU host: does `--device cuda` write the very bytes of `--device cpu`?

    python scripts/gpu_check.py --checkpoints DIR [--large] [--work DIR] [--json FILE]

Converts every checkpoint under DIR twice and compares the manifests' checksums of all packed tensors; with --large also
one layer of DeepSeek-V3 size in block FP8 (256 experts, hidden 7168, intermediate 2048: 11.3 GB), with times.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from humming_convert.errors import ConvertError
from humming_convert.options import ConvertOptions, default_workers
from humming_convert.pipeline import convert_checkpoint
from humming_convert.target import Target
from humming_convert.verify_output import read_manifest

DEEPSEEK_V3 = {"experts": 256, "hidden": 7168, "intermediate": 2048}


@dataclass(frozen=True)
class Row:
    """One checkpoint: how many packed tensors were compared, which differ, and seconds on each device."""

    name: str
    activation: str
    tensors: int
    differing: tuple[str, ...]
    cpu_seconds: float
    cuda_seconds: float
    refused: str = ""


def digests(out: Path) -> dict[str, str]:
    """Checksum of every packed tensor of an output."""
    layers = read_manifest(out).layers.values()
    tensors = [
        tensor for layer in layers for part in layer.sublayers.values() for tensor in part.tensors.values()
    ]
    return {tensor.name: tensor.sha256 for tensor in tensors}


def compare(source: Path, work: Path, activation: str, sm: int) -> Row:
    """Convert on both devices; a checkpoint that is refused must be refused alike."""
    seconds, found, refusals = {}, {}, {}
    for device in ("cpu", "cuda"):
        out = work / device
        options = ConvertOptions(
            source=source,
            out=out,
            target=Target(sm),
            activation=activation,
            device=device,
            workers=default_workers() if device == "cpu" else 2,
            hash_source=False,
        )
        start = time.perf_counter()
        try:
            convert_checkpoint(options)
            found[device] = digests(out)
        except ConvertError as error:
            refusals[device] = f"{type(error).__name__}: {error}"
        seconds[device] = time.perf_counter() - start
        shutil.rmtree(out, ignore_errors=True)
    name = source.name
    if refusals:
        same = refusals.get("cpu") == refusals.get("cuda")
        unlike = () if same else (f"refused on one device only: {refusals}",)
        return Row(name, activation, 0, unlike, seconds["cpu"], seconds["cuda"], refusals.get("cpu", "")[:200])
    ours, theirs = found["cpu"], found["cuda"]
    differing = tuple(sorted(key for key in ours.keys() | theirs.keys() if ours.get(key) != theirs.get(key)))
    return Row(name, activation, len(ours), differing, seconds["cpu"], seconds["cuda"])


def write_deepseek_layer(folder: Path) -> None:
    """A model folder with one MoE layer of DeepSeek-V3 size in block FP8: random codes without NaN."""
    folder.mkdir(parents=True)
    experts, hidden, intermediate = DEEPSEEK_V3["experts"], DEEPSEEK_V3["hidden"], DEEPSEEK_V3["intermediate"]
    shapes = {
        "gate_proj": (intermediate, hidden),
        "up_proj": (intermediate, hidden),
        "down_proj": (hidden, intermediate),
    }
    header: dict[str, object] = {}
    offset = 0
    order = []
    for expert in range(experts):
        for name, (n, k) in shapes.items():
            prefix = f"model.layers.0.mlp.experts.{expert}.{name}"
            parts = (
                (".weight", "F8_E4M3", (n, k), n * k),
                (".weight_scale_inv", "F32", (n // 128, k // 128), n * k // 4096),
            )
            for suffix, dtype, shape, size in parts:
                header[prefix + suffix] = {
                    "dtype": dtype,
                    "shape": list(shape),
                    "data_offsets": [offset, offset + size],
                }
                order.append((dtype, shape))
                offset += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    rng = np.random.default_rng(0)
    noise = rng.integers(0, 256, size=(1 << 26), dtype=np.uint8) & 0xF7
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for dtype, shape in order:
            count = int(np.prod(shape))
            if dtype == "F32":
                file.write(rng.uniform(0.01, 0.1, size=shape).astype(np.float32).tobytes())
            else:
                start = int(rng.integers(0, noise.size - count))
                file.write(noise[start : start + count].data)
    config = {
        "model_type": "deepseek_v3",
        "hidden_size": hidden,
        "moe_intermediate_size": intermediate,
        "n_routed_experts": experts,
        "num_hidden_layers": 1,
        "first_k_dense_replace": 0,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
        "quantization_config": {
            "quant_method": "fp8",
            "weight_block_size": [128, 128],
            "activation_scheme": "dynamic",
        },
    }
    (folder / "config.json").write_text(json.dumps(config))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--checkpoints", type=Path, required=True)
    parser.add_argument("--activations", default="a16,fp8,int8")
    parser.add_argument("--large", action="store_true")
    parser.add_argument("--work", type=Path)
    parser.add_argument("--json", type=Path, default=Path("gpu-check.json"))
    given = parser.parse_args()
    major, minor = torch.cuda.get_device_capability()
    sm = major * 10 + minor
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(dir=given.work) as folder:
        work = Path(folder)
        for source in sorted(path for path in given.checkpoints.iterdir() if path.is_dir()):
            rows += [compare(source, work, activation, sm) for activation in given.activations.split(",")]
            print(
                *(
                    f"{row.name} {row.activation}: {row.tensors} tensors, {len(row.differing)} differ {row.refused}"
                    for row in rows[-len(given.activations.split(",")) :]
                ),
                sep="\n",
                flush=True,
            )
        if given.large:
            write_deepseek_layer(work / "deepseek-v3-layer")
            rows.append(compare(work / "deepseek-v3-layer", work, "a16", sm))
            print(rows[-1], flush=True)
    device = {"name": torch.cuda.get_device_name(), "torch": torch.__version__}
    given.json.write_text(json.dumps({"device": device, "rows": [asdict(row) for row in rows]}, indent=1))
    differing = [row for row in rows if row.differing]
    compared = sum(row.tensors for row in rows)
    print(f"{len(rows)} conversions, {compared} packed tensors compared, {len(differing)} conversions differ")
    sys.exit(1 if differing else 0)


if __name__ == "__main__":
    main()
