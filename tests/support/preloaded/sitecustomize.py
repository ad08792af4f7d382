"""Hook that makes every Python with this folder in PYTHONPATH fork trainctl commands from a server.

Tests with many launches that are not about how processes start and end put the folder there
(`preloaded` in tests/conftest.py). A small placeholder process then stands for a rank, a metrics
logger or `trainctl` itself. It passes signals on to the fork and ends as the fork does, and the
fork ends with it. The agent is a real process, which finds the forks to end by their environment.
"""

import os
import sys

MODULES = (
    "trainctl",
    "trainctl.data",
    "trainctl.monitor.loggers",
    "trainctl.train",
    "trainctl.train.offline",
    "trainctl.train.models.inspection_entry",
)


def _preloaded():
    """Return the module to run and its arguments; None if the command is not trainctl's."""
    words = sys.orig_argv[1:]
    if words[:1] == ["-P"]:
        del words[0]
    if words[:1] == ["-m"] and words[1] in MODULES:
        return words[1], words[2:]
    if len(sys.orig_argv) > 1 and os.path.basename(sys.orig_argv[1]) == "trainctl":  # noqa: PTH119
        return "trainctl", sys.orig_argv[2:]
    return None


if os.environ.get("TRAINCTL_TESTS_SERVER_OF") == sys.prefix and (request := _preloaded()):
    import fork_client

    fork_client.main(os.environ["TRAINCTL_TESTS_SERVER"], *request)
