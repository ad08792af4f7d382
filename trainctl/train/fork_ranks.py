"""Fork server of a node's ranks: `python -m trainctl.train RUN --attempt N --fork`.

It computes nothing, joins no process group and starts no thread of its own, so a fork inherits only
what imports leave behind. `trainctl.launch.agent.ranks` starts it.
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
from trainctl.runs.imports import gc_disabled
from trainctl.runs.rank_entry import begin

_POLL_SECONDS = 0.001


def become_ranks(plan: RunPlan) -> None:
    """Import what the plan's ranks need, wait for the agent's order, fork. Returns in each rank.

    The fork server itself exits here. When this returns, the rank's environment variables are set
    and its parent is the agent.
    """
    answer = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # keep what imports print out of the answer
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
            # Python warns of forks with threads running; numpy's threads stop for a fork.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            os.close(answer)
            os.dup2(os.open(os.devnull, os.O_RDONLY), sys.stdin.fileno())
            os.setsid()
            os.environ.update(variables)
            # Wait until the agent is the parent: `begin` ties this process to it.
            while os.getppid() == here:
                time.sleep(_POLL_SECONDS)
            begin()
            return
        pids.append(pid)
    os.write(answer, json.dumps(pids).encode() + b"\n")
    os._exit(0)


def _import(plan: RunPlan) -> None:
    """Import what a rank imports before its first step; errors are left for the rank to report."""
    with suppress(TrainctlError), gc_disabled():
        import trainctl.train.rank  # noqa: F401
        from trainctl.engines import patch_checks as declared
        from trainctl.engines.protocol import engine_backend

        engine_backend(plan)
        declared.require_unchanged(plan.config)
