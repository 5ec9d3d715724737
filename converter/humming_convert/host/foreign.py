"""A name for what Humming and vLLM hand around: their packages carry no types that could be checked here."""

from __future__ import annotations

from typing import Any, TypeAlias

Foreign: TypeAlias = Any
