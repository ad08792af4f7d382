"""Kill launcher, sender and store of mirrored runs at random moments, and print the outcome.

    python scripts/mirror_kills.py [--store moto|localbucket] [--trials 30] [--seed 0]

`localbucket` is a second implementation of S3 on PyPI (`pip install localbucket`).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
from mirror_kills import VICTIMS, store_server, trial


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--store", choices=("moto", "localbucket"), default="moto")
    parser.add_argument("--trials", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    passed = 0
    with (
        tempfile.TemporaryDirectory() as folder,
        store_server(given.store, Path(folder)) as server,
    ):
        for number in range(given.trials):
            place, victim = Path(folder) / f"trial-{number}", VICTIMS[number % len(VICTIMS)]
            place.mkdir()
            try:
                print(number, trial(server, place, [victim], given.seed + number), flush=True)
                passed += 1
            except Exception:
                print(number, victim, "FAILED", flush=True)
                traceback.print_exc()
    print(f"{given.store}: {passed} of {given.trials} trials left whole and complete mirrors")
    return 0 if passed == given.trials else 1


if __name__ == "__main__":
    sys.exit(main())
