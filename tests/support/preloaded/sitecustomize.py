"""Read by every Python that finds this folder in PYTHONPATH: a command of trainctl is forked, not
started.

Tests whose launches are many, and are not about how processes start and end, put it there
(`preloaded` in tests/conftest.py). In the place of a rank, a metrics logger or `trainctl`
itself then stands this small process: it passes signals on, ends as the fork does, and the fork
ends with it. The agent is a real one: what it ends at last it knows by their environment.
"""

import os
import sys

MODULES = (
    "trainctl",
    "trainctl.data",
    "trainctl.loggers",
    "trainctl.train",
    "trainctl.train.offline",
    "trainctl.train.stored_entry",
    "trainctl.train.trace_entry",
)


def _preloaded():
    """What is to be run, and its arguments; None where that is not ours."""
    if sys.orig_argv[1:2] == ["-m"] and sys.orig_argv[2] in MODULES:
        return sys.orig_argv[2], sys.orig_argv[3:]
    if len(sys.orig_argv) > 1 and os.path.basename(sys.orig_argv[1]) == "trainctl":  # noqa: PTH119
        return "trainctl", sys.orig_argv[2:]
    return None


if os.environ.get("TRAINCTL_TESTS_SERVER_OF") == sys.prefix and (found := _preloaded()):
    import fork_client

    fork_client.main(os.environ["TRAINCTL_TESTS_SERVER"], *found)
