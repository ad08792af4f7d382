"""Mixtures of experts on every size of the expert axis and ZeRO stage, against one process.

    python scripts/parity_experts.py [--steps 30] [--output docs/experts.md]

Trains on real processes, some seconds each; `tests/train/test_experts.py` does a part of it. The
table between the two marks of the output file is replaced; without a file it is printed. An expert
size of 1 beside it is the same layout without the axis.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from functools import partial
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))

from expert_cases import MIXTURES, Trial
from parity_cases import STEPS, TOLERANCE, Difference, clips_enough

BEGIN, END = "<!-- expert tables -->", "<!-- end of expert tables -->"
PACKAGES = ("torch", "deepspeed", "transformers")
LAYOUTS = ((2, 1), (2, 2), (4, 1), (4, 2), (4, 4))
"""Processes, and the size of the expert axis."""
STAGES = (0, 1, 2, 3)

ROUTED = (
    *((kind, kind, ()) for kind in MIXTURES),
    ("gpt_oss, all tokens to two experts", "gpt_oss", (2, 3)),
    ("gpt_oss, all tokens to one expert", "gpt_oss", (5,)),
)
"""What a row is called, the architecture, and the experts that all tokens go to: those of one rank
where four share eight, so that most ranks get no token."""


def main() -> int:
    """Run the product; the exit code is 1 if a cell is too far off."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--output", type=Path, help="file with the two marks")
    arguments = parser.parse_args()
    rows, wrong = [], 0
    for title, kind, forced in ROUTED:
        with tempfile.TemporaryDirectory() as name:
            curve_of = partial(Trial.train, folder=Path(name), steps=arguments.steps)
            reference = curve_of(Trial(kind, to_experts=forced))
            assert clips_enough(reference), f"{title}: clipped in too few steps"
            for processes, expert in LAYOUTS:
                cells = []
                for stage in STAGES:
                    found = curve_of(Trial(kind, processes, expert, stage, forced))
                    difference = Difference.between(reference, found)
                    largest = max(difference.loss, difference.norm)
                    wrong += not largest < TOLERANCE
                    cells.append(f"{largest:.1e}")
                rows.append(f"| {title} | {processes} | {expert} | {' | '.join(cells)} |")
                print(rows[-1], file=sys.stderr, flush=True)
    heads = " | ".join(f"ZeRO {stage}" for stage in STAGES)
    versions = ", ".join(f"{name} {version(name)}" for name in PACKAGES)
    lines = [
        f"{arguments.steps} steps each, with {versions}.",
        "",
        f"| model | processes | expert | {heads} |",
        "|---" * (3 + len(STAGES)) + "|",
        *rows,
    ]
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
