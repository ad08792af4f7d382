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
    "trainctl.monitor.loggers",
    "trainctl.train",
    "trainctl.train.offline",
    "trainctl.train.models.inspection_entry",
)


def _preloaded():
    """What is to be run, and its arguments; None where that is not ours."""
    words = sys.orig_argv[1:]
    if words[:1] == ["-P"]:
        del words[0]
    if words[:1] == ["-m"] and words[1] in MODULES:
        return words[1], words[2:]
    if len(sys.orig_argv) > 1 and os.path.basename(sys.orig_argv[1]) == "trainctl":  # noqa: PTH119
        return "trainctl", sys.orig_argv[2:]
    return None


if os.environ.get("TRAINCTL_TESTS_SERVER_OF") == sys.prefix and (found := _preloaded()):
    import fork_client

    fork_client.main(os.environ["TRAINCTL_TESTS_SERVER"], *found)
