"""A process that imports what ranks need, once for all of a node, and then becomes them by forks.

Importing torch, transformers and DeepSpeed costs a rank some seconds of a processor. Where ranks
are on the processors that import, they would all do so at the same time, after everything else;
this process does it while the agent prepares the corpus. Ranks that it has forked are the agent's
own children: it is gone when they begin (`trainctl.train.forks` is its other side).
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from trainctl.runs.command import FORK_FLAG, AttemptCommand
from trainctl.runs.processes import adopt_orphans, blocked_for_ranks

_POLL_SECONDS = 0.02


class Nursery:
    """The agent's side of it. Starts it.

    Args:
        command: What the ranks are; its environment is this process's.
        patience_seconds: How long it may take to import.
    """

    def __init__(self, command: AttemptCommand, patience_seconds: float) -> None:
        self._deadline = time.monotonic() + patience_seconds
        adopt_orphans()
        with blocked_for_ranks():
            self._process = subprocess.Popen(
                [*command.rank_command, FORK_FLAG],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,
            )

    def fork(
        self, variables: Sequence[Mapping[str, str]], still_wanted: Callable[[], None]
    ) -> list[int] | None:
        """Have it fork one rank for each set of variables; their pids, of children of this process.

        Its own alone if it was killed: it then stands, ended as it is, for the first rank. None if
        it fails by itself or takes too long: then ranks will say why, when they import.

        Args:
            variables: Set for each rank, beside those that this process had when it was started.
            still_wanted: Called again and again; does not return when this process is to end.
        """
        order, answer = self._process.stdin, self._process.stdout
        assert order is not None and answer is not None
        with answer:
            with suppress(BrokenPipeError), order:
                order.write(json.dumps([dict(of_rank) for of_rank in variables]).encode() + b"\n")
            said = b""
            while not said.endswith(b"\n"):
                still_wanted()
                if select.select([answer], [], [], _POLL_SECONDS)[0]:
                    part = os.read(answer.fileno(), 1 << 16)
                    if not part:
                        break
                    said += part
                elif time.monotonic() > self._deadline:
                    self._process.kill()
                    return None
        ended = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
        if ended is None or ended.si_code != os.CLD_EXITED:
            return [self._process.pid]
        if self._process.wait() != 0:
            return None
        pids: list[int] = json.loads(said)
        return pids
