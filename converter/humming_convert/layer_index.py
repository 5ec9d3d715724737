"""Sort a checkpoint's tensors into MoE layers by name, and check that each layer is whole."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from humming_convert.errors import Problem
from humming_convert.expert_names import ExpertName, may_be_expert, odd_number, parse_expert_name
from humming_convert.family import Family
from humming_convert.formats.base import Facts
from humming_convert.source import TensorHeader

_SAFE_NUMBER_OF_EXPERTS = 65_536


@dataclass(slots=True)
class LayerTensors:
    """The experts' tensors of one MoE layer: `headers[expert, projection][parameter]`, expert None: all.

    `is_fused` says that some tensor holds all experts, `is_mixed` that others hold one. `first` is the checkpoint's
    number of expert 0, where one list holds the experts of several layers.
    """

    name: ExpertName
    headers: dict[tuple[int | None, str], dict[str, TensorHeader]] = field(default_factory=dict)
    is_fused: bool = False
    is_mixed: bool = False
    first: int = 0

    def experts(self) -> list[int]:
        """The numbers of the experts that have a tensor of their own, in order."""
        return sorted({expert for expert, _ in self.headers if expert is not None})

    def projections(self, part: str, *, is_gated: bool) -> tuple[str, ...]:
        """What makes up `part` (w13 or w2), in the order in which it is stacked."""
        if part == "w2":
            return ("down",)
        if any(projection == "gate_up" for _, projection in self.headers):
            return ("gate_up",)
        return ("gate", "up") if is_gated else ("up",)

    def tensors(self) -> Iterable[TensorHeader]:
        """Every tensor of the layer."""
        return (header for parameters in self.headers.values() for header in parameters.values())

    def facts(self, projection: str) -> dict[str, Facts]:
        """dtype and shape of each parameter of a projection: those of most experts, where they differ."""
        found: dict[str, Facts] = {}
        differ: set[str] = set()
        of_projection = [parameters for (_, name), parameters in self.headers.items() if name == projection]
        for parameters in of_projection:
            for parameter, header in parameters.items():
                known = found.get(parameter)
                if known is None:
                    found[parameter] = Facts(header.dtype, header.shape)
                elif known.dtype != header.dtype or known.shape != header.shape:
                    differ.add(parameter)
        for parameter in differ:
            headers = [parameters[parameter] for parameters in of_projection if parameter in parameters]
            found[parameter] = Counter(Facts(x.dtype, x.shape) for x in headers).most_common(1)[0][0]
        return found

    def is_quantized(self) -> bool:
        """Whether any weight is stored in something else than a plain float."""
        for parameters in self.headers.values():
            for parameter, header in parameters.items():
                if parameter in _COMPANIONS or header.dtype not in _PLAIN:
                    return True
        return False


_PLAIN = ("BF16", "F16", "F32", "F64")
_COMPANIONS = ("weight_scale", "weight_scale_inv", "weight_packed", "qweight", "scales", "scale", "blocks")


@dataclass(frozen=True, slots=True)
class LayerIndex:
    """MoE layers in order of number; `others` are tensors named `.experts.` that no pattern knows."""

    layers: Mapping[str, LayerTensors]
    others: tuple[str, ...]


def index_layers(tensors: Mapping[str, TensorHeader], problems: list[Problem]) -> LayerIndex:
    """One pass over all names. Two names for one projection of one expert are a problem."""
    layers: dict[str, LayerTensors] = {}
    others = []
    odd: dict[str, list[str]] = {}
    for name, header in tensors.items():
        if not may_be_expert(name):
            continue
        parsed = parse_expert_name(name)
        if parsed is None:
            number = odd_number(name)
            if number:
                odd.setdefault(number, []).append(name)
            if ".experts." in name:
                others.append(name)
            continue
        layer_name, _, _, _, expert, projection, parameter = parsed
        layer = layers.get(layer_name)
        if layer is None:
            layer = layers[layer_name] = LayerTensors(parsed)
        parameters = layer.headers.get((expert, projection))
        if parameters is None:
            parameters = layer.headers[expert, projection] = {}
        other = parameters.setdefault(parameter, header)
        if other is not header:
            problems.append(Problem(f"tensor {name}", "one name for it", f"also {other.name}"))
    for number, names in odd.items():
        where = f"tensor {names[0]}" if len(names) == 1 else f"tensor {names[0]} and {len(names) - 1} more"
        expected = "numbers of layers and experts in digits 0 to 9, without leading zeros"
        problems.append(Problem(where, expected, f"{number!a}"))
    for layer in layers.values():
        fused = sum(expert is None for expert, _ in layer.headers)
        layer.is_fused = fused > 0
        layer.is_mixed = 0 < fused < len(layer.headers)
    ordered = sorted(layers.items(), key=lambda item: (item[1].name.layer, item[0]))
    return LayerIndex(dict(ordered), tuple(others))


def split_groups(layer: LayerTensors, counts: tuple[int, ...], problems: list[Problem]) -> list[LayerTensors]:
    """One layer for each of `counts`, the checkpoint's numbers of experts going on from one to the next."""
    if layer.is_fused or sum(counts) <= max(layer.experts(), default=-1):
        found = "tensors that hold all" if layer.is_fused else f"expert {layer.experts()[-1]}"
        expected = f"{' and '.join(str(count) for count in counts)} experts, as config.json says"
        problems.append(Problem(layer.name.layer_name, expected, found))
        return []
    groups = []
    first = 0
    for count in counts:
        headers: dict[tuple[int | None, str], dict[str, TensorHeader]] = {
            (expert - first, projection): parameters
            for (expert, projection), parameters in layer.headers.items()
            if expert is not None and first <= expert < first + count
        }
        groups.append(LayerTensors(layer.name, headers, first=first))
        first += count
    return groups


