"""Server process that imports everything once and forks the ranks of each piece of work.

Importing torch, DeepSpeed and transformers costs a rank some five seconds of processor time; a fork
costs milliseconds, and every piece of work still has processes of its own, with nothing left in
them from the last one. A process may only be forked while it has a single thread, so the server
builds no engine, joins no process group and computes nothing; it checks this before each fork.

Standard library only, beside what it is told to import.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import importlib
import math
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from ports import reserved_port

from trainctl.runs.processes import die_with_parent

POLL_SECONDS = 0.01
PEERS_SECONDS = 3.0
"""Seconds that the other ranks may take to end by themselves after one failed."""
TAIL = 4000
"""Characters of a failed rank's output that are shown."""


class RanksFailed(AssertionError):
    """Failure of a rank, or of the time limit; the server goes on."""


@dataclass(frozen=True)
class Work:
    """One piece of work for the ranks of one world."""

    function: str
    """``module:function``, called on every rank with the payload."""
    payload: bytes
    world_size: int
    """Number of ranks; with 0 the server itself calls the function."""
    environment: Mapping[str, str]
    """Environment of the ranks in addition to the rank variables."""
    path: Sequence[str]
    """Import path of the ranks."""
    folder: Path
    """Folder for output (`0.out`, `0.err`) and results (`0.result`)."""
    seconds: float
    """Time limit; the ranks then print their stacks and are killed."""


class ForkServer:
    """Client of the server; a context manager. The server ends with it, or with this process.

    Args:
        preload: Modules to import before the first fork.
        environment: Variables that these imports need.
    """

    def __init__(self, preload: Sequence[str], environment: Mapping[str, str]) -> None:
        self._environment = dict(environment)
        self._prepared: set[tuple[str, Any]] = set()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed by close)
        self._server = subprocess.Popen(
            [sys.executable, __file__, str(os.getpid()), *preload],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={**os.environ, **environment, "PYTHONPATH": os.pathsep.join(sys.path)},
        )

    @property
    def pid(self) -> int:
        return self._server.pid

    @property
    def is_alive(self) -> bool:
        """Return True if the server accepts work: it ends when a preparation fails."""
        return self._server.poll() is None

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, function: str, argument: Any, world_size: int, seconds: float) -> list[Any]:
        """Call a function on every rank of a new world, and return the results by rank.

        Args:
            function: ``module:function``; it gets the argument, and its result must be picklable.

        Raises:
            RanksFailed: The message ends with the output of the rank that failed first.
        """
        with tempfile.TemporaryDirectory() as folder:
            return self._do(function, argument, world_size, seconds, Path(folder))

    def prepare(self, function: str, argument: Any) -> None:
        """Call a function once in the server, to load what all ranks will share.

        The function must leave no thread behind.

        Args:
            argument: Anything picklable and hashable.

        Raises:
            RanksFailed: It failed, and the server ended with it.
        """
        if (function, argument) not in self._prepared:
            self._do(function, argument, 0, math.inf, Path())
            self._prepared.add((function, argument))

    def _do(
        self, function: str, argument: Any, world_size: int, seconds: float, folder: Path
    ) -> list[Any]:
        work = Work(
            function=function,
            payload=pickle.dumps(argument),
            world_size=world_size,
            environment={**os.environ, **self._environment},
            path=sys.path,
            folder=folder,
            seconds=seconds,
        )
        assert self._server.stdin is not None and self._server.stdout is not None
        try:
            pickle.dump(work, self._server.stdin)
            self._server.stdin.flush()
            problem = pickle.load(self._server.stdout)
        except (BrokenPipeError, EOFError) as gone:
            self._errors.seek(0)
            raise RanksFailed(self._errors.read().decode()[-TAIL:]) from gone
        if problem is not None:
            rank, what = problem
            output = (folder / f"{rank}.err").read_text(errors="replace")
            raise RanksFailed(f"rank {rank} of {world_size} {what}:\n{output[-TAIL:]}")
        return [
            pickle.loads((folder / f"{rank}.result").read_bytes()) for rank in range(world_size)
        ]

    def close(self) -> None:
        """End the server."""
        assert self._server.stdin is not None and self._server.stdout is not None
        self._server.stdin.close()
        self._server.wait()
        self._server.stdout.close()
        self._errors.close()


