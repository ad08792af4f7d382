"""Compare mixtures of experts on every expert-parallel size and ZeRO stage with one process.

    python scripts/parity_experts.py [--steps 30] [--output docs/experts.md]

Trains on real processes, some seconds each; `tests/train/test_experts.py` runs a part of it. The
rows go to a CSV file beside the output file, and the largest difference of each expert size goes
between its two marks; without a file both are printed. An expert size of 1 is the same layout
without the axis.
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
from page_tables import replace_part, table, write_rows
from parity_cases import STEPS, TOLERANCE, Difference, clips_enough

MARKS = "<!-- expert tables -->", "<!-- end of expert tables -->"
PACKAGES = ("torch", "deepspeed", "transformers")
LAYOUTS = ((2, 1), (2, 2), (4, 1), (4, 2), (4, 4))
"""Number of processes, and expert-parallel size."""
STAGES = (0, 1, 2, 3)
HEADS = ("model", "processes", "expert", *(f"zero_{stage}" for stage in STAGES))

ROUTED = (
    *((kind, kind, ()) for kind in MIXTURES),
    ("gpt_oss, all tokens to two experts", "gpt_oss", (2, 3)),
    ("gpt_oss, all tokens to one expert", "gpt_oss", (5,)),
)
"""Row name, architecture, and the experts that all tokens are routed to. They are those of one rank
where four ranks share eight experts, so that most ranks get no token.
"""


def main() -> int:
    """Run the product; the exit code is 1 if a difference exceeds the tolerance."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument(
        "--output", type=Path, help="page whose text between the two markers is replaced"
    )
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
                    trial_curve = curve_of(Trial(kind, processes, expert, stage, forced))
                    difference = Difference.between(reference, trial_curve)
                    largest = max(difference.loss, difference.norm)
                    wrong += not largest < TOLERANCE
                    cells.append(f"{largest:.1e}")
                rows.append([title, str(processes), str(expert), *cells])
                print(*rows[-1], sep=", ", file=sys.stderr, flush=True)
    if arguments.output is None:
        print("\n".join(map(",".join, rows)), summary(rows, arguments.steps), sep="\n")
    else:
        write_rows(arguments.output.with_suffix(".csv"), HEADS, rows)
        replace_part(arguments.output, MARKS, summary(rows, arguments.steps))
    return int(wrong > 0)


def summary(rows: list[list[str]], steps: int) -> str:
    """Return a table of the largest difference of each model and expert size."""
    sizes = sorted({row[2] for row in rows})
    largest = {
        (row[0], size): max(
            (cell for each in rows if each[0] == row[0] and each[2] == size for cell in each[3:]),
            key=float,
        )
        for row in rows
        for size in sizes
    }
    lines = [
        (model, *(largest[model, size] for size in sizes))
        for model in dict.fromkeys(row[0] for row in rows)
    ]
    versions = ", ".join(f"{name} {version(name)}" for name in PACKAGES)
    heads = ("model", *(f"`expert` {size}" for size in sizes))
    return f"{steps} steps each, with {versions}.\n\n{table(heads, lines)}"


if __name__ == "__main__":
    sys.exit(main())