def count_experts(layer: LayerTensors, told: int | None, problems: list[Problem]) -> int:
    """E from the tensors, each expert 0..E-1 there and the config agreeing; 0 after adding a problem."""
    where = layer.name.layer_name
    if layer.is_fused:
        counts = {header.shape[0] if header.shape else 0 for header in layer.tensors()}
        if len(counts) != 1:
            problems.append(Problem(where, "fused tensors that hold as many experts", f"{sorted(counts)}"))
            return 0
        count = counts.pop()
        if count == 0:
            problems.append(Problem(where, "fused tensors that hold experts", "none"))
            return 0
    else:
        experts = layer.experts()
        count = max(experts[-1] + 1 if experts else 0, told or 0)
        if count > _SAFE_NUMBER_OF_EXPERTS:
            problems.append(Problem(where, f"at most {_SAFE_NUMBER_OF_EXPERTS} experts", f"{count}"))
            return 0
        missing = sorted(set(range(count)) - set(experts))
        if missing:
            found = f"{len(experts)}: expert {shorten([layer.first + expert for expert in missing])} missing"
            problems.append(Problem(where, f"{count} experts", found, "fetch the missing shards"))
            return 0
    if told is not None and told != count:
        problems.append(Problem(where, f"{told} experts, as config.json says", f"{count}"))
        return 0
    return count


# LongCat's router has rows for experts that do nothing too.
_MORE_ROWS = "router.classifier"
# One number for each expert, beside the router's weight.
_CORRECTIONS = (
    "router.bias",
    "gate.bias",
    "gate.e_score_correction_bias",
    "e_score_correction_bias",
    "moe_statics.e_score_correction_bias",
    "gate.expert_bias",
    "expert_bias",
    "router_bias",
)
# The tensors that tell that a router is there, in whatever format it may be stored.
_ROUTER_WEIGHTS = ("weight", "qweight", "weight_packed")


def check_router(
    layer: LayerTensors, family: Family, count: int, tensors: Mapping[str, TensorHeader], problems: list[Problem]
) -> bool:
    """Whether the router has as many rows as there are experts, whatever config.json says or does not say."""
    head = layer.name.layer_name.removesuffix("experts")
    weights = [(f"{router}.weight", 0) for router in family.routers if router != _MORE_ROWS]
    for name, axis in (*weights, *((name, -1) for name in _CORRECTIONS)):
        header = tensors.get(head + name)
        if header is not None and header.shape and header.shape[axis] != count:
            rows = header.shape[axis]
            expected = f"{rows} experts, as {header.name} {list(header.shape)} has rows"
            problems.append(Problem(layer.name.layer_name, expected, f"{count}", "fetch the missing shards"))
            return False
    return True


def check_router_present(
    layer: LayerTensors, family: Family, tensors: Mapping[str, TensorHeader], problems: list[Problem]
) -> None:
    """Some router of those that the family may have must stand beside the experts."""
    head = layer.name.layer_name.removesuffix("experts")
    if not any(f"{head}{router}.{weight}" in tensors for router in family.routers for weight in _ROUTER_WEIGHTS):
        names = " or ".join(f"{head}{router}.weight" for router in family.routers)
        hint = "fetch the missing shards"
        problems.append(Problem(f"tensor {names}", "the router of converted experts", "none", hint))


def check_same_count(counts: Mapping[str, int], problems: list[Problem]) -> None:
    """Every layer of a family's models has as many experts; one with fewer has lost its last ones."""
    most = max(counts.values(), default=0)
    for name, count in counts.items():
        if count != most:
            other = next(other for other, held in counts.items() if held == most)
            problems.append(Problem(name, f"{most} experts, as {other} has", f"{count}", "fetch the missing shards"))


def check_layers_present(
    family: Family, config: Mapping[str, object], found: Iterable[int], last: int, problems: list[Problem]
) -> None:
    """The layers below `last` that have experts must be the ones that config.json's fields say have them."""
    present = {layer for layer in found if layer < last}
    expected = {layer for layer in range(last) if family.is_moe_layer(dict(config), layer)}
    missing, extra = sorted(expected - present), sorted(present - expected)
    if missing:
        problems.append(
            Problem(
                "experts",
                f"those of layer {shorten(missing)}, as config.json says",
                "none",
                "fetch the missing shards",
            )
        )
    if extra:
        problems.append(
            Problem("experts", "none in dense layers, as config.json says", f"those of layer {shorten(extra)}")
        )


def shorten(numbers: list[int], limit: int = 8) -> str:
    """`1, 2, 3 and 5 more`."""
    shown = ", ".join(str(number) for number in numbers[:limit])
    return shown if len(numbers) <= limit else f"{shown} and {len(numbers) - limit} more"
