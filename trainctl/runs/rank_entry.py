"""What the elastic agent starts for each rank: tie it to the agent, open its log, become it.

The agent cannot put both streams of a rank into one file, and a rank must not outlive the agent
from its first instant, whatever its command is. Both survive `exec`.
"""

from __future__ import annotations

import os
import sys

from trainctl.runs.command import read_command
from trainctl.runs.layout import RunPaths
from trainctl.runs.processes import RunTag, die_with_parent


def main() -> None:
    """Become the rank; a command that cannot be started ends with 127, as in a shell."""
    die_with_parent()
    tag = RunTag.from_environment(os.environ)
    assert tag.attempt is not None
    attempt = RunPaths(tag.directory).attempt(tag.attempt)
    log = os.open(
        attempt.rank_log(int(os.environ["RANK"])), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644
    )
    os.dup2(log, sys.stdout.fileno())
    os.dup2(log, sys.stderr.fileno())
    os.close(log)
    command = read_command(attempt).rank_command
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"cannot start {command[0]}: {error.strerror}", file=sys.stderr, flush=True)
        os._exit(127)


if __name__ == "__main__":
    main()
