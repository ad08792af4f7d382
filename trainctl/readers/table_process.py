"""Child process that reads tables with pyarrow, so that a damaged file cannot crash the parent.

pyarrow follows offsets that it finds in a file. Its results are validated before use, but what
validation misses, and a file truncated while it is mapped, crash the process by SIGSEGV or SIGBUS.
Only the child dies then, and the parent raises an error that names the file.

Both processes run trainctl and exchange pickles. The parent sends a function with its arguments,
and the child returns its items. After each item the parent says whether it wants another one.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

from trainctl.errors import ExitCode, TrainctlError
from trainctl.readers.remote import File
from trainctl.readers.stream import Damaged

_CRASHES = {
    signal.SIGSEGV,
    signal.SIGBUS,
    signal.SIGABRT,
    signal.SIGFPE,
    signal.SIGILL,
}
"""Signals by which damaged data kills a process; any other signal has another cause."""

_COMMAND = "from trainctl.readers.table_process import serve; serve()"


class _Process:
    """A child process, and the environment it was started with."""

    def __init__(self) -> None:
        self.environment = dict(os.environ)
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", _COMMAND], stdin=pipe, stdout=pipe
        )

    def send(self, message: Any) -> None:
        assert self._process.stdin is not None
        pickle.dump(message, self._process.stdin)
        self._process.stdin.flush()

    def receive(self) -> tuple[str, Any]:
        assert self._process.stdout is not None
        answer: tuple[str, Any] = pickle.load(self._process.stdout)
        return answer

    def end(self) -> int:
        """Kill the process and return its exit code, negative for a signal."""
        self._process.kill()  # no effect if it has ended
        code = self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            try:
                stream.close()
            except OSError:  # a dead process did not read the last message
                continue
        return code


_idle: dict[int, _Process] = {}
"""Idle child process by the pid of its parent: a fork of the parent must not share it."""


def read_in_process(
    function: Callable[..., Iterator[Any]], file: File, *rest: Any
) -> Iterator[Any]:
    """Yield the items of ``function(file, *rest)``, which runs in a child process.

    Args:
        function: A module-level function, which pickle finds by its name.
        rest: Further arguments; they and the items are pickled.

    Raises:
        Damaged: The file crashed the process.
        TrainctlError: Raised by the function; or something else ended the process (exit code 4).
    """
    process = _idle.pop(os.getpid(), None)
    if process is not None and process.environment != os.environ:
        process.end()
        process = None
    process = process or _Process()
    try:
        process.send((function, file, *rest))
        kind, value = process.receive()
        while kind == "item":
            process.send(True)  # the next item is read while this one is used
            yield value
            kind, value = process.receive()
    except GeneratorExit:
        if process.receive()[0] == "item":
            process.send(False)
        _idle[os.getpid()] = process
        raise
    except (EOFError, BrokenPipeError, pickle.UnpicklingError):
        raise _death(file, process.end()) from None
    except BaseException:
        process.end()
        raise
    _idle[os.getpid()] = process
    if kind == "error":
        raise value


def _death(file: File, code: int) -> TrainctlError:
    if -code in _CRASHES:
        return Damaged(
            f"{file} is damaged: the process that read it died by {signal.Signals(-code).name}",
            hint="fetch or write it again",
        )
    how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
    return TrainctlError(
        f"the process that read {file} {how}",
        hint="it may have had too little memory; start again",
        exit_code=ExitCode.environment,
    )


def serve() -> None:
    """Answer requests on stdin until it closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # keep library output off the pipe
    requests = sys.stdin.buffer
    try:
        while True:
            function, *arguments = pickle.load(requests)
            _answer(function, arguments, requests, answers)
    except (EOFError, BrokenPipeError):
        os._exit(0)


def _answer(
    function: Callable[..., Iterator[Any]],
    arguments: list[Any],
    requests: BinaryIO,
    answers: BinaryIO,
) -> None:
    def send(kind: str, value: Any) -> None:
        pickle.dump((kind, value), answers)
        answers.flush()

    items = function(*arguments)
    try:
        for item in items:
            send("item", item)
            if not pickle.load(requests):
                return
    except (EOFError, BrokenPipeError):
        raise
    except Exception as error:
        send("error", error)
        return
    send("end", None)
