"""Server that has imported trainctl's dependencies and forks itself for each request.

A request comes from `preloaded/fork_client.py`, started in place of the command, or from a test
(`Forked`). Imports are most of the time of a short run. The server itself uses only the standard
library.
"""

from __future__ import annotations

import gc
import importlib
import os
import pickle
import runpy
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from math import inf
from pathlib import Path
from typing import Any

from trainctl.launchers.rank_command import FORK_VARIABLE
from trainctl.runs.processes import PARENT_VARIABLE, die_with_parent

PRELOADED = (
    "trainctl.train.loop",
    "trainctl.train.models.anatomy",
    "trainctl.train.models.trace",
    "trainctl.engines.deepspeed.entry",
    "trainctl.cli.main",
    "trainctl.config.compose",
    "trainctl.rules.resolve",
    "trainctl.monitor.loggers.follower",
)
POLL_SECONDS = 0.02
LARGEST_REQUEST = 1 << 20
ROOM = "x" * (1 << 16)
"""Space in the environment and command line of a server, to be overwritten by those of its
forks.
"""


class PreloadedServer:
    """Server process, with the environment that a launch needs to use it.

    Args:
        folder: Folder of its socket and its output.
        modules: Modules to import.
    """

    def __init__(self, folder: Path, modules: Sequence[str] = PRELOADED) -> None:
        self.address = address = folder / "server.sock"
        self._errors = (folder / "server.err").open("wb")
        self._server = subprocess.Popen(
            [sys.executable, __file__, str(os.getpid()), str(address), ",".join(modules), ROOM],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={
                **os.environ,
                "DS_ACCELERATOR": "cpu",
                "PYTHONPATH": os.pathsep.join(sys.path),
                "TRAINCTL_TESTS_ROOM": ROOM,
            },
            start_new_session=True,
        )
        assert self._server.stdout is not None
        assert self._server.stdout.readline(), (folder / "server.err").read_text()
        here = str(Path(__file__).with_name("preloaded"))
        given = os.environ.get("PYTHONPATH")
        self.environment = {
            "PYTHONPATH": os.pathsep.join([here, given] if given else [here]),
            "TRAINCTL_TESTS_SERVER": str(address),
            "TRAINCTL_TESTS_SERVER_OF": sys.prefix,
            FORK_VARIABLE: "0",  # a grandchild of the server would be no child of the agent
        }

    def __enter__(self) -> PreloadedServer:
        return self

    def __exit__(self, *_: object) -> None:
        """End the server and the remaining forks."""
        self._server.kill()
        self._server.wait()
        assert self._server.stdout is not None
        self._server.stdout.close()
        self._errors.close()


class Forked:
    """Fork that runs a module as `__main__`, with the interface of `subprocess.Popen` that tests
    use.

    It is a child of the server, and ends when this object is closed.

    Args:
        arguments: Its command line.
        environment: Its whole environment.
        own_session: Whether it leads a session.
    """

    def __init__(
        self,
        server: PreloadedServer,
        module: str,
        arguments: Sequence[str],
        *,
        environment: Mapping[str, str],
        own_session: bool = False,
    ) -> None:
        request = {
            "module": module,
            "arguments": [module, *arguments],
            "folder": str(Path.cwd()),
            "environment": dict(environment),
            "path": [*environment.get("PYTHONPATH", "").split(os.pathsep), *sys.path],
            "processors": os.sched_getaffinity(0),
            "ignored": [],
            "own_session": own_session,
        }
        self.returncode: int | None = None
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._connection.connect(str(server.address))
        given, self._stdin = os.pipe()
        self._stderr, write_end = os.pipe()
        nowhere = os.open(os.devnull, os.O_WRONLY)
        socket.send_fds(self._connection, [pickle.dumps(request)], [given, nowhere, write_end])
        for descriptor in (given, nowhere, write_end):
            os.close(descriptor)
        self.pid = int(self._connection.recv(64))

    def poll(self) -> int | None:
        """Return its exit code, or None while it runs."""
        return self._ended(0.0)

    def kill(self) -> None:
        """Send SIGKILL, unless it has ended."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def communicate(self, timeout: float | None = None) -> tuple[None, str]:
        """Close its stdin and wait for its end; return the output until then, its children's
        included.

        Raises:
            subprocess.TimeoutExpired: It is still running.
        """
        if self._stdin >= 0:
            os.close(self._stdin)
            self._stdin = -1
        if self._stderr < 0:
            return None, self._said
        output, deadline = b"", time.monotonic() + (inf if timeout is None else timeout)
        while (remaining := deadline - time.monotonic()) > 0:
            if select.select([self._stderr], [], [], None if remaining == inf else remaining)[0]:
                part = os.read(self._stderr, 1 << 16)
                if not part:
                    break
                output += part
        if self._ended(None if timeout is None else max(0.0, deadline - time.monotonic())) is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
        os.close(self._stderr)
        self._stderr, self._said = -1, output.decode(errors="replace")
        self._connection.close()
        return None, self._said

    def _ended(self, seconds: float | None) -> int | None:
        if self.returncode is None and select.select([self._connection], [], [], seconds)[0]:
            self.returncode = int(self._connection.recv(64) or -signal.SIGKILL)
        return self.returncode


def serve(listener: socket.socket) -> dict[str, Any] | None:
    """Fork for each request. Returns in the fork, with the request."""
    forks: dict[int, socket.socket] = {}
    while True:
        ready, _, _ = select.select([listener, *forks.values()], [], [], POLL_SECONDS)
        for pid, connection in list(forks.items()):
            if connection in ready and connection.recv(1) == b"":  # the placeholder process is gone
                os.kill(pid, signal.SIGKILL)
        while forks:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            with forks.pop(pid) as connection:
                with suppress(OSError):  # ended together with its launch
                    connection.send(str(os.waitstatus_to_exitcode(status)).encode())
        if listener in ready:
            connection, _ = listener.accept()
            message, descriptors, _, _ = socket.recv_fds(connection, LARGEST_REQUEST, 3)
            server = os.getpid()
            pid = os.fork()
            if pid == 0:
                request = pickle.loads(message)
                die_with_parent(server)
                for number, descriptor in enumerate(descriptors):
                    os.dup2(descriptor, number)
                    os.close(descriptor)
                for open_one in (listener, connection, *forks.values()):
                    open_one.close()
                if PARENT_VARIABLE in request["environment"]:
                    request["environment"][PARENT_VARIABLE] = str(server)
                return request
            for descriptor in descriptors:
                os.close(descriptor)
            connection.send(str(pid).encode())
            forks[pid] = connection


def main() -> None:
    """Import, report readiness and serve; in a fork, run the requested module."""
    die_with_parent(int(sys.argv[1]))
    for name in sys.argv[3].split(","):
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(sys.argv[2])
        listener.listen(64)
        print("ready", flush=True)
        request = serve(listener)
    assert request is not None
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    os.sched_setaffinity(0, request["processors"])
    if request.get("own_session"):
        os.setsid()
    for number in request["ignored"]:
        signal.signal(number, signal.SIG_IGN)
    sys.path[:] = request["path"]
    sys.argv[:] = request["arguments"]
    runpy.run_module(request["module"], run_name="__main__")


if __name__ == "__main__":
    main()
