"""Placeholder process for a process that `preloaded_server` forked."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import sys

FORWARDED = tuple(
    getattr(signal, f"SIG{name}") for name in ("TERM", "INT", "HUP", "QUIT", "USR1", "USR2")
)


def main(address: str, module: str, arguments: list[str]) -> None:
    """Have the server fork, and end as the fork ends; does not return."""
    ignored = [number for number in FORWARDED if signal.getsignal(number) is signal.SIG_IGN]
    folder = os.getcwd()  # noqa: PTH109 (nothing more is imported than must be)
    request = {
        "module": module,
        "arguments": [module, *arguments],
        "folder": folder,
        "environment": dict(os.environ),
        "path": sys.path if sys.flags.safe_path else [folder, *sys.path],
        "processors": os.sched_getaffinity(0),
        "ignored": ignored,
    }
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(address)
    socket.send_fds(connection, [pickle.dumps(request)], [0, 1, 2])
    pid = int(connection.recv(64))
    for number in FORWARDED:
        if number not in ignored:
            signal.signal(number, lambda number, _: os.kill(pid, number))
    code = int(connection.recv(64) or -signal.SIGKILL)
    if code < 0:
        if -code in FORWARDED:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)
