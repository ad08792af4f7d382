"""Continue trainings of other tools on every layout, and back, as a matrix.

    python scripts/migration_matrix.py [--output docs/coming-from.md]

The tools train tiny models in fp32 on real processes, some 10 minutes long; the slow tests in
`tests/migration` run a part of it. The rows go to a CSV file beside the output file, and the matrix
between its two marks; without a file both are printed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))

from migration_cases import BACK, CASES, LAYOUTS, Case, Source, largest_differences
from page_tables import replace_part, table, write_rows

MARKS = "<!-- migration matrix -->", "<!-- end of migration matrix -->"
HEADS = ("tool", "saved_as", "processes", "continued_on", "largest_loss_difference")
TOLERANCE = 1e-5
"""Largest difference of a loss, in nats."""


def main() -> int:
    """Run all cases; the exit code is 1 if a difference exceeds the tolerance."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--output", type=Path, help="page whose text between the two markers is replaced"
    )
    output = parser.parse_args().output
    found: dict[Case, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        for case, difference in largest_differences(Path(folder)):
            found[case] = difference
            print(*row(case, difference), flush=True)
    rows = [row(case, found[case]) for case in CASES]
    if output is None:
        print(render(rows))
    else:
        write_rows(output.with_suffix(".csv"), HEADS, rows)
        replace_part(output, MARKS, render(rows))
    wrong = sum(not difference < TOLERANCE for difference in found.values())
    print(f"{len(rows)} cases, {wrong} wrong")
    return int(wrong > 0)


def row(case: Case, difference: float) -> list[str]:
    """Return the row of a case in the CSV file."""
    source, target = case
    return [source.tool, source.saved, str(source.processes), target, f"{difference:.1e}"]


def differences_of(rows: list[list[str]]) -> dict[Case, str]:
    """Return the differences in rows of the CSV file, by case."""
    return {(Source(tool, saved, int(n)), to): worst for tool, saved, n, to, worst in rows}


def render(rows: list[list[str]]) -> str:
    """Return the matrix: a row for each source, a column for each layout."""
    found, targets = differences_of(rows), (*LAYOUTS, BACK)
    lines = [
        [source.tool, source.saved, str(source.processes)]
        + [found.get((source, target), "") for target in targets]
        for source in dict.fromkeys(source for source, _ in found)
    ]
    return table(("there", "saved as", "processes", *targets), lines)


if __name__ == "__main__":
    sys.exit(main())
