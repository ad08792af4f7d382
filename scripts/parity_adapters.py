"""Compare adapters and frozen weights on every layout with one process, as a table in the docs.

    python scripts/parity_adapters.py [--steps N] [--only NAME...]

Trains a tiny model in fp32 on real processes: the ways of training only some weights, over layouts,
ZeRO stages, recomputation and an optimizer in host memory. All numbers go to `docs/adapters.csv`,
where a cell is empty if the plan refuses the combination, and the largest of each layout to
`docs/adapters.md`. With `--only` the other rows stay as they are. `tests/train/test_adapters.py`
runs a part of it.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from functools import cache
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))

from adapter_cases import TRAINED, Adapting, everything, judged, train
from fork_server import RanksFailed
from page_tables import read_rows, replace_part, table, write_rows
from parity_cases import TOLERANCE, Curve, Difference

PAGE = Path(__file__).resolve().parent.parent / "docs" / "adapters.md"
MARKS = "<!-- parity of adapters -->", "<!-- end of it -->"
HEADS = ("trains", "layout", "stage", "plain", "recomputed", "offloaded")
WAYS = (("none", "none"), ("full", "none"), ("none", "cpu"))
"""Columns of the table: recomputation, and where the optimizer is."""


def measured(cases: list[Adapting], steps: int) -> dict[Adapting, Difference | None]:
    """Return the difference of each combination from one process; None where the plan refuses
    it.
    """
    differences: dict[Adapting, Difference | None] = {}
    with tempfile.TemporaryDirectory() as folder:

        @cache
        def curve_of(case: Adapting) -> Curve:
            return train(case, Path(folder), steps=steps)

        for case in cases:
            if judged(case, steps)[0] is None:
                differences[case] = None
                continue
            started = time.monotonic()
            try:
                differences[case] = Difference.between(curve_of(case.reference), curve_of(case))
            except RanksFailed as failure:
                print(failure, file=sys.stderr)
                differences[case] = Difference(float("inf"), float("inf"))
            print(f"{case}: {differences[case]} in {time.monotonic() - started:.1f} s", flush=True)
    return differences


Row = tuple[str, str, str]
"""Key of a row: what trains, the layout and the ZeRO stage."""


def rows_of(differences: dict[Adapting, Difference | None]) -> dict[Row, list[str]]:
    """Return the rows of the file that have at least one value."""
    rows = dict.fromkeys((case.trained, case.layout, case.stage) for case in differences)
    cells = {row: [_cell(differences.get(Adapting(*row, *way))) for way in WAYS] for row in rows}
    return {row: each for row, each in cells.items() if any(each)}


def page_part(rows: dict[Row, list[str]], steps: int) -> str:
    """Return a table of the largest difference of each layout."""
    cells = [float(cell) for each in rows.values() for cell in each if cell]
    good = sum(cell <= TOLERANCE for cell in cells)
    layouts = list(dict.fromkeys(layout for _, layout, _ in rows))

    def largest(trained: str, layout: str) -> str:
        matching = [each for row, each in rows.items() if row[:2] == (trained, layout)]
        return max((cell for each in matching for cell in each if cell), key=float, default="–")

    lines = [
        (trained, *(largest(trained, layout) for layout in layouts))
        for trained in dict.fromkeys(trained for trained, _, _ in rows)
    ]
    return (
        f"{steps} steps with torch {version('torch')}, deepspeed {version('deepspeed')}: "
        f"{len(cells)} combinations, of which {good} agree.\n\n"
        f"{table(('trains', *layouts), lines)}"
    )


def _cell(difference: Difference | None) -> str:
    return "" if difference is None else f"{max(difference.loss, difference.norm):.1e}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--only", nargs="+", help="cases to run, of those that train", default=[])
    arguments = parser.parse_args()
    steps = arguments.steps
    cases = [case for case in everything() if case.trained in (arguments.only or TRAINED)]
    differences = measured(cases, steps)
    old = {(row[0], row[1], row[2]): row[3:] for row in read_rows(PAGE.with_suffix(".csv"))}
    kept = {row: cells for row, cells in old.items() if row[0] not in arguments.only}
    rows = {**kept, **rows_of(differences)} if arguments.only else rows_of(differences)
    order = list(dict.fromkeys(case.trained for case in everything()))
    rows = dict(sorted(rows.items(), key=lambda item: order.index(item[0][0])))
    lines = [[*row, *cells] for row, cells in rows.items()]
    write_rows(PAGE.with_suffix(".csv"), HEADS, lines)
    replace_part(PAGE, MARKS, page_part(rows, steps))
    limit = Difference(TOLERANCE, TOLERANCE)
    return 0 if all(each is None or each.within(limit) for each in differences.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
