"""Write the README's tables of families and formats from the code's own; `--check` only says whether they are true."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from humming_convert.families import REFUSED_FAMILIES
from humming_convert.report import FAMILY_HEADS, FORMAT_HEADS, family_rows, format_rows

README = Path(__file__).resolve().parent.parent / "README.md"
BEGIN = "<!-- support matrix: written by scripts/support_matrix.py -->"
END = "<!-- support matrix: end -->"


def matrix() -> str:
    """Both tables as Markdown, from marker to marker."""
    refused = "; ".join(f"{name} ({found})" for name, (_, found) in REFUSED_FAMILIES.items())
    return "\n".join(
        [
            BEGIN,
            *_table(FAMILY_HEADS, family_rows()),
            "",
            f"Known, and refused: {refused}.",
            "",
            *_table(FORMAT_HEADS, format_rows()),
            END,
        ]
    )


def replaced(text: str) -> str:
    """`text` with what stands between the markers written anew. Raises ValueError where a marker is missing."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{README.name}: expected {BEGIN!r} and {END!r}, found no such lines")
    return before + matrix() + after


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    def line(cells: Iterable[str]) -> str:
        return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"

    return [line(heads), "|" + "---|" * len(heads), *(line(row) for row in rows)]


def main() -> int:
    """The command line: exit code 1 when `--check` finds another text."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; fail if the README is not up to date")
    is_check = parser.parse_args().check
    text = README.read_text()
    wanted = replaced(text)
    if is_check:
        if text != wanted:
            sys.stderr.write(f"{README.name}: run python scripts/support_matrix.py\n")
        return int(text != wanted)
    README.write_text(wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main())
