"""Reading what humming-convert made: the manifest, the files, and what a serving host must match."""

from humming_loader._version import __version__
from humming_loader.errors import LoaderError

__all__ = ["LoaderError", "__version__"]
