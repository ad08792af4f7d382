"""Compare mixtures of experts on layouts with and without an expert axis with one process.

    python scripts/parity_experts.py [--steps 30] [--only COLUMN...] [--models MODEL...]

Trains on real processes, some seconds each; `tests/train/test_experts.py` runs a part of it. The
rows go to `docs/experts.csv`, where a cell is empty if the plan refuses the combination, and the
largest difference of each column to `docs/experts.md`. With `--only` the other columns stay as they
are, with `--models` the other models.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))

from expert_cases import ADAPTED, MIXTURES, Trial, train_all
from page_tables import read_rows, replace_part, table, write_rows
from parity_cases import STEPS, TOLERANCE, Difference, clips_enough
from rank_processes import curve

PAGE = Path(__file__).resolve().parent.parent / "docs" / "experts.md"
MARKS = "<!-- expert tables -->", "<!-- end of expert tables -->"
PACKAGES = ("torch", "deepspeed", "transformers")
STAGES = (0, 1, 2, 3)
HEADS = ("column", "model", "layout", *(f"zero_{stage}" for stage in STAGES))

COLUMNS: dict[str, tuple[dict[str, object], ...]] = {
    "`expert` 1": ({"processes": 2}, {"processes": 4}),
    "`expert` 2": ({"processes": 2, "expert": 2}, {"processes": 4, "expert": 2}),
    "`expert` 4": ({"processes": 4, "expert": 4},),
    "`expert` 2, `tensor` 2": ({"processes": 4, "expert": 2, "tensor": 2},),
    "`expert` 2, offload": (
        {"processes": 2, "expert": 2, "offload": "optimizer"},
        {"processes": 2, "expert": 2, "offload": "both"},
        {"processes": 4, "expert": 2, "tensor": 2, "offload": "optimizer"},
    ),
    "LoRA": (
        {"processes": 2, "adapter": ADAPTED},
        {"processes": 2, "tensor": 2, "adapter": ADAPTED},
    ),
    "LoRA, `expert` 2": (
        {"processes": 2, "expert": 2, "adapter": ADAPTED},
        {"processes": 4, "expert": 2, "tensor": 2, "adapter": ADAPTED},
        {"processes": 2, "expert": 2, "offload": "optimizer", "adapter": ADAPTED},
    ),
}
"""Layouts of each column of the page, as fields of a trial."""

ROUTED_COLUMNS = ("`expert` 1", "`expert` 2", "`expert` 4")
"""Columns that models with chosen experts are measured in."""

ROUTED = (
    *((kind, kind, ()) for kind in MIXTURES),
    ("gpt_oss, all tokens to two experts", "gpt_oss", (2, 3)),
    ("gpt_oss, all tokens to one expert", "gpt_oss", (5,)),
)
"""Row name, architecture, and the experts that all tokens are routed to. They are those of one rank
where four ranks share eight experts, so that most ranks get no token.
"""

Row = tuple[str, str, str]
"""Column, row name and layout."""


def main() -> int:
    """Run the product; the exit code is 1 if a difference exceeds the tolerance."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--only", nargs="+", choices=COLUMNS, default=list(COLUMNS))
    titles = [title for title, _, _ in ROUTED]
    parser.add_argument("--models", nargs="+", choices=titles, default=titles)
    arguments = parser.parse_args()
    rows: dict[Row, list[str]] = {
        (row[0], row[1], row[2]): row[3:]
        for row in read_rows(PAGE.with_suffix(".csv"))
        if row[0] not in arguments.only or row[1] not in arguments.models
    }
    for title, kind, forced in ROUTED:
        columns = [name for name in arguments.only if not forced or name in ROUTED_COLUMNS]
        if columns and title in arguments.models:
            rows |= measured(title, Trial(kind, to_experts=forced), columns, arguments.steps)
    columns = list(COLUMNS)
    rows = dict(sorted(rows.items(), key=lambda i: (columns.index(i[0][0]), titles.index(i[0][1]))))
    write_rows(PAGE.with_suffix(".csv"), HEADS, [[*row, *cells] for row, cells in rows.items()])
    replace_part(PAGE, MARKS, summary(rows, arguments.steps))
    return int(any(float(cell) >= TOLERANCE for cells in rows.values() for cell in cells if cell))


def measured(title: str, plain: Trial, columns: list[str], steps: int) -> dict[Row, list[str]]:
    """Return the largest difference of loss and norm at each ZeRO stage, by row."""
    layouts = {
        (column, layout_name(fields)): [replace(plain, stage=s, **fields) for s in STAGES]  # type: ignore[arg-type]
        for column in columns
        for fields in COLUMNS[column]
    }
    with tempfile.TemporaryDirectory() as name:
        trials = [each for listed in layouts.values() for each in listed]
        allowed = [trial for trial in trials if is_allowed(trial, Path(name))]
        references = [trial.reference for trial in allowed]
        runs = train_all([*allowed, *references], Path(name), steps=steps)
        curves = {trial: curve(run) for trial, run in runs.items()}
    for trial in references:
        assert clips_enough(curves[trial], trial.clipping), f"{trial}: clipped in too few steps"
    rows = {}
    for (column, layout), listed in layouts.items():
        cells = []
        for trial in listed:
            cells.append("")
            if trial in curves:
                difference = Difference.between(curves[trial.reference], curves[trial])
                cells[-1] = f"{max(difference.loss, difference.norm):.1e}"
        rows[column, title, layout] = cells
        print(column, title, layout, *cells, sep=", ", file=sys.stderr, flush=True)
    return rows


def layout_name(fields: dict[str, object]) -> str:
    """Return the fields of a layout as one cell; which layers an adapter has is the column's."""
    return " ".join(f"{name}={value}" for name, value in fields.items() if name != "adapter")


def is_allowed(trial: Trial, folder: Path) -> bool:
    """Return True if the plan does not refuse the trial."""
    try:
        trial.plan(folder)
    except AssertionError:
        return False
    return True


def summary(rows: dict[Row, list[str]], steps: int) -> str:
    """Return a table of the largest difference of each model and column."""

    def largest(title: str, column: str) -> str:
        found = [
            cell for row, cells in rows.items() if row[:2] == (column, title) for cell in cells
        ]
        return max(filter(None, found), key=float, default="–")

    lines = [(title, *(largest(title, column) for column in COLUMNS)) for title, _, _ in ROUTED]
    versions = ", ".join(f"{name} {version(name)}" for name in PACKAGES)
    return f"{steps} steps each, with {versions}.\n\n{table(('model', *COLUMNS), lines)}"


if __name__ == "__main__":
    sys.exit(main())
