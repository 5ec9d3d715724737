"""One packed MoE layer on a device without any serving framework: tensors and configs for `humming.forward`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from humming_loader.checkpoint import cached_manifest, find_output, manifest_stamp
from humming_loader.host_layout import check_flags, check_host
from humming_loader.load import Move, empty_target, fill
from humming_loader.parts import find_part
from humming_loader.slicing import LayerSlice, slice_layer


@dataclass(frozen=True, slots=True)
class SublayerTensors:
    """w13 or w2 of a rank. `config` is Humming's LayerConfig; the tensors are what `humming_forward` takes by name."""

    config: Any
    tensors: Mapping[str, torch.Tensor]

    def forward_arguments(self) -> dict[str, Any]:
        """Keyword arguments of `humming.forward.humming_forward`, all but inputs, outputs, locks and the routing."""
        return {"config": self.config, **self.tensors}


@dataclass(frozen=True, slots=True)
class HummingExpertsTensors:
    """The rank's experts of one layer: `w13`, `w2`; `part` says which experts and what intermediate size."""

    layer_name: str
    w13: SublayerTensors
    w2: SublayerTensors
    part: LayerSlice
    activation_function: str
    gate_up: str


def load_layer(
    path: str | Path,
    layer_name: str,
    device: torch.device | str,
    tp_rank: int = 0,
    tp_size: int = 1,
    expert_ids: Sequence[int] | None = None,
) -> HummingExpertsTensors:
    """Load one layer's packed experts from a converted checkpoint (a folder or a Hub repository) to `device`.

    Only the rank's bytes are read: `expert_ids` are logical experts in local order (None: all), `tp_rank` of `tp_size`
    cuts the intermediate size, or takes what was packed for that rank (`convert --tp`). On a CUDA device the checkpoint
    must fit it. Raises LoaderError's family.
    """
    root = find_output(path)
    manifest = cached_manifest(root, manifest_stamp(root))
    layer = find_part(manifest, layer_name, tp_rank, tp_size)
    from humming_loader import humming_host

    where = torch.device(device)
    if where.type == "cuda":
        host = humming_host.probe_host(where)
        check_host(manifest, host)
        for name, entry in layer.sublayers.items():
            flags = humming_host.resolve_flags(entry.layer_config, host.sm)
            check_flags(f"{layer_name}.{name}", manifest, entry, flags, host)
    part = slice_layer(layer_name, layer, tp_rank=tp_rank, tp_size=tp_size, experts=expert_ids)
    tensors = {
        name: {key: empty_target(piece, where) for key, piece in sublayer.tensors.items()}
        for name, sublayer in part.sublayers.items()
    }
    fill(root, moves_of(part, tensors))
    built = {
        name: SublayerTensors(
            humming_host.local_config(layer.sublayers[name].layer_config, sublayer, len(part.experts)), tensors[name]
        )
        for name, sublayer in part.sublayers.items()
    }
    return HummingExpertsTensors(layer_name, built["w13"], built["w2"], part, layer.activation_function, layer.gate_up)


def moves_of(part: LayerSlice, tensors: Mapping[str, Mapping[str, torch.Tensor]]) -> list[Move]:
    """The reads that fill `tensors` (by sublayer and name) with a rank's part, the largest first."""
    moves = [
        Move(piece, part.experts, tensors[name][key])
        for name, sublayer in part.sublayers.items()
        for key, piece in sublayer.tensors.items()
    ]
    return sorted(moves, key=lambda move: -move.target.numel() * move.target.element_size())
