"""Resume on every other layout: processes x ZeRO stages x offload, and cut models, as a table.

    python scripts/resume_matrix.py [--output docs/resume.md]

Trains a tiny model in fp32 on real processes, some hundred attempts in all, so it takes a while;
`tests/train/test_resume_elsewhere.py` and `test_resume_layouts.py` do a part of it. The table
between the two marks of the output file is replaced; without a file it is printed.
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

BEGIN, END = "<!-- resume matrix -->", "<!-- end of resume matrix -->"
TOLERANCE = 1e-5


def main() -> int:
    """Run the product; the exit code is 1 if a row is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, help="file with the two marks")
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
    table = "\n".join(
        [
            "| processes | ZeRO stage | optimizer offload | model cut | largest loss difference "
            "| every sample once | replayed steps compared |",
            "|---|---|---|---|---|---|---|",
            *rows,
        ]
    )
    if arguments.output is None:
        print(table)
    else:
        text = arguments.output.read_text(encoding="utf-8")
        before, after = text.split(BEGIN)[0], text.split(END)[1]
        arguments.output.write_text(f"{before}{BEGIN}\n{table}\n{END}{after}", encoding="utf-8")
    print(f"{len(journeys)} journeys, {wrong} wrong")
    return int(wrong > 0)


def _row(journey: Journey, difference: float, once: bool, compared: int) -> str:
    cells = (
        _way(journey, lambda leg: str(leg.processes)),
        _way(journey, lambda leg: str(leg.stage)),
        _way(journey, lambda leg: leg.offload),
        _way(journey, lambda leg: leg.cut),
        f"{difference:.1e}",
        "yes" if once else "**no**",
        str(compared),
    )
    return f"| {' | '.join(cells)} |"


def _way(journey: Journey, of: Callable[[Leg], str]) -> str:
    return " → ".join(map(of, journey))


if __name__ == "__main__":
    sys.exit(main())
