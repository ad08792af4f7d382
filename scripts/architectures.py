"""Train small models of many architectures on each axis, and record which axes may split them.

    python scripts/architectures.py [--only qwen2,phi3] [--columns context] [--check]

Each cell of `trainctl/options/architectures.json` compares 30 steps in fp32 on two processes with
30 steps on one process. It holds the largest difference of a loss or the largest relative
difference of a gradient norm, or the reason why the axis may not split the architecture.
docs/parallelism.md shows the file as a table.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))

from architecture_cases import ARCHITECTURES, COLUMNS, directory, plan
from fork_server import RanksFailed
from parity_cases import STEPS, TOLERANCE, Curve, Difference, clips_enough
from rank_processes import Case, curve, train_cases

from trainctl.errors import Finding, TrainctlError
from trainctl.options import architectures
from trainctl.plans.types import RunPlan
from trainctl.runs.layout import RunPaths

PAGE = Path(__file__).resolve().parent.parent / "docs" / "parallelism.md"
BEGIN, END = "<!-- architectures -->", "<!-- end of architectures -->"
PACKAGES = ("torch", "deepspeed", "transformers")

Row = dict[str, float | str]


def main() -> int:
    """Train the selected architectures and keep the other rows; with `--check` only compare the
    page with the table.
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", help="comma-separated architectures; others keep their rows")
    parser.add_argument("--columns", help="comma-separated columns; others keep their cells")
    parser.add_argument(
        "--check", action="store_true", help="check that the page has the table; write nothing"
    )
    arguments = parser.parse_args()
    if not arguments.check:
        names = arguments.only.split(",") if arguments.only else list(ARCHITECTURES)
        columns = arguments.columns.split(",") if arguments.columns else list(COLUMNS)
        kept = architectures.architectures_table().rows
        rows = dict(kept) if arguments.only else {}
        for name, row in measured(names, columns):
            found = {**(kept[name] if arguments.columns else {}), **row}
            rows[name] = {column: found[column] for column in COLUMNS}
        write(rows)
        architectures.architectures_table.cache_clear()
    text = PAGE.read_text(encoding="utf-8")
    wanted = with_table(text)
    if not arguments.check:
        PAGE.write_text(wanted, encoding="utf-8")
    return int(arguments.check and text != wanted)


def measured(names: list[str], columns: list[str]) -> Iterator[tuple[str, Row]]:
    """Yield each architecture's name and the wanted cells of its row, one after the other."""
    # The plan refuses what the current table forbids, and the table is what is measured here.
    architectures.why_not = lambda model_type, column: None  # type: ignore[assignment]
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            row = row_of(name, Path(folder), columns)
        print(name, row, flush=True)
        yield name, row


def row_of(name: str, folder: Path, columns: list[str]) -> Row:
    """Train an architecture on some axes, all on the same ranks, and return their cells."""
    model = directory(folder / "model", name)
    alone = case(plan(model, {}, steps=STEPS), folder / "alone")
    train_cases(1, [alone])
    reference = curve(alone.run)
    assert clips_enough(reference), f"{name}: clipped in too few steps"
    row: Row = {}
    cases = {}
    for column in columns:
        plan_or_errors = plan(model, COLUMNS[column], steps=STEPS)
        if isinstance(plan_or_errors, RunPlan):
            cases[column] = case(plan_or_errors, folder / column)
        else:
            row[column] = "; ".join(item.message.rpartition(": ")[2] for item in plan_or_errors)
    for column, outcome in trained(cases).items():
        row[column] = cell(reference, outcome)
    return row


def trained(cases: dict[str, Case]) -> dict[str, Curve | str]:
    """Train the cases and return the curve of each, or the reason why the model cannot be cut.

    If the ranks fail together, each case is trained again by itself to find the one that failed.
    """
    try:
        refusals, *_ = train_cases(2, list(cases.values()), probe="architecture_probe:train")
    except RanksFailed as failed:
        if len(cases) == 1:
            return dict.fromkeys(cases, _why(str(failed)))
        outcomes: dict[str, Curve | str] = {}
        for column, one in cases.items():  # train each case alone to find the one that failed
            again = Case(one.plan, RunPaths(one.run.root / "again"))
            outcomes |= trained({column: again})
        return outcomes
    return {
        column: _why(why) or curve(one.run)
        for (column, one), why in zip(cases.items(), refusals, strict=True)
    }


def _why(text: str) -> str:
    """Return the reason at the end of a rank's refusal; empty if there is none."""
    return (text.strip().splitlines() or [""])[-1].rpartition(" cannot be cut: ")[2]


def case(plan_or_errors: RunPlan | tuple[Finding, ...], folder: Path) -> Case:
    """Return the case that trains a plan in `folder`; fails if the plan was refused."""
    assert isinstance(plan_or_errors, RunPlan), plan_or_errors
    return Case(plan_or_errors, RunPaths(folder))


def cell(reference: Curve, outcome: Curve | str) -> float | str:
    """Return the larger of the loss and norm differences; a reason if there is no curve or the
    difference exceeds the tolerance.
    """
    if isinstance(outcome, str):
        return outcome
    difference = Difference.between(reference, outcome)
    largest = max(difference.loss, difference.norm)
    text = f"{largest:.1e}"
    return float(text) if largest <= TOLERANCE else f"the curve differs by {text}"


def write(rows: dict[str, Mapping[str, float | str]]) -> None:
    """Write the table with its rows in the order of `ARCHITECTURES`."""
    content = {
        "versions": {name: version(name) for name in PACKAGES},
        "steps": STEPS,
        "tolerance": TOLERANCE,
        "rows": {name: rows[name] for name in ARCHITECTURES if name in rows},
    }
    architectures.FILE.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def with_table(text: str) -> str:
    """Return the page with the table between its marks replaced."""
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    return "\n".join([before + BEGIN, *lines(), END]) + after


def lines() -> Iterator[str]:
    """Yield the table as Markdown, followed by the numbered reasons of its refusals."""
    table = architectures.architectures_table()
    versions = ", ".join(f"{name} {of}" for name, of in table.versions.items())
    yield f"{table.steps} steps each, with {versions}."
    yield ""
    yield f"| `model_type` | {' | '.join(COLUMNS)} |"
    yield "|---" * (len(COLUMNS) + 1) + "|"
    reasons: dict[str, None] = {}
    for name, row in table.rows.items():
        cells = []
        for column in COLUMNS:
            cell = row[column]
            if isinstance(cell, str):
                reasons.setdefault(cell)
                cells.append(f"no ({list(reasons).index(cell) + 1})")
            else:
                cells.append(f"{cell:.0e}")
        yield f"| {name} | {' | '.join(cells)} |"
    yield ""
    yield from (f"{number}. {reason}" for number, reason in enumerate(reasons, 1))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except TrainctlError as error:
        sys.exit(str(error))
