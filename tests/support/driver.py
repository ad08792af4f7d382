"""Launcher process for tests: `driver.py RUN_DIR BEHAVIOUR` prints the records and the exit
code.
"""

import json
import sys
from pathlib import Path

from trainctl.errors import TrainctlError
from trainctl.launchers.interface import LaunchRequest, launch_function
from trainctl.runs.directory import last_attempt, new_attempt, open_run, read_plan
from trainctl.runs.lock import hold_lock


def main() -> int:
    run = open_run(Path(sys.argv[1]))
    plan = read_plan(run.root / "plan_for_tests.json")
    stand_in = Path(__file__).with_name("stand_in.py")
    try:
        with hold_lock(run):
            print(json.dumps({"event": "locked", "after": last_attempt(run)}), flush=True)
            launch = LaunchRequest(
                run=run,
                attempt=new_attempt(run, plan),
                plan=plan,
                on_event=lambda event: print(json.dumps(event), flush=True),
                rank_command=(sys.executable, str(stand_in), sys.argv[2]),
            )
            outcome = launch_function(launch.plan)(launch)
    except TrainctlError as error:
        print(f"{error.message}\n{error.hint}", file=sys.stderr)
        return int(error.exit_code)
    print(f"{outcome.message}\n{outcome.hint}", *outcome.log_tail, sep="\n", file=sys.stderr)
    return outcome.exit_code


if __name__ == "__main__":
    sys.exit(main())