def serve(requests: BinaryIO, answers: BinaryIO) -> None:
    """Fork the ranks of one piece of work after the other, until there is no more work.

    Returns in the server. A rank leaves as one that the agent started does: its threads have ended
    and its exit handlers have run, but its libraries are not unloaded.
    """
    while True:
        try:
            work: Work = pickle.load(requests)
        except EOFError:
            return
        if work.world_size == 0:
            _call(work)
        threads = os.listdir("/proc/self/task")  # noqa: PTH208 (names only)
        assert len(threads) == 1, f"the server must not have threads to fork: {threads}"
        with reserved_port() as port:
            ranks: dict[int, int] = {}
            for rank in range(work.world_size):
                server = os.getpid()
                pid = os.fork()
                if pid == 0:
                    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
                    requests.close()
                    answers.close()
                    _be_rank(work, rank, port, server)
                    threading._shutdown()  # type: ignore[attr-defined]
                    atexit._run_exitfuncs()
                    sys.stdout.flush()
                    sys.stderr.flush()
                    os._exit(0)
                ranks[pid] = rank
            problem = _watch(ranks, work)
        pickle.dump(problem, answers)
        answers.flush()


def _be_rank(work: Work, rank: int, port: int, server: int) -> None:
    os.setsid()  # a single signal then reaches it and its children
    die_with_parent(server)
    for descriptor, name in ((1, "out"), (2, "err")):
        file = os.open(work.folder / f"{rank}.{name}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, descriptor)
        os.close(file)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    os.environ.clear()
    os.environ.update(work.environment)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(work.world_size),
        LOCAL_WORLD_SIZE=str(work.world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    sys.path[:] = work.path
    try:
        result = _call(work)
    except BaseException:
        # Leave at once: threads of the failed work might keep an orderly exit from ending.
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    (work.folder / f"{rank}.result").write_bytes(pickle.dumps(result))


def _call(work: Work) -> Any:
    module, _, function = work.function.partition(":")
    return getattr(importlib.import_module(module), function)(pickle.loads(work.payload))


def _watch(ranks: dict[int, int], work: Work) -> tuple[int, str] | None:
    """Wait for the ranks by pid; return the rank that failed first and its status, or None."""
    failed: dict[int, str] = {}
    deadline = time.monotonic() + work.seconds
    while ranks:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in ranks:
            rank = ranks.pop(pid)
            code = os.waitstatus_to_exitcode(status)
            if code != 0 and deadline < math.inf:
                failed[rank] = f"ended by {signal.Signals(-code).name}" if code < 0 else "failed"
                deadline = min(deadline, time.monotonic() + PEERS_SECONDS)
        elif time.monotonic() > deadline:
            if not failed:
                failed[min(ranks.values())] = f"was not done after {work.seconds:g} seconds"
                _signal(ranks, signal.SIGUSR1)
                time.sleep(1)
            _signal(ranks, signal.SIGKILL)
            deadline = math.inf
        elif pid == 0:
            time.sleep(POLL_SECONDS)
    # A rank says why before it ends, and only then do the others lose it: two may end at once.
    said = {(work.folder / f"{rank}.err").stat().st_mtime_ns: rank for rank in failed}
    return (said[min(said)], failed[said[min(said)]]) if said else None


def _signal(ranks: dict[int, int], number: signal.Signals) -> None:
    for pid in ranks:
        if number is signal.SIGKILL:
            os.killpg(pid, number)
        else:
            os.kill(pid, number)


def main() -> None:
    """Import the modules named on the command line, then serve."""
    die_with_parent(int(sys.argv[1]))
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # imports may print, and stdout carries the answers
    for name in sys.argv[2:]:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # otherwise a rank's garbage collector would touch, and so copy, the shared pages
    serve(requests, answers)


if __name__ == "__main__":
    main()
