"""Compare objectives on every layout with one process, as a table in the docs.

    python scripts/parity_objectives.py [--steps N] [--only ROW...]

Trains a tiny model in fp32 on real processes. A cell of `docs/objectives.csv` is the largest
difference of a loss, of the steps and of the evaluation behind them; it is empty if the plan
refuses the layout. The same table is put into `docs/objectives.md`. With `--only` the other rows
stay as they are. Rows and layouts are in `tests/support/objective_cases.py`.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))

from fork_server import RanksFailed
from objective_cases import LAYOUTS, OBJECTIVES, difference, train_on
from page_tables import read_rows, replace_part, table, write_rows
from parity_cases import TOLERANCE

PAGE = Path(__file__).resolve().parent.parent / "docs" / "objectives.md"
MARKS = "<!-- parity of objectives -->", "<!-- end of it -->"
COLUMNS = [name for name, layout in LAYOUTS.items() if layout.compared_with != name]


def measured(row: str, steps: int) -> list[str]:
    """Return the cells of a row."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        try:
            found = train_on(LAYOUTS, row, Path(folder), steps=steps)
        except RanksFailed as failure:
            print(failure, file=sys.stderr)
            return ["inf"] * len(COLUMNS)
    rest, alone = found["LoRA at rest"], found["LoRA alone"]
    if rest is not None and alone is not None:
        moved = difference(alone, rest)
        assert moved > TOLERANCE, f"{row}: the adapter changes a loss by {moved:.1e} alone"
    cells = []
    for name in COLUMNS:
        losses, reference = found[name], found[LAYOUTS[name].compared_with]
        is_refused = losses is None or reference is None
        cells.append("" if is_refused else f"{difference(losses, reference):.1e}")
    print(f"{row}: {' '.join(cells)} in {time.monotonic() - started:.0f} s", flush=True)
    return cells


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--only", nargs="+", help="rows to run", default=list(OBJECTIVES))
    arguments = parser.parse_args()
    rows = {row[0]: row[1:] for row in read_rows(PAGE.with_suffix(".csv"))}
    rows |= {row: measured(row, arguments.steps) for row in arguments.only}
    lines = [[row, *rows[row]] for row in OBJECTIVES if row in rows]
    write_rows(PAGE.with_suffix(".csv"), ("objective", *COLUMNS), lines)
    shown = [[row, *(cell or "–" for cell in cells)] for row, *cells in lines]
    head = (
        f"Largest difference of a loss from one process, over {arguments.steps} steps and an "
        f"evaluation; – is refused. torch {version('torch')}, deepspeed {version('deepspeed')}."
    )
    replace_part(PAGE, MARKS, f"{head}\n\n{table(('objective', *COLUMNS), shown)}")
    return 0 if all(float(cell or 0) <= TOLERANCE for _, *cells in lines for cell in cells) else 1


if __name__ == "__main__":
    sys.exit(main())
