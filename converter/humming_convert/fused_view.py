"""Tensors that hold every expert, seen as one expert's: what the formats of single experts can then be asked about."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from humming_convert.formats.base import Accepted, Facts
from humming_convert.layer_index import LayerTensors
from humming_convert.plan import Step
from humming_convert.source import TensorHeader

# Values along K in one element as it is stored; other dtypes are packed in ways that shapes alone do not tell.
_PER_ELEMENT = {"F8_E4M3": 1, "F8_E5M2": 1, "I8": 1, "U8": 2}
# The names of one expert's tensors, for what is written after a fused tensor's own name.
_PARAMETERS = {"": "weight", "scale_inv": "weight_scale_inv"}


@dataclass(frozen=True, slots=True)
class FusedView:
    """`layer` under the names of one expert's tensors; `is_transposed`: matrices are stored `[E, K, N]`."""

    layer: LayerTensors
    is_transposed: bool

    def facts(self, projection: str) -> dict[str, Facts]:
        """dtype and shape of each parameter of one expert, rows (N) first."""
        return {name: self._of_one(facts) for name, facts in self.layer.facts(projection).items()}

    def _of_one(self, facts: Facts) -> Facts:
        shape = facts.shape[1:]
        if self.is_transposed and len(shape) == 2:
            shape = (shape[1], shape[0])
        return Facts(facts.dtype, shape)

    def adapted(self, answer: Accepted, projections: tuple[str, ...]) -> Accepted:
        """What a format says of one expert, made to fit the tensors of all."""
        if self.is_transposed:
            rules = (answer.rules, answer.inputs)
            matrices = {name for name, facts in self.layer.facts(projections[0]).items() if len(facts.shape) == 3}
            turned = [
                tuple(
                    replace(rule, steps=(Step("transpose"), *rule.steps)) if rule.parameter in matrices else rule
                    for rule in some
                )
                for some in rules
            ]
            answer = replace(answer, rules=turned[0], inputs=turned[1])
        if projections == ("gate_up",):
            rows = answer.stacks_n[0]
            answer = replace(answer, stacks_n=(rows // 2, rows // 2))
        return answer


def fused_view(layer: LayerTensors, hidden: int | None) -> FusedView | None:
    """The layer as one expert's, None where its tensors leave a doubt about which axis is which.

    `hidden` is the experts' hidden size as config.json says; it is asked only where gate and up are tensors of their
    own, because their shapes then are down's turned round in both cases.
    """
    headers = {key: _renamed(parameters) for key, parameters in layer.headers.items()}
    renamed = LayerTensors(layer.name, headers, is_fused=True)
    first = renamed.facts("gate_up") or renamed.facts("up")
    down = renamed.facts("down")
    if any("weight" not in facts or len(facts["weight"].shape) != 3 for facts in (first, down)):
        return None
    count = _PER_ELEMENT.get(first["weight"].dtype)
    if count is None or first["weight"].dtype != down["weight"].dtype:
        return None
    (_, rows, columns), (_, other_rows, other_columns) = first["weight"].shape, down["weight"].shape
    if "gate_up" not in {projection for _, projection in headers}:
        is_transposed = columns * count != hidden and rows * count == hidden
        return FusedView(renamed, is_transposed) if hidden in (rows * count, columns * count) else None
    if columns * count == other_rows and rows == 2 * other_columns * count:
        return FusedView(renamed, is_transposed=False)
    if rows * count == other_columns and columns == 2 * other_rows * count:
        return FusedView(renamed, is_transposed=True)
    return None


def _renamed(parameters: Mapping[str, TensorHeader]) -> dict[str, TensorHeader]:
    return {_PARAMETERS.get(name, name): header for name, header in parameters.items()}
