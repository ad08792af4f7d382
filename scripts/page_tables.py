"""CSV files beside pages of the docs, and the generated part of a page between two marks."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path


def write_rows(path: Path, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([heads, *rows])


def read_rows(path: Path) -> list[list[str]]:
    """Return the rows without the header; empty if there is no such file."""
    if not path.exists():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.reader(file))[1:]


def replace_part(page: Path, marks: tuple[str, str], text: str) -> None:
    """Replace the text between the two marks of the page."""
    begin, end = marks
    old = page.read_text(encoding="utf-8")
    before, after = old.split(begin)[0], old.split(end)[1]
    page.write_text(f"{before}{begin}\n{text}\n{end}{after}", encoding="utf-8")


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [heads, ["---"] * len(heads), *rows]
    return (
        "\n".join(f"| {' | '.join(line)} |" for line in lines)
        .replace("| --- ", "|---")
        .replace("--- |", "---|")
    )
