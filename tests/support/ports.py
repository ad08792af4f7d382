"""Ports for what a test starts, which listens on them later."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def reserved_port() -> Iterator[int]:
    """A port to listen on, on any address of this machine, which nobody else is given meanwhile.

    One that is let go can be taken, by a connection of another test, before anyone listens on it.
    Who listens must set SO_REUSEADDR, as TCPStore, Python's `create_server` and Slurm do.
    """
    with socket.socket() as reserved:
        reserved.bind(("", 0))
        # Only from here on: the listener, which sets it too, may then share the port.
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        yield int(reserved.getsockname()[1])
