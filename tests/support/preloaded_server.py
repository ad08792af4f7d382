"""A process that has imported what trainctl imports, and forks itself for each that asks.

What asks is what was started in its place: `preloaded/fork_client.py`. The importing is most of
what a short run costs. Standard library only, beside what it imports for the others.
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
from contextlib import suppress
from pathlib import Path
from typing import Any

from trainctl.runs.processes import PARENT_VARIABLE, die_with_parent

PRELOADED = (
    "trainctl.train.rank",
    "trainctl.train.anatomy",
    "trainctl.train.trace",
    "trainctl.engines.deepspeed.room",
    "trainctl.cli.main",
    "trainctl.config.compose",
    "trainctl.plan.resolve",
    "trainctl.loggers.follower",
)
POLL_SECONDS = 0.02
LARGEST_REQUEST = 1 << 20


class PreloadedServer:
    """The server and what a launch needs to use it.

    Args:
        folder: For its socket and what it prints.
    """

    def __init__(self, folder: Path) -> None:
        address = folder / "server.sock"
        self._errors = (folder / "server.err").open("wb")
        self._server = subprocess.Popen(
            [sys.executable, __file__, str(os.getpid()), str(address)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={**os.environ, "DS_ACCELERATOR": "cpu", "PYTHONPATH": os.pathsep.join(sys.path)},
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
        }

    def __enter__(self) -> PreloadedServer:
        return self

    def __exit__(self, *_: object) -> None:
        """End it, and forks that are left."""
        self._server.kill()
        self._server.wait()
        assert self._server.stdout is not None
        self._server.stdout.close()
        self._errors.close()


def serve(listener: socket.socket) -> dict[str, Any] | None:
    """Fork for each request. Returns in the fork, with the request."""
    forks: dict[int, socket.socket] = {}
    while True:
        ready, _, _ = select.select([listener, *forks.values()], [], [], POLL_SECONDS)
        for pid, connection in list(forks.items()):
            if connection in ready and connection.recv(1) == b"":  # its place is gone
                os.kill(pid, signal.SIGKILL)
        while forks:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            with forks.pop(pid) as connection:
                with suppress(OSError):  # gone with its launch
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
                request["environment"][PARENT_VARIABLE] = str(server)
                return request
            for descriptor in descriptors:
                os.close(descriptor)
            connection.send(str(pid).encode())
            forks[pid] = connection


def main() -> None:
    """Import, say so, serve; in a fork: run what was asked for."""
    die_with_parent(int(sys.argv[1]))
    for name in PRELOADED:
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
    for number in request["ignored"]:
        signal.signal(number, signal.SIG_IGN)
    sys.path[:] = request["path"]
    sys.argv[:] = request["arguments"]
    runpy.run_module(request["module"], run_name="__main__")


if __name__ == "__main__":
    main()
