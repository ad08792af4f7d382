"""`python -m trainctl.runs.tied_entry SIGNAL COMMAND ...`: run a command tied to its parent.

The command gets the signal when its parent ends. For programs that are not ours (ssh, srun, mpirun)
and would outlive a launcher that is killed. The parent's pid is not passed on: on another machine
it would name an unrelated process.
"""

from __future__ import annotations

import os
import sys

from trainctl.runs.processes import PARENT_VARIABLE, die_with_parent


def main() -> None:
    """Execute the command; exit with 127, as a shell does, if it cannot be started."""
    die_with_parent(death_signal=int(sys.argv[1]))
    os.environ.pop(PARENT_VARIABLE, None)
    command = sys.argv[2:]
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"cannot start {command[0]}: {error.strerror}", file=sys.stderr, flush=True)
        os._exit(127)


if __name__ == "__main__":
    main()
