"""Fault injection, for tests only: a rank kills itself at a named point of a save.

The points are ``fragment`` (a rank's file is half written), ``manifest`` (all files are complete),
``rename`` (the manifest is complete too), ``pointer`` (the checkpoint has its final name) and
``rotation`` (an old checkpoint is about to be deleted).
"""

from __future__ import annotations

import os
import signal

FAULT_VARIABLE = "TRAINCTL_FAULT"
"""Environment variable with ``phase:NAME``, then optionally ``:RANK`` (default 0) and ``:STEP`` of
the save (default any).
"""


def inject_fault(phase: str, *, rank: int, step: int) -> None:
    """Kill this process by SIGKILL if the environment asks for it at this point."""
    wanted = os.environ.get(FAULT_VARIABLE)
    if wanted is None:
        return
    kind, name, at_rank, at_step = (*wanted.split(":"), "", "", "")[:4]
    here = (kind, name, int(at_rank or 0)) == ("phase", phase, rank)
    if here and at_step in ("", str(step)):
        os.kill(os.getpid(), signal.SIGKILL)
