"""Where the agents and ranks of an attempt meet: a store that the first node's agent keeps.

On a single node that is no socket: the agent's store is in its own memory, and the ranks meet in a
file of the attempt that only the run's owner can open, since any user of the machine may connect to
a port of its loopback. Between nodes, and for a program of the user's (which is told `MASTER_ADDR`
and `MASTER_PORT`), it is torch's TCP store, which knows no users: whoever reaches the port can read
and write it.

Membership is fixed for an attempt, since a launcher starts a new one after a loss: so nodes are
numbered by their launcher (ranks keep their places), and nothing has to be voted on.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

from torch.distributed import HashStore, PrefixStore, Store, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)

from trainctl.errors import ExitCode, TrainctlError
from trainctl.runs.processes import STORE_VARIABLE

LOOPBACK = "127.0.0.1"
_STORE_TIMEOUT = timedelta(seconds=300)
_LOOK = timedelta(seconds=1)


class NodeRendezvous(RendezvousHandler):
    """The rendezvous of one attempt, as elastic's agent wants it.

    The first node listens on a socket that is bound here and never given up, so that no port can be
    taken in between; the others connect to it.

    Args:
        run_id: Prefix of the store's keys.
        node: Number of this node.
        nodes: How many there are.
        address: Of the first node, as all of them reach it; a single node uses the loopback.
        port: To listen on; None takes a free one, which only a single node can.
        file: For the ranks of a single node to meet in, in place of a port; None is a port.

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
        self.port: int
        self._run_id = run_id
        self._node = node
        self._nodes = nodes
        self.address = address if address is not None and nodes > 1 else LOOPBACK
        self._store: Store
        self._is_file = file is not None
        if file is not None:
            assert nodes == 1
            os.close(os.open(file, os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
            os.environ[STORE_VARIABLE] = str(file)
            self.port = 0
            self._store = HashStore()
        elif node == 0:
            listener = _listen(self.address, port)
            self.port = listener.getsockname()[1]
            self._store = TCPStore(
                self.address,
                self.port,
                is_master=True,
                wait_for_workers=False,
                timeout=_STORE_TIMEOUT,
                master_listen_fd=listener.detach(),
            )
        else:
            assert port is not None
            self.port = port
            self._store = _connect(self.address, port)

    def mark(self, name: str) -> None:
        """Tell the other nodes that this one has come so far."""
        self._store.set(f"{self._run_id}/{name}", "1")

    def await_mark(self, name: str, still_wanted: Callable[[], None]) -> None:
        """Wait, however long, until a node has come so far.

        Args:
            name: As it was given to `mark`.
            still_wanted: Called again and again; does not return when this process is to end.

        Raises:
            TrainctlError: The first node is gone (exit code 6).
        """
        while True:
            still_wanted()
            try:
                self._store.wait([f"{self._run_id}/{name}"], _LOOK)
            except RuntimeError as error:  # the base of torch's errors about stores
                if not self._is_there():
                    raise TrainctlError(
                        f"node {self._node} lost the first node ({self.address}): {error}",
                        exit_code=ExitCode.training_failed,
                    ) from None
            else:
                return

    def _is_there(self) -> bool:
        try:
            self._store.check([self._run_id])
        except RuntimeError:
            return False
        return True

    def get_backend(self) -> str:
        return "trainctl"

    @property
    def use_agent_store(self) -> bool:
        """Whether the ranks use this store, where none of them has to find a port."""
        return not self._is_file

    def next_rendezvous(self) -> RendezvousInfo:
        """The nodes in the order of their numbers."""
        store = PrefixStore(self._run_id, self._store)
        where = RendezvousStoreInfo(self.address, self.port)
        return RendezvousInfo(store, self._node, self._nodes, where)

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """Nothing waits for it."""

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        return True


def _connect(address: str, port: int) -> TCPStore:
    try:
        return TCPStore(address, port, is_master=False, timeout=_STORE_TIMEOUT)
    except RuntimeError as error:
        raise TrainctlError(
            f"the first node cannot be reached at {address}:{port}: {str(error).splitlines()[0]}",
            hint="its agent's log tells whether it started; a firewall may close the port",
            exit_code=ExitCode.environment,
        ) from None


def _listen(address: str, port: int | None) -> socket.socket:
    """A socket on the address if it is one of this machine, else on all of its addresses."""
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
