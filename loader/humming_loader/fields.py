"""Strict reading of JSON objects: each field is asked for by type; what was not asked for is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import PurePosixPath
from typing import Any, TypeVar

from humming_loader.errors import ManifestError

Parsed = TypeVar("Parsed")

_SHA256 = re.compile(r"[0-9a-f]{64}")
_SHOWN = 80


def shown(value: object) -> str:
    """`value` as short text for a message."""
    text = repr(value)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."


def load_object(text: str | bytes, where: str) -> dict[str, Any]:
    """The JSON object in `text`. Raises ManifestError for no JSON, no object, or a repeated key."""

    def no_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            names = [name for name, _ in pairs]
            repeated = next(name for name in names if names.count(name) > 1)
            raise ManifestError(where, "each key once", f"{repeated!r} twice")
        return found

    def no_constants(name: str) -> None:
        raise ManifestError(where, "finite numbers", name)

    try:
        value = json.loads(text, object_pairs_hook=no_repeats, parse_constant=no_constants)
    except (ValueError, RecursionError) as error:
        raise ManifestError(where, "a JSON object", f"text that does not parse ({error})") from error
    if not isinstance(value, dict):
        raise ManifestError(where, "a JSON object", type(value).__name__)
    return value


def is_plain_relative(name: str) -> bool:
    """Whether `name` is a path below a folder, spelt plainly: no `..`, root, backslash or empty part."""
    if not name or "\\" in name or "\0" in name or PurePosixPath(name).is_absolute():
        return False
    return all(part not in ("", ".", "..") for part in name.split("/"))


class Fields:
    """One JSON object under `where`. Each method takes one field away; `done()` refuses whatever is left."""

    def __init__(self, value: object, where: str) -> None:
        if not isinstance(value, Mapping):
            raise ManifestError(where, "an object", shown(value))
        self._left: dict[str, Any] = dict(value)
        self._where = where

    def path(self, key: str) -> str:
        """The field's full name, for messages."""
        return f"{self._where}.{key}" if self._where else key

    def take(self, key: str) -> Any:  # noqa: ANN401 - a JSON value is anything until a parser looked at it
        """The field as it is. Raises ManifestError when it is missing."""
        if key not in self._left:
            raise ManifestError(self.path(key), "a value", "nothing")
        return self._left.pop(key)

    def done(self) -> None:
        """Raises ManifestError when a field was not asked for."""
        if self._left:
            raise ManifestError(self._where or "manifest", "no other keys", ", ".join(sorted(self._left)))

    def _checked(self, key: str, expected: str, accept: Callable[[Any], bool]) -> Any:  # noqa: ANN401
        value = self.take(key)
        if not accept(value):
            raise ManifestError(self.path(key), expected, shown(value))
        return value

    def text(self, key: str) -> str:
        """A string."""
        return str(self._checked(key, "a string", lambda value: isinstance(value, str)))

    def choice(self, key: str, *allowed: str) -> str:
        """One of the strings `allowed`."""
        return str(self._checked(key, "one of " + ", ".join(allowed), lambda value: value in allowed))

    def flag(self, key: str) -> bool:
        """True or false."""
        return bool(self._checked(key, "true or false", lambda value: isinstance(value, bool)))

    def count(self, key: str, least: int = 0) -> int:
        """An integer of at least `least`."""
        return int(
            self._checked(key, f"an integer of at least {least}", lambda value: _is_count(value, least))
        )

    def counts(self, key: str) -> tuple[int, ...]:
        """A list of integers of at least 0."""
        return tuple(self._checked(key, "a list of integers of at least 0", _are_counts))

    def sha256(self, key: str) -> str:
        """64 lower-case hexadecimal digits."""
        return str(self._checked(key, "64 hexadecimal digits", _is_sha256))

    def file(self, key: str) -> str:
        """A plain path relative to the output folder."""
        expected = "a plain path inside the folder"
        return str(
            self._checked(key, expected, lambda value: isinstance(value, str) and is_plain_relative(value))
        )

    def plain(self, key: str) -> dict[str, Any]:
        """An object whose inside is not looked at."""
        return dict(self._checked(key, "an object", lambda value: isinstance(value, dict)))

    def optional(self, key: str, parse: Callable[[str], Parsed]) -> Parsed | None:
        """Null, or what `parse` (a method of this object) makes of it; the key must be there."""
        if key in self._left and self._left[key] is None:
            del self._left[key]
            return None
        return parse(key)

    def sequence(self, key: str, parse: Callable[[object, str], Parsed]) -> tuple[Parsed, ...]:
        """A list, each item parsed by `parse(value, where)`."""
        items = self._checked(key, "a list", lambda value: isinstance(value, list))
        return tuple(parse(item, f"{self.path(key)}[{index}]") for index, item in enumerate(items))

    def mapping(self, key: str, parse: Callable[[object, str, str], Parsed]) -> dict[str, Parsed]:
        """An object, each value parsed by `parse(value, where, name)`."""
        items = self.plain(key)
        return {name: parse(item, f"{self.path(key)}[{name!r}]", name) for name, item in items.items()}


def _is_count(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _are_counts(value: object) -> bool:
    return isinstance(value, list) and all(_is_count(item, 0) for item in value)


def _is_sha256(value: object) -> bool:
    return isinstance(value, str) and _SHA256.fullmatch(value) is not None
