"""Mixtures of experts on every size of the expert axis and ZeRO stage, against one process.

    python scripts/parity_experts.py [--output docs/experts.md]

Trains on real processes, a few seconds each; `tests/train/test_experts.py` does a part of it. The
table between the two marks of the output file is replaced; without a file it is printed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from functools import cache
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))

from expert_cases import MIXTURES, Trial
from parity_cases import TOLERANCE, Difference

BEGIN, END = "<!-- expert tables -->", "<!-- end of expert tables -->"
LAYOUTS = ((2, 1), (2, 2), (4, 1), (4, 2), (4, 4))
"""Processes, and the size of the expert axis."""
STAGES = (0, 1, 2, 3)


def main() -> int:
    """Run the product; the exit code is 1 if a cell is too far off."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, help="file with the two marks")
    arguments = parser.parse_args()
    rows, wrong = [], 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        curve_of = cache(lambda trial: trial.train(folder))
        for kind in MIXTURES:
            forced = (2, 3) if kind == "gpt_oss" else ()
            for processes, expert in LAYOUTS:
                cells = []
                for stage in STAGES:
                    trial = Trial(kind, processes, expert, stage, forced)
                    found = Difference.between(curve_of(trial.reference), curve_of(trial))
                    largest = max(found.loss, found.norm)
                    wrong += not largest < TOLERANCE
                    cells.append(f"{largest:.1e}")
                rows.append(f"| {kind} | {processes} | {expert} | {' | '.join(cells)} |")
                print(rows[-1], file=sys.stderr, flush=True)
    heads = " | ".join(f"ZeRO {stage}" for stage in STAGES)
    lines = [f"| model | processes | expert | {heads} |", "|---" * (3 + len(STAGES)) + "|", *rows]
    table = "\n".join(lines)
    if arguments.output is None:
        print(table)
    else:
        text = arguments.output.read_text(encoding="utf-8")
        before, after = text.split(BEGIN)[0], text.split(END)[1]
        arguments.output.write_text(f"{before}{BEGIN}\n{table}\n{END}{after}", encoding="utf-8")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
