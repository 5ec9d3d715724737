"""A routed-experts layer in float32 from a source checkpoint's own numbers: what kernels are held against.

Written from the formats' definitions for the models of `serve_models`; it shares no code with the converter.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import safe_open

_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
_AWQ = (0, 2, 4, 6, 1, 3, 5, 7)
Tensors = dict[str, torch.Tensor]


def read_layer(source: Path, layer_name: str) -> Tensors:
    """The layer's tensors by name below `layer_name.`"""
    prefix = f"{layer_name}."
    found = {}
    for path in sorted(source.glob("*.safetensors")):
        with safe_open(str(path), "pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                if name.startswith(prefix):
                    found[name.removeprefix(prefix)] = file.get_tensor(name)
    return found


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """Bytes `[..., C]` as codes `[..., 2C]`, low nibble first."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def _words(packed: torch.Tensor) -> torch.Tensor:
    """int32 words `[..., C]` as eight 4-bit codes each, least significant first."""
    shifts = torch.arange(0, 32, 4)
    return ((packed.to(torch.int64)[..., None] >> shifts) & 15).flatten(-2)


def _weight(group: Tensors) -> torch.Tensor:
    """One projection `[N, K]` in float32."""
    if "weight_scale_inv" in group:
        scale = group["weight_scale_inv"].float().repeat_interleave(128, 0).repeat_interleave(128, 1)
        return group["weight"].float() * scale
    if "qweight" in group:
        inverse = torch.tensor(_AWQ).argsort()
        codes, zeros = (
            _words(group[name]).view(len(group[name]), -1, 8)[..., inverse].flatten(-2)
            for name in ("qweight", "qzeros")
        )
        repeat = codes.shape[0] // zeros.shape[0]
        values = (codes - zeros.repeat_interleave(repeat, 0)) * group["scales"].float().repeat_interleave(repeat, 0)
        return values.T.contiguous()
    if "weight_global_scale" in group:
        values = _E2M1[_nibbles(group["weight_packed"]).long()]
        scale = group["weight_scale"].float() / group["weight_global_scale"].float()
        return values * scale.repeat_interleave(16, 1)
    codes = _words(group["weight_packed"]) - 8
    repeat = codes.shape[1] // group["weight_scale"].shape[1]
    return codes.float() * group["weight_scale"].float().repeat_interleave(repeat, 1)


def _mxfp4(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    values = _E2M1[_nibbles(blocks).long()] * torch.exp2(scales.float() - 127)[..., None]
    return values.flatten(-2)


class Reference:
    """The experts of one layer as float32 matrices on `device`; call it with hidden states and routing."""

    def __init__(self, source: Path, layer_name: str, device: str) -> None:
        tensors = read_layer(source, layer_name)
        self.is_gpt_oss = "gate_up_proj_blocks" in tensors
        self.bias13: torch.Tensor | None = None
        self.bias2: torch.Tensor | None = None
        if self.is_gpt_oss:
            self.w13 = _mxfp4(tensors["gate_up_proj_blocks"], tensors["gate_up_proj_scales"]).to(device)
            self.w2 = _mxfp4(tensors["down_proj_blocks"], tensors["down_proj_scales"]).to(device)
            self.bias13 = tensors["gate_up_proj_bias"].float().to(device)
            self.bias2 = tensors["down_proj_bias"].float().to(device)
            return
        experts = 1 + max(int(name.split(".")[0]) for name in tensors)
        names = ("w1", "w3", "w2") if "0.w1.qweight" in tensors else ("gate_proj", "up_proj", "down_proj")
        stacks = [[_weight(_group(tensors, f"{e}.{name}.")) for e in range(experts)] for name in names]
        gate, up, down = (torch.stack(stack) for stack in stacks)
        self.w13, self.w2 = torch.cat((gate, up), 1).to(device), down.to(device)

    def __call__(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """`[B, H]` float32 from hidden states `[B, H]`, routing weights and expert ids `[B, top_k]`."""
        out = torch.zeros_like(x, dtype=torch.float32)
        for expert in sorted(set(ids.flatten().tolist())):
            token, slot = (ids == expert).nonzero(as_tuple=True)
            hidden = x[token].float() @ self.w13[expert].T
            if self.bias13 is not None:
                hidden += self.bias13[expert]
            result = self._activate(hidden) @ self.w2[expert].T
            if self.bias2 is not None:
                result += self.bias2[expert]
            out.index_add_(0, token, result * weights[token, slot, None].float())
        return out

    def _activate(self, hidden: torch.Tensor) -> torch.Tensor:
        if not self.is_gpt_oss:
            gate, up = hidden.chunk(2, -1)
            return torch.nn.functional.silu(gate) * up
        gate, up = hidden[:, ::2].clamp(max=7.0), hidden[:, 1::2].clamp(-7.0, 7.0)
        return gate * torch.sigmoid(1.702 * gate) * (up + 1)


def _group(tensors: Tensors, prefix: str) -> Tensors:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
