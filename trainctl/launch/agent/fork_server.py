"""A process that imports what ranks need, once for all of a node, and then becomes them by forks.

Importing torch, transformers and DeepSpeed costs a rank some seconds of CPU time. Where ranks train
on the CPUs that they import on, they would all import at the same time, after everything else; this
process imports while the agent prepares the corpus. It has ended when the ranks begin, so they are
the agent's own children (`trainctl.train.fork_ranks` is the other side).
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
from trainctl.runs.processes import adopt_orphans, block_sigterm

_POLL_SECONDS = 0.02


class ForkServer:
    """The agent's handle on the fork server; creating it starts the server.

    Args:
        command: The attempt's command; the server gets this process's environment.
        patience_seconds: How long the imports may take.
    """

    def __init__(self, command: AttemptCommand, patience_seconds: float) -> None:
        self._deadline = time.monotonic() + patience_seconds
        adopt_orphans()
        with block_sigterm():
            self._process = subprocess.Popen(
                [*command.rank_command, FORK_FLAG],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,
            )

    def fork(
        self, variables: Sequence[Mapping[str, str]], check_stop: Callable[[], None]
    ) -> list[int] | None:
        """Fork one rank for each set of variables, and return their pids: children of this process.

        If the server was killed, return its pid alone: its exit status stands for the first rank.
        Return None if it failed by itself or took too long; the ranks then report the error when
        they import.

        Args:
            variables: Variables of each rank, added to the server's environment.
            check_stop: Called again and again; does not return when this process is to end.
        """
        order, answer = self._process.stdin, self._process.stdout
        assert order is not None and answer is not None
        with answer:
            with suppress(BrokenPipeError), order:
                order.write(json.dumps([dict(of_rank) for of_rank in variables]).encode() + b"\n")
            said = b""
            while not said.endswith(b"\n"):
                check_stop()
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
