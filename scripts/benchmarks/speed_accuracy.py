"""Accuracy of the step-time model against published throughputs: a line for each source.

    python scripts/benchmarks/speed_accuracy.py [--rows]

`tests/data/throughput.csv` has the rows with their sources, and marks those that constants were
fitted to; `tests/support/throughput_rows.py` turns each row into a plan.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support"))

from throughput_rows import Row, rows

APART = 0.10
"""Relative difference below which two measurements are not ordered."""


def main() -> None:
    """Print the table that docs/planning.md quotes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", action="store_true", help="also each row")
    with_rows = parser.parse_args().rows
    sources: dict[str, dict[str, list[Row]]] = {}
    for row in rows():
        sources.setdefault(_source(row), {}).setdefault(row.table, []).append(row)
        if with_rows:
            kind = "fit " if row.is_for_fit else "test"
            print(f"{kind} {row.name:58} {row.seconds:9.3f} {row.predicted:9.3f} {row.error:+7.1%}")
    print("| measured | rows | median error | worst | pairs in order | its choice is slower by |")
    print("|---|---|---|---|---|---|")
    for name, tables in sources.items():
        print(_line(name, list(tables.values())))
    for name, kept in (("fitted to", True), ("not fitted to", False)):
        errors = [row.error for row in rows() if row.is_for_fit == kept]
        within = sum(abs(error) <= 0.25 for error in errors)
        print(f"| {_cells(f'all rows, {name}', errors)} | | {within} rows within 25 % |")


def _source(row: Row) -> str:
    """Return the part of a table's name before the model."""
    words = row.table.split()
    return " ".join(words[:2] if words[0] == "mpt" else words[:1])


def _cells(name: str, errors: Sequence[float]) -> str:
    middle = statistics.median(abs(error) for error in errors)
    return f"{name} | {len(errors)} | {middle:.0%} | {max(errors, key=abs):+.0%}"


def _line(name: str, tables: Sequence[Sequence[Row]]) -> str:
    """Format the errors of a source, the correctly ordered pairs of its tables, and the worst
    choice.
    """
    right = apart = 0
    regrets = []
    for members in tables:
        for one, other in combinations(members, 2):
            measured = _per_token(one, one.seconds) / _per_token(other, other.seconds)
            predicted = _per_token(one, one.predicted) / _per_token(other, other.predicted)
            if not 1 - APART < measured < 1 / (1 - APART):
                apart += 1
                right += (measured > 1) == (predicted > 1)
        chosen = min(members, key=lambda row: _per_token(row, row.predicted))
        best = min(_per_token(row, row.seconds) for row in members)
        regrets.append(_per_token(chosen, chosen.seconds) / best - 1)
    errors = [row.error for members in tables for row in members]
    return f"| {_cells(name, errors)} | {right} of {apart} | {max(regrets):.0%} at most |"


def _per_token(row: Row, seconds: float) -> float:
    """Return device seconds per token."""
    return seconds * row.plan.mesh.world_size / row.plan.batch.tokens_per_step


if __name__ == "__main__":
    main()
