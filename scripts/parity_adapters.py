"""Adapters and frozen weights on every layout against one process, as a table in the docs.

    python scripts/parity_adapters.py [--steps N] [--only NAME...]

Trains a tiny model on real processes, in fp32: what trains, over layouts, ZeRO stages,
recomputation and an optimizer in host memory. What the plan refuses is a dash in the table. With
`--only` the rows of others stay as they are.
`tests/train/test_adapters.py` does a part of it.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import cache
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))

from adapter_cases import TRAINED, Adapting, everything, judged, train
from fork_server import RanksFailed
from parity_cases import TOLERANCE, Curve, Difference

PAGE = Path(__file__).resolve().parent.parent / "docs" / "adapters.md"
BEGIN, END = "<!-- parity of adapters -->", "<!-- end of it -->"
WAYS = (("none", "none"), ("full", "none"), ("none", "cpu"))
"""Columns: recomputation, and where the optimizer is."""


def measured(cases: list[Adapting], steps: int) -> dict[Adapting, Difference | None]:
    """How far each is from one process; None where the plan refuses it."""
    found: dict[Adapting, Difference | None] = {}
    with tempfile.TemporaryDirectory() as folder:

        @cache
        def curve_of(case: Adapting) -> Curve:
            return train(case, Path(folder), steps=steps)

        for case in cases:
            if judged(case, steps)[0] is None:
                found[case] = None
                continue
            started = time.monotonic()
            try:
                found[case] = Difference.between(curve_of(case.reference), curve_of(case))
            except RanksFailed as failure:
                print(failure, file=sys.stderr)
                found[case] = Difference(float("inf"), float("inf"))
            print(f"{case}: {found[case]} in {time.monotonic() - started:.1f} s", flush=True)
    return found


Row = tuple[str, str, str]
"""What trains, the layout and the stage: what a row of the table is of."""


def rows_of(found: dict[Adapting, Difference | None]) -> dict[Row, list[str]]:
    """Cells of the table, without rows of dashes."""
    rows = dict.fromkeys((case.trained, case.layout, case.stage) for case in found)
    cells = {row: [_cell(found.get(Adapting(*row, *way))) for way in WAYS] for row in rows}
    return {row: each for row, each in cells.items() if any(cell != "–" for cell in each)}


def read_rows(text: str) -> dict[Row, list[str]]:
    """Those of a page."""
    rows = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("|") and len(cells) == 3 + len(WAYS) and cells[2].isdecimal():
            rows[cells[0], cells[1], cells[2]] = cells[3:]
    return rows


def table(rows: dict[Row, list[str]], steps: int) -> Iterator[str]:
    """Lines of the page."""
    cells = [cell for each in rows.values() for cell in each if cell != "–"]
    good = sum(not cell.startswith("**") for cell in cells)
    yield (
        f"{steps} steps with torch {version('torch')}, deepspeed {version('deepspeed')}: "
        f"{len(cells)} combinations, of which {good} agree."
    )
    yield ""
    yield "| trains | layout | ZeRO | plain | recomputed | optimizer in host memory |"
    yield "|---|---|---|---|---|---|"
    for row, each in rows.items():
        yield f"| {' | '.join((*row, *each))} |"


def _cell(difference: Difference | None) -> str:
    if difference is None:
        return "–"
    largest = max(difference.loss, difference.norm)
    return f"{largest:.1e}" if largest <= TOLERANCE else f"**{largest:.1e}**"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--only", nargs="+", help="of what trains", default=[])
    arguments = parser.parse_args()
    steps = arguments.steps
    cases = [case for case in everything() if case.trained in (arguments.only or TRAINED)]
    found = measured(cases, steps)
    before, rest = PAGE.read_text().split(BEGIN)
    old, after = rest.split(END)
    rows = {row: cells for row, cells in read_rows(old).items() if row[0] not in arguments.only}
    rows = {**rows, **rows_of(found)} if arguments.only else rows_of(found)
    order = list(dict.fromkeys(case.trained for case in everything()))
    rows = dict(sorted(rows.items(), key=lambda item: order.index(item[0][0])))
    PAGE.write_text(f"{before}{BEGIN}\n{chr(10).join(table(rows, steps))}\n{END}{after}")
    limit = Difference(TOLERANCE, TOLERANCE)
    return 0 if all(each is None or each.within(limit) for each in found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
