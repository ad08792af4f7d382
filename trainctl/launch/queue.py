"""Queue of runs on this machine, one after another or a few at a time."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from types import FrameType

from trainctl.launch.processes import Process, start_in_background
from trainctl.runs.layout import AttemptPaths, RunPaths
from trainctl.runs.lock import hold

_POLL_SECONDS = 0.1


class QueueStopped(Exception):
    """A signal, whose number is `number`, ended the queue and its running launches."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def run_queue(
    attempts: Sequence[tuple[RunPaths, AttemptPaths]],
    *,
    parallel: int,
    on_end: Callable[[RunPaths, int], None],
) -> None:
    """Run the attempts, each by its own launcher, and wait for all. Call it in the main thread.

    A failure does not keep the others from running. SIGINT and SIGTERM are passed to the running
    launchers, and the rest is not started.

    Args:
        on_end: Called with each run that ended, and its exit code.

    Raises:
        QueueStopped: A signal came; all launchers have ended.
    """
    waiting = list(attempts)
    running: list[tuple[RunPaths, Process]] = []
    received: list[int] = []

    def stop(number: int, _: FrameType | None) -> None:
        received.append(number)
        for _run, process in running:
            process.send_signal(number)

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        while running or (waiting and not received):
            while waiting and len(running) < parallel and not received:
                run, attempt = waiting.pop(0)
                with hold(run) as lock:
                    running.append((run, start_in_background(run, attempt, lock, is_tied=True)))
                if received:  # a signal between hold and here
                    running[-1][1].send_signal(received[0])
            for run, process in [item for item in running if item[1].poll() is not None]:
                running.remove((run, process))
                on_end(run, process.returncode)
            time.sleep(_POLL_SECONDS)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if received:
        raise QueueStopped(received[0])
