"""Ports for processes that a test starts and that listen later."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def reserved_port() -> Iterator[int]:
    """Reserve a port on every address of this machine for the duration of the context.

    A released port could be taken by a connection of another test before the process listens on it.
    The listener must set SO_REUSEADDR, as TCPStore, Python's `create_server` and Slurm do.
    """
    with socket.socket() as reserved:
        reserved.bind(("", 0))
        # Set only after binding: the listener, which sets it too, may then share the port.
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        yield int(reserved.getsockname()[1])
