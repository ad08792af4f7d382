"""Resume on every other layout (processes, ZeRO stages, offload, model-parallel axes) as a table.

    python scripts/resume_matrix.py [--output docs/resume.md]

Trains a tiny model in fp32 on real processes. It runs several hundred attempts, so it takes long;
`tests/train/test_resume_elsewhere.py` and `test_resume_layouts.py` run a part of it. The rows go to
a CSV file beside the output file, and their summary between its two marks; without a file both are
printed.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))

import elsewhere
from elsewhere import Journey, Leg
from page_tables import replace_part, table, write_rows

MARKS = "<!-- resume matrix -->", "<!-- end of resume matrix -->"
HEADS = ("processes", "stage", "offload", "cut", "loss", "every_sample_once", "replayed_steps")
TOLERANCE = 1e-5
Row = list[str]


def main() -> int:
    """Run the product; the exit code is 1 if a difference exceeds the tolerance."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--output", type=Path, help="page whose text between the two markers is replaced"
    )
    arguments = parser.parse_args()
    journeys = [
        way(processes, stages)
        for way, processes, stages in itertools.product(
            (elsewhere.plain, elsewhere.offloaded), elsewhere.PROCESSES, elsewhere.STAGES
        )
    ]
    journeys += elsewhere.CUTS
    with tempfile.TemporaryDirectory() as folder:
        runs = elsewhere.travel(Path(folder), journeys)
        reference = runs[elsewhere.REFERENCE]
        rows, wrong = [], 0
        for journey in journeys:
            run = runs[journey]
            difference = elsewhere.largest_difference(run, reference)
            once = elsewhere.sees_every_sample_once(run, journey[-1].plan())
            compared = elsewhere.replayed_steps(run)
            wrong += not (once and difference < TOLERANCE)
            rows.append(_row(journey, difference, once, compared))
    if arguments.output is None:
        print("\n".join(map(",".join, rows)), summary(rows), sep="\n")
    else:
        write_rows(arguments.output.with_suffix(".csv"), HEADS, rows)
        replace_part(arguments.output, MARKS, summary(rows))
    print(f"{len(journeys)} journeys, {wrong} wrong")
    return int(wrong > 0)


def _row(journey: Journey, difference: float, once: bool, compared: int) -> Row:
    return [
        _way(journey, lambda leg: str(leg.processes)),
        _way(journey, lambda leg: str(leg.stage)),
        _way(journey, lambda leg: leg.offload),
        _way(journey, lambda leg: leg.cut),
        f"{difference:.1e}",
        "yes" if once else "no",
        str(compared),
    ]


def summary(rows: list[Row]) -> str:
    """Return a table of the largest difference of each kind of journey."""
    kinds: dict[str, list[Row]] = {}
    for row in rows:
        kinds.setdefault(_kind(row), []).append(row)
    return table(
        ("change", "journeys", "largest loss difference", "every sample once"),
        [
            (
                kind,
                str(len(each)),
                max((row[4] for row in each), key=float),
                "yes" if all(row[5] == "yes" for row in each) else "**no**",
            )
            for kind, each in kinds.items()
        ],
    )


def _kind(row: Row) -> str:
    if set(row[3].split(" -> ")) != {"none"}:
        return row[3].replace("none", f"ZeRO {row[1].split(' -> ')[1]}").replace("->", "→")
    if "cpu" in row[2]:
        return "the same, with the optimizer in host memory on the way"
    return "processes 1, 2 and 4, ZeRO stages"


def _way(journey: Journey, of: Callable[[Leg], str]) -> str:
    return " -> ".join(map(of, journey))


if __name__ == "__main__":
    sys.exit(main())
