"""`driver.py` in a fork of `preloaded_server`; its agent is a fork of the launcher.

The import of torch is most of the time of a launch of stand-ins. As usual the agent is a child of
the launcher, in a session of its own, with its own streams. It shows the environment and command
line that it was given, by which others find it and end it. Not for tests of what happens while an
agent starts.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import subprocess
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

AGENT = ("-P", "-m", "trainctl.launchers.agent")


class Popen(subprocess.Popen):  # type: ignore[type-arg]
    """Replacement of `subprocess.Popen` that forks an agent, and executes any other command."""

    def __init__(self, args: Sequence[str], **options: Any) -> None:
        self._options = options
        super().__init__(args, **options)

    def _execute_child(self, args: Sequence[str], *others: Any) -> None:
        if tuple(args[1:4]) != AGENT:
            super()._execute_child(args, *others)  # type: ignore[misc]
            return
        assert set(self._options) == {
            "cwd", "env", "stdin", "stdout", "stderr", "start_new_session", "pass_fds",
        }  # fmt: skip
        self.pid = os.fork()
        if self.pid == 0:
            try:
                _be_agent(args, **self._options)
            except BaseException:
                traceback.print_exc()
            os._exit(70)
        self._child_created = True


def _be_agent(
    args: Sequence[str],
    *,
    cwd: Path | None,
    env: dict[str, str],
    stdin: int,
    stdout: Any,
    stderr: Any,
    start_new_session: bool,
    pass_fds: tuple[int, ...],
) -> NoReturn:
    """Replace the process image as `exec` would, and run the agent."""
    assert start_new_session and stdin == subprocess.DEVNULL
    os.setsid()
    for number, stream in enumerate((os.open(os.devnull, os.O_RDONLY), stdout, stderr)):
        os.dup2(stream if isinstance(stream, int) else stream.fileno(), number)
    kept = {0, 1, 2, *pass_fds}
    for descriptor in map(int, os.listdir("/proc/self/fd")):  # noqa: PTH208 (names only)
        if descriptor not in kept:
            try:
                os.close(descriptor)
            except OSError:
                continue  # the inherited value was that of the directory listing
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # as Python does at its start
    if cwd is not None:
        os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    _show(args, env)
    sys.argv[:] = args[3:]
    runpy.run_module(args[3], run_name="__main__", alter_sys=True)
    os._exit(0)


def _show(args: Sequence[str], env: dict[str, str]) -> None:
    """Write both where the kernel reads `/proc/PID/cmdline` and `environ`; the server was started
    with room for them.
    """
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    argument_start, argument_end, env_start, env_end = map(int, fields[45:49])
    for start, end, words in (
        (argument_start, argument_end, args),
        (env_start, env_end, [f"{name}={value}" for name, value in env.items()]),
    ):
        text = b"".join(os.fsencode(word) + b"\0" for word in words)
        assert len(text) <= end - start, "the server was started with too little room"
        ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)


if __name__ == "__main__":
    import driver

    subprocess.Popen = Popen  # type: ignore[misc]
    sys.exit(driver.main())
