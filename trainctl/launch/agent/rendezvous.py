"""Rendezvous of an attempt's agents and ranks: a store that the first node's agent keeps.

On a single node it is no socket: the ranks meet in a file of the attempt that only the run's owner
can open, since any user of the machine may connect to a port of its loopback. Between nodes, and
for a user's program (which reads `MASTER_ADDR` and `MASTER_PORT`), it is torch's TCP store, which
has no access control: whoever reaches the port can read and write it. Only then is torch imported.

Membership is fixed for an attempt, since a launcher starts a new one after a loss. So the launcher
numbers the nodes (ranks keep their places), and nothing has to be voted on.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING

from trainctl.errors import ExitCode, TrainctlError
from trainctl.runs.imports import gc_disabled

if TYPE_CHECKING:
    from torch.distributed import TCPStore

LOOPBACK = "127.0.0.1"
_STORE_TIMEOUT = timedelta(seconds=300)
_LOOK = timedelta(seconds=1)
JOIN_SECONDS = 180.0
"""Longest time for ranks to import and load before they join; most take less than a minute."""
_OTHERS_SECONDS = 300.0
"""Longest time that the first node's agent keeps the store for nodes that still run."""


class NodeRendezvous:
    """The rendezvous of one attempt. Its store is at `address` and `port` (0 with a file).

    The first node listens on a socket that is bound here and never given up, so that no other
    process can take the port in between; the other nodes connect to it.

    Args:
        run_id: Prefix of the store's keys.
        address: Address of the first node, as all of them reach it; a single node uses the
            loopback.
        port: Port to listen on; None takes a free one, which only a single node can.
        file: Store of a single node, in place of a port.

    Raises:
        TrainctlError: The port is taken, or the first node cannot be reached (exit code 4).
    """

    def __init__(
        self,
        run_id: str,
        node: int,
        nodes: int,
        address: str | None,
        port: int | None,
        *,
        file: Path | None = None,
    ) -> None:
        self.run_id = run_id
        self.node = node
        self.address = address if address is not None and nodes > 1 else LOOPBACK
        self.port = 0
        self.file = file
        self._nodes = nodes
        self._store: TCPStore | None = None
        if file is not None:
            assert nodes == 1
            os.close(os.open(file, os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        elif node == 0:
            listener = _listen(self.address, port)
            self.port = listener.getsockname()[1]
            self._store = _keep(self.address, listener)
        else:
            assert port is not None
            self.port = port
            self._store = _connect(self.address, port)

    def mark(self, name: str) -> None:
        """Set a mark that other nodes can wait for."""
        if self._store is not None:
            self._store.set(f"{self.run_id}/{name}", "1")

    def await_mark(
        self, name: str, check_stop: Callable[[], None], patience_seconds: float = inf
    ) -> None:
        """Wait until a node has set the mark.

        Args:
            check_stop: Called again and again; does not return when this process is to end.
            patience_seconds: Longest wait; the method then returns without the mark.

        Raises:
            TrainctlError: The first node is gone (exit code 6).
        """
        assert self._store is not None
        deadline = time.monotonic() + patience_seconds
        while time.monotonic() < deadline:
            check_stop()
            try:
                self._store.wait([f"{self.run_id}/{name}"], _LOOK)
            except RuntimeError as error:  # base class of torch's store errors
                if not self._is_there(self._store):
                    raise TrainctlError(
                        f"node {self.node} lost the first node ({self.address}): {error}",
                        exit_code=ExitCode.training_failed,
                    ) from None
            else:
                return

    def wait_for_other_nodes(self, check_stop: Callable[[], None]) -> None:
        """Have the first node keep the store until no rank of another node needs it."""
        if self.node > 0:
            self.mark(f"ended-{self.node}")
            return
        for node in range(1, self._nodes):
            self.await_mark(f"ended-{node}", check_stop, _OTHERS_SECONDS)

    def num_keys(self) -> int:
        """Return the number of entries in the store: the agents', and the ranks' once they join."""
        assert self._store is not None
        return self._store.num_keys()

    def _is_there(self, store: TCPStore) -> bool:
        try:
            store.check([self.run_id])
        except RuntimeError:
            return False
        return True


class JoinWatch:
    """Finds out whether ranks of a user's program join the store.

    Whatever opens a process group with `MASTER_ADDR` and `MASTER_PORT` leaves entries in the store.
    Ranks that never do each train a model of their own, and would end without an error.

    Args:
        rendezvous: The first node's, before its ranks start.
        report: Called once, with the seconds that have passed, if no rank has joined.
    """

    def __init__(self, rendezvous: NodeRendezvous, report: Callable[[float], None]) -> None:
        self._rendezvous = rendezvous
        self._report = report
        self._own_keys = rendezvous.num_keys()
        self._started = time.monotonic()
        self._is_done = False

    def look(self, *, at_end: bool = False) -> None:
        """Check once: after `JOIN_SECONDS`, or when the ranks have ended well before."""
        seconds = time.monotonic() - self._started
        if self._is_done or (seconds < JOIN_SECONDS and not at_end):
            return
        self._is_done = True
        if self._rendezvous.num_keys() == self._own_keys:
            self._report(seconds)


def _keep(address: str, listener: socket.socket) -> TCPStore:
    with gc_disabled():
        from torch.distributed import TCPStore

    return TCPStore(
        address,
        listener.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        timeout=_STORE_TIMEOUT,
        master_listen_fd=listener.detach(),
    )


def _connect(address: str, port: int) -> TCPStore:
    with gc_disabled():
        from torch.distributed import TCPStore

    try:
        return TCPStore(address, port, is_master=False, timeout=_STORE_TIMEOUT)
    except RuntimeError as error:
        raise TrainctlError(
            f"the first node cannot be reached at {address}:{port}: {str(error).splitlines()[0]}",
            hint="its agent's log tells whether it started; a firewall may close the port",
            exit_code=ExitCode.environment,
        ) from None


def _listen(address: str, port: int | None) -> socket.socket:
    """Return a socket on the address if it is one of this machine, else on all of its addresses."""
    try:
        family = socket.AF_INET6 if ipaddress.ip_address(address).version == 6 else socket.AF_INET
    except ValueError:  # a name, which this machine may resolve to its loopback device
        address, family = "", socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((address, port or 0))
        listener.listen(socket.SOMAXCONN)
    except OSError as error:
        listener.close()
        raise TrainctlError(
            f"launcher.port={port} on {address or socket.gethostname()}: {error.strerror}",
            hint="launcher.port=null takes a free one",
            exit_code=ExitCode.environment,
        ) from None
    return listener
