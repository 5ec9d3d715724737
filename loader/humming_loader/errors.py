"""The errors of reading a converted checkpoint. Each holds its facts and makes one sentence of them."""

from __future__ import annotations


class LoaderError(Exception):
    """Base of every error that this package raises on purpose."""


class DtypeError(LoaderError):
    """A tensor's dtype code is not one of the safetensors format."""

    def __init__(self, tensor: str, code: str) -> None:
        self.tensor = tensor
        self.code = code
        super().__init__(f"tensor {tensor!r}: unknown dtype code {code!r}")


class ManifestError(LoaderError):
    """The manifest, or the metadata of an experts file, is not what this version writes."""

    def __init__(self, field: str, expected: str, found: str) -> None:
        self.field = field
        self.expected = expected
        self.found = found
        super().__init__(f"{field}: expected {expected}, found {found}")


class FileError(LoaderError):
    """An experts file is missing, damaged, or not the one that the manifest describes."""

    def __init__(self, path: str, expected: str, found: str) -> None:
        self.path = path
        self.expected = expected
        self.found = found
        super().__init__(f"{path}: expected {expected}, found {found}")


class TensorError(LoaderError):
    """A tensor is not in the file, or a read asks for bytes that it does not have."""

    def __init__(self, tensor: str, expected: str, found: str) -> None:
        self.tensor = tensor
        self.expected = expected
        self.found = found
        super().__init__(f"tensor {tensor!r}: expected {expected}, found {found}")
