"""What a tiny model of each family looks like on disk and in vLLM 0.33.0, written down from their own definitions.

Nothing here imports the packages under test. Sizes: 4 experts, hidden size 256, intermediate size 128, unless a case
says otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

E, H, INNER = 4, 256, 128

GATE_UP_DOWN = ("gate_proj", "up_proj", "down_proj")
W1_W3_W2 = ("w1", "w3", "w2")
CORRECTION = "mlp.gate.e_score_correction_bias"


@dataclass(frozen=True)
class Case:
    """One family. `names` are its own names of gate (None: there is none), up and down; `{}` is the layer's number.

    `router` and `beside` are tensors of a layer with experts below its own name, `elsewhere` whole names; all of them
    must pass through.
    """

    model_type: str
    config: dict[str, Any]
    place: str = "model.layers.{}.mlp.experts"
    vllm: str = "model.layers.{}.mlp.experts"
    layers: tuple[int, ...] = (0, 1, 2)
    names: tuple[str | None, str, str] = GATE_UP_DOWN
    hidden: int = H
    intermediate: int = INNER
    experts: int = E
    activation: str = "silu"
    activations: tuple[str, ...] = ()
    router: str = "mlp.gate.weight"
    beside: tuple[str, ...] = ()
    elsewhere: tuple[str, ...] = ()
    text: str = ""
    stacked: bool = False
    served: bool = True
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def gated(self) -> bool:
        """Whether there is a gate."""
        return self.names[0] is not None

    def whole_config(self) -> dict[str, Any]:
        """config.json without a quantization section."""
        config = {"hidden_size": H, "num_hidden_layers": 3, "dtype": "bfloat16", **self.config}
        if not self.text:
            return {"model_type": self.model_type, **config}
        inner: dict[str, Any] = {"model_type": self.text, **config}
        for key in reversed(self.extra.get("nested", ("text_config",))):
            inner = {key: inner}
        return {"model_type": self.model_type, "dtype": "bfloat16", **inner}


def mixtral_like(model_type: str, **more: Any) -> Case:  # noqa: ANN401 - a case's fields
    config = {"num_local_experts": E, "intermediate_size": INNER, "hidden_act": "silu"}
    place = "model.layers.{}.block_sparse_moe.experts"
    fields = {"place": place, "vllm": place, "names": W1_W3_W2, "router": "block_sparse_moe.gate.weight"} | more
    return Case(model_type, config | fields.pop("config", {}), **fields)


def qwen_like(model_type: str, **more: Any) -> Case:  # noqa: ANN401 - a case's fields
    config = {"num_experts": E, "moe_intermediate_size": INNER, "intermediate_size": 512, "hidden_act": "silu"}
    return Case(model_type, config | more.pop("config", {}), **more)


def deepseek_like(model_type: str, **more: Any) -> Case:  # noqa: ANN401 - a case's fields
    config = {"n_routed_experts": E, "moe_intermediate_size": INNER, "intermediate_size": 512, "hidden_act": "silu"}
    config |= {"first_k_dense_replace": 1}
    fields = {"layers": (1, 2), "beside": ("mlp.shared_experts.up_proj.weight", CORRECTION)} | more
    return Case(model_type, config | fields.pop("config", {}), **fields)
