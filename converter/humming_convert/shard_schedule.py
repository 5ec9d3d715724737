"""Which source files a plan needs, in which order, and when it needs each for the last time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from humming_convert.plan import ConversionPlan, LayerPlan
from humming_convert.safetensors_header import TensorHeader

# Layers that are under way at once at most, with few processors: two in the lanes, one waiting, one being prepared.
LAYERS_AT_ONCE = 4


@dataclass(frozen=True, slots=True)
class ShardSchedule:
    """`order`: files by first need. `layers`: the files of each layer, or rank's part, that is packed.

    `passthrough`: tensors to copy, by file.
    """

    order: tuple[str, ...]
    layers: tuple[frozenset[str], ...]
    passthrough: Mapping[str, tuple[str, ...]]

    def last_layer(self, file: str) -> int:
        """The number of the last layer that reads `file`, -1 for a file of passed-through tensors only."""
        return max((number for number, files in enumerate(self.layers) if file in files), default=-1)

    def peak_bytes(self, sizes: Mapping[str, int], at_once: int = LAYERS_AT_ONCE) -> int:
        """The most bytes of source files that `at_once` neighbouring layers need together.

        A file that a layer before and one after these need counts too: it is kept in between.
        """
        last = {file: self.last_layer(file) for file in self.order}
        first = {file: min((n for n, files in enumerate(self.layers) if file in files), default=-1) for file in last}
        peak = 0
        for start in range(max(1, len(self.layers) - at_once + 1)):
            stop = start + at_once
            needed = (file for file in last if first[file] < stop and last[file] >= start)
            peak = max(peak, sum(sizes[file] for file in needed))
        return max([peak, *(sizes[file] for file in self.order)])


def schedule(plan: ConversionPlan, tensors: Mapping[str, TensorHeader]) -> ShardSchedule:
    """The schedule of a plan's files: layer by layer, then what is left for passed-through tensors."""
    layers = [frozenset(tensors[name].file for name in sources_of(layer)) for layer in plan.packed]
    passthrough: dict[str, list[str]] = {}
    for name in plan.passthrough:
        passthrough.setdefault(tensors[name].file, []).append(name)
    order: dict[str, None] = {}
    for files in [*layers, passthrough]:
        order.update(dict.fromkeys(sorted(files)))
    return ShardSchedule(tuple(order), tuple(layers), {file: tuple(names) for file, names in passthrough.items()})


def sources_of(layer: LayerPlan) -> Sequence[str]:
    """The source tensors that converting the layer may read."""
    names: dict[str, None] = {}
    for sublayer in layer.sublayers:
        for tensor in (*sublayer.tensors, *sublayer.input_tensors):
            names.update(dict.fromkeys(part.source for part in tensor.parts))
        names.update(dict.fromkeys(name for name, _ in sublayer.expected))
    return tuple(names)
