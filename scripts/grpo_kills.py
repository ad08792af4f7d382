"""Kill runs of GRPO in rollouts, rewards and updates, three times each, and print the outcome.

python scripts/grpo_kills.py [--trials 10] [--seed 0]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
from grpo_kills import LAYOUTS, trial, whole_run, write_prompts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    passed = kills = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prompts = write_prompts(folder / "prompts.jsonl")
        whole = {layout: whole_run(folder / layout, prompts, layout) for layout in LAYOUTS}
        for number in range(given.trials):
            layout, place = list(LAYOUTS)[number % len(LAYOUTS)], folder / f"trial-{number}"
            try:
                found = trial(place, prompts, layout, whole[layout], given.seed + number)
                print(number, found, flush=True)
                passed, kills = passed + 1, kills + len(found["killed"])
            except Exception:
                print(number, layout, "FAILED", flush=True)
                traceback.print_exc()
    print(f"{passed} of {given.trials} trials had the same curve and answers, after {kills} kills")
    return 0 if passed == given.trials else 1


if __name__ == "__main__":
    sys.exit(main())
