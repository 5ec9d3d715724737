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


class OutputMissingError(LoaderError):
    """There is no converted checkpoint at the path or repository."""

    def __init__(self, path: str, expected: str, found: str) -> None:
        self.path = path
        super().__init__(f"{path}: expected {expected}, found {found}")


class RankError(LoaderError):
    """A rank or an expert id is out of range."""

    def __init__(self, layer: str, expected: str, found: str) -> None:
        self.layer = layer
        super().__init__(f"{layer}: expected {expected}, found {found}")


class ParallelismError(LoaderError):
    """A packed layer cannot be cut for this tensor-parallel size; `valid` are the sizes that it can be cut for.

    `can_convert` says that cutting the source instead may work.
    """

    def __init__(
        self, layer: str, tp_size: int, reason: str, valid: tuple[int, ...], *, can_convert: bool = False
    ) -> None:
        self.layer = layer
        self.tp_size = tp_size
        self.valid = valid
        sizes = ", ".join(str(size) for size in valid)
        super().__init__(
            f"{layer}: cannot be cut for tensor parallelism of {tp_size}: {reason}; sizes that work: {sizes} "
            "(expert parallelism works at every size)"
            + (f"; for {tp_size}, humming-convert SRC OUT --tp {tp_size} cuts before it packs" if can_convert else "")
        )


class PreshardedError(LoaderError):
    """The experts were cut for another tensor-parallel size before they were packed; `mend` is the call for this one.

    An expert-parallel rank has a tensor-parallel size of 1.
    """

    def __init__(self, layer: str, packed: int, tp_size: int, mend: str) -> None:
        self.layer = layer
        self.packed = packed
        self.tp_size = tp_size
        self.mend = mend
        found = f"{tp_size}" if tp_size > 1 else "1 (one GPU, or expert parallelism)"
        super().__init__(
            f"{layer}: expected a tensor-parallel size of {packed}, which its experts were cut for before they were "
            f"packed, found {found}. Convert again for this size: {mend}"
        )


class HostMismatchError(LoaderError):
    """The packed bytes are for another GPU, Humming version or layout; `problems` says which, `mend` what to run."""

    def __init__(self, where: str, problems: tuple[str, ...], mend: str) -> None:
        self.problems = problems
        self.mend = mend
        super().__init__(f"{where}: {'; '.join(problems)}. Convert again for this host: {mend}")


class ChecksumError(LoaderError):
    """A tensor's bytes are not those that the manifest recorded."""

    def __init__(self, tensor: str, file: str, expected: str, found: str) -> None:
        self.tensor = tensor
        super().__init__(f"tensor {tensor!r} in {file}: expected sha256 {expected}, found {found}")


class ServingError(LoaderError):
    """The serving framework asks for something that packed experts cannot do."""

    def __init__(self, layer: str, expected: str, found: str) -> None:
        self.layer = layer
        super().__init__(f"{layer}: expected {expected}, found {found}")


class KernelError(LoaderError):
    """A compiled kernel cannot be described, or what is shipped with a checkpoint cannot be used."""

    def __init__(self, where: str, expected: str, found: str) -> None:
        self.where = where
        super().__init__(f"{where}: expected {expected}, found {found}")


class HubError(LoaderError):
    """What the Hugging Face Hub, or the way to it, answered: `found` is its reason, `hint` what to do."""

    def __init__(self, where: str, found: str, hint: str = "") -> None:
        self.found = found
        self.hint = hint
        super().__init__(f"{where}: the Hub says: {found}" + (f"; {hint}" if hint else ""))
