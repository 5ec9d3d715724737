"""The README's tables of families and formats are the code's."""

from __future__ import annotations

import pytest
from scripts.support_matrix import README, matrix, replaced

from humming_convert.families import BY_MODEL_TYPE


def test_the_readme_says_what_the_tables_say() -> None:
    text = README.read_text()
    assert replaced(text) == text, "run python scripts/support_matrix.py"


def test_every_model_type_is_in_it() -> None:
    assert all(model_type in matrix() for model_type in BY_MODEL_TYPE)


def test_markers_must_be_there() -> None:
    with pytest.raises(ValueError, match=r"README.md: expected '<!-- support matrix"):
        replaced("nothing")
