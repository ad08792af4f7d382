"""Accuracy of the step-time model against published throughputs: the tables of docs/planning.md.

    python scripts/benchmarks/speed_accuracy.py [--rows]

`tests/data/throughput.csv` has the rows with their sources, and marks those that constants were
fitted to; `tests/support/throughput_rows.py` turns each row into a plan, and keeps rows back.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator, Sequence
from itertools import combinations
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support"))

from throughput_rows import Row, rows

APART = 0.10
"""Relative difference below which two measurements are not ordered."""


def main() -> None:
    """Print the tables that docs/planning.md quotes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", action="store_true", help="also each row")
    if parser.parse_args().rows:
        for row in rows():
            kind = "fit " if row.was_fitted else "kept" if row.is_kept else ""
            print(
                f"{kind:4} {row.name:58} {row.seconds:9.3f} {row.predicted:9.3f} {row.error:+7.1%}"
            )
    for table in (dense_lines(), expert_lines(), run_lines()):
        print(*table, "", sep="\n")


def dense_lines() -> Iterator[str]:
    """Yield the table of dense models: a line per source, then the halves."""
    dense = [row for row in rows() if not row.is_of_run and not row.has_experts]
    sources: dict[str, dict[str, list[Row]]] = {}
    for row in dense:
        sources.setdefault(_source(row), {}).setdefault(row.table, []).append(row)
    yield "| measured | rows | median error | worst | pairs in order | its choice is slower by |"
    yield "|---|---|---|---|---|---|"
    for name, tables in sorted(sources.items()):
        yield _line(name, list(tables.values()))
    halves = (
        ("**kept back**", [row for row in dense if row.is_kept]),
        ("the others", [row for row in dense if not row.is_kept]),
        ("of these, fitted to", [row for row in dense if row.was_fitted]),
    )
    for name, members in halves:
        errors = [row.error for row in members]
        within = sum(abs(error) <= 0.25 for error in errors)
        yield f"| {_cells(name, errors)} | | {within} rows within 25 % |"


def expert_lines() -> Iterator[str]:
    """Yield the table of models with experts, a line per row."""
    yield "| row | tokens/s a device | error | with the exchange hidden |"
    yield "|---|---|---|---|"
    for row in rows():
        if row.has_experts and not row.is_of_run:
            yield f"| {row.name} | {_rate(row):,.0f} | {_expert_errors(row)} |"


def run_lines() -> Iterator[str]:
    """Yield the table of whole runs, a line per row."""
    yield "| run | tokens/s a device, of its hours | error | with the exchange hidden |"
    yield "|---|---|---|---|"
    for row in rows():
        if row.is_of_run:
            yield f"| {row.name.removeprefix('run-')} | {_rate(row):,.0f} | {_expert_errors(row)} |"


def _expert_errors(row: Row) -> str:
    hidden = f"{row.error_with_hidden_exchange:+.0%}" if row.plan.mesh.expert > 1 else ""
    return f"{row.error:+.0%} | {hidden}"


def _rate(row: Row) -> float:
    """Return the measured tokens per second and device."""
    return 1 / _per_token(row, row.seconds)


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
    order = f"{right} of {apart} | {max(regrets):.0%} at most" if apart else "|"
    return f"| {_cells(name, errors)} | {order} |"


def _per_token(row: Row, seconds: float) -> float:
    """Return device seconds per token."""
    return seconds * row.plan.mesh.world_size / row.plan.batch.tokens_per_step


if __name__ == "__main__":
    main()
