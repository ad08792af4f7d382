"""`python -m trainctl.runs.sweep_entry RUN_DIR RUN_ID [--attempt N]`: ends a run's processes here.

A launcher starts it on a node whose agent did not end in good order.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from trainctl.runs.processes import RunTag, sweep


def main() -> int:
    """Return 0 if no process is left; 1 if SIGKILL did not end some, whose pids are printed."""
    parser = argparse.ArgumentParser(prog="python -m trainctl.runs.sweep_entry")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("run_id")
    parser.add_argument("--attempt", type=int)
    parser.add_argument("--grace-seconds", type=float, default=0.0)
    given = parser.parse_args()
    stuck = sweep(
        RunTag(given.run_id, given.run_dir, given.attempt), grace_seconds=given.grace_seconds
    )
    if stuck:
        print(*sorted(stuck))
    return int(bool(stuck))


if __name__ == "__main__":
    raise SystemExit(main())
