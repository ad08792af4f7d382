"""The process that ranks are forked from: `python -m trainctl.train RUN --attempt N --fork`.

It computes nothing, joins nothing and starts no thread of its own: what a fork finds is what an
import leaves. `trainctl.launch.agent.fork_server` starts it.
"""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from contextlib import suppress

from trainctl.errors import TrainctlError
from trainctl.plan.types import RunPlan
from trainctl.runs.imports import uncollected
from trainctl.runs.rank_entry import begin

_POLL_SECONDS = 0.001


def become_ranks(plan: RunPlan) -> None:
    """Import what ranks of the plan need, wait for the order, fork. Returns in each rank.

    This process itself ends here. A rank's variables are set, and its parent is the agent.

    Args:
        plan: What will be trained.
    """
    answer = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what an import prints is no answer
    _import(plan)
    order = b""
    while not order.endswith(b"\n"):
        part = os.read(sys.stdin.fileno(), 1 << 16)
        if not part:  # the agent has gone
            os._exit(1)
        order += part
    here = os.getpid()
    pids = []
    for variables in json.loads(order):
        with warnings.catch_warnings():
            # Python's, of forks beside threads: those of numpy stop for a fork.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            os.close(answer)
            os.dup2(os.open(os.devnull, os.O_RDONLY), sys.stdin.fileno())
            os.setsid()
            os.environ.update(variables)
            while os.getppid() == here:  # then it is the agent, to which `begin` ties this process
                time.sleep(_POLL_SECONDS)
            begin()
            return
        pids.append(pid)
    os.write(answer, json.dumps(pids).encode() + b"\n")
    os._exit(0)


def _import(plan: RunPlan) -> None:
    """What a rank imports before its first step; a rank says it if that fails."""
    with suppress(TrainctlError), uncollected():
        import trainctl.train.rank  # noqa: F401
        from trainctl.engines import declared
        from trainctl.engines.choose import engine_room

        engine_room(plan)
        declared.require_unchanged(plan.config)
