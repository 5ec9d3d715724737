"""Reading what humming-convert made: the manifest, the files, and what a serving host must match.

`load_layer` needs torch and humming, so it is imported when it is first asked for; `offer_kernels` needs humming once
there are kernels to offer. Nothing else here needs either.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from humming_loader._version import __version__
from humming_loader.checkpoint import read_manifest
from humming_loader.errors import LoaderError
from humming_loader.kernels import offer as offer_kernels

if TYPE_CHECKING:
    from humming_loader.layer import HummingExpertsTensors, load_layer

__all__ = ["HummingExpertsTensors", "LoaderError", "__version__", "load_layer", "offer_kernels", "read_manifest"]

_LATE = ("HummingExpertsTensors", "load_layer")


def __getattr__(name: str) -> Any:  # noqa: ANN401 - whatever the name stands for
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from humming_loader import layer

    return getattr(layer, name)
