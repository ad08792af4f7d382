"""Rendezvous of an attempt's agents and ranks: a store that the first node's agent keeps.

On a single node it is no socket: the ranks meet in a file of the attempt that only the run's owner
can open, since any user of the machine may connect to a port of its loopback. Between nodes, and
for a user's program (which reads `MASTER_ADDR` and `MASTER_PORT`), it is torch's TCP store, which
has no access control: whoever reaches the port can read and write it. Only then is torch imported.

Membership is fixed for an attempt, since a launcher starts a new one after a loss. So the launcher
numbers the nodes (ranks keep their places), and nothing has to be voted on. An agent
learns its node's number from variables that its launcher or scheduler set.
"""

from __future__ import annotations

import ipaddress
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING

from trainctl.errors import ExitCode, MachineError, TrainctlError
from trainctl.hardware.builds import tools_path
from trainctl.hardware.detect import rank_processors
from trainctl.plans.types import RunPlan
from trainctl.runs.command import BENCHMARK_VARIABLE, PROCESSORS_VARIABLE
from trainctl.runs.directory import run_id
from trainctl.runs.layout import RunPaths
from trainctl.runs.network import outgoing_interface
from trainctl.runs.processes import LEASE_VARIABLE, NODE_VARIABLE, RunTag, gc_disabled

if TYPE_CHECKING:
    from torch.distributed import TCPStore

LOOPBACK = "127.0.0.1"
_STORE_TIMEOUT = timedelta(seconds=300)
_LOOK = timedelta(seconds=1)
_JOIN_TRY_SECONDS = 5.0
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
            self._store = _serve_store(self.address, listener)
        else:
            assert port is not None
            self.port = port
            self._store = _connect_to_store(self.address, port)

    def announce(self, attempt: int) -> None:
        """Tell the programs of other nodes which attempt this is (`find_attempt`)."""
        if self._store is not None and self.node == 0:
            self._store.set(f"{self.run_id}/attempt", str(attempt))

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


def find_attempt(run_id: str, address: str, port: int, patience_seconds: float) -> int:
    """Return the number of the attempt that the first node's agent has begun.

    A store answers only while that agent lives, so the number is never an earlier start's.

    Raises:
        TrainctlError: No store answers in time (exit code 4).
    """
    deadline = time.monotonic() + patience_seconds
    while True:
        try:
            # The constructor itself tries again for as long as the store's timeout.
            store = _connect_to_store(address, port, timedelta(seconds=_JOIN_TRY_SECONDS))
            return int(store.get(f"{run_id}/attempt"))
        except (TrainctlError, RuntimeError):
            if time.monotonic() > deadline:
                raise MachineError(
                    f"the first node has begun no attempt in {patience_seconds:.0f} s: no store "
                    f"answers at {address}:{port}",
                    hint="its log tells; a firewall may close the port",
                ) from None


def _serve_store(address: str, listener: socket.socket) -> TCPStore:
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


def _connect_to_store(address: str, port: int, timeout: timedelta = _STORE_TIMEOUT) -> TCPStore:
    with gc_disabled():
        from torch.distributed import TCPStore

    try:
        return TCPStore(address, port, is_master=False, timeout=timeout)
    except RuntimeError as error:
        raise MachineError(
            f"the first node cannot be reached at {address}:{port}: {str(error).splitlines()[0]}",
            hint="its agent's log tells whether it started; a firewall may close the port",
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
        raise MachineError(
            f"launcher.port={port} on {address or socket.gethostname()}: {error.strerror}",
            hint="launcher.port=null takes a free one",
        ) from None
    return listener


RENDEZVOUS_VARIABLE = "TRAINCTL_RENDEZVOUS"

_NODE_VARIABLES = (
    NODE_VARIABLE,
    "SLURM_PROCID",  # srun, with one task per node
    "OMPI_COMM_WORLD_RANK",  # mpirun of Open MPI
    "PMI_RANK",  # mpirun of MPICH
    "JOB_COMPLETION_INDEX",  # indexed job of Kubernetes
)


@dataclass(frozen=True, slots=True)
class NodeIdentity:
    """Node number and rendezvous of one agent."""

    node: int
    """Number of its node."""
    rendezvous: tuple[str, int] | None
    """Address and port of the first node; None if `command.json` has them."""
    lease_seconds: float | None
    """Longest silence of the launcher on stdin; None if stdin is no lease."""


def find_node_identity(
    environment: Mapping[str, str], *, node: int | None, rendezvous: str | None
) -> NodeIdentity:
    """Return the place of this agent: from arguments, else the environment, else node 0.

    Raises:
        TrainctlError: The rendezvous is not HOST:PORT.
    """
    if node is None:
        found = (environment[name] for name in _NODE_VARIABLES if name in environment)
        node = int(next(found, "0"))
    rendezvous = rendezvous or environment.get(RENDEZVOUS_VARIABLE)
    lease = environment.get(LEASE_VARIABLE)
    return NodeIdentity(
        node=node,
        rendezvous=None if rendezvous is None else _parse_endpoint(rendezvous),
        lease_seconds=None if lease is None else float(lease),
    )


def exec_with_tag(run: RunPaths, attempt: int, node: int) -> RunTag:
    """Return the tag of the attempt on this node, and make sure that this process carries it.

    An agent that a scheduler started has no tag. It executes itself again with the tag's variables:
    other processes see only the environment that a process was started with.
    """
    tag = RunTag(run_id(run), run.root.resolve(), attempt, node)
    if not tag.environment().items() <= os.environ.items():
        command = [sys.executable, "-P", "-m", "trainctl.launchers.agent", *sys.argv[1:]]
        os.execve(sys.executable, command, {**os.environ, **tag.environment()})
    return tag


def set_gloo_interface(address: str | None) -> None:
    """Have gloo use the interface that reaches the first node, unless the user chose another one.

    By itself gloo takes the address of the host's own name, often the loopback device's.
    """
    if "GLOO_SOCKET_IFNAME" in os.environ:
        return
    interface = outgoing_interface(address) if address else None
    if interface is None:
        raise TrainctlError(
            f"no network interface of this machine reaches the first node ({address})",
            hint="launcher.interface=NAME names one",
        )
    os.environ["GLOO_SOCKET_IFNAME"] = interface


def prepare_ranks(plan: RunPlan, ranks: int) -> None:
    """Set variables for the ranks: tools' `PATH`, CPU binding, and whether to run a benchmark."""
    launcher = plan.config.launcher
    os.environ["PATH"] = tools_path()
    processors = rank_processors(launcher.cpu_binding, ranks, plan.hardware.accelerator)
    if processors:
        os.environ[PROCESSORS_VARIABLE] = json.dumps(processors)
    if launcher.benchmark:
        os.environ[BENCHMARK_VARIABLE] = "1"


def _parse_endpoint(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit():
        raise TrainctlError(
            f"--rendezvous {text!r} is not HOST:PORT", hint="as in --rendezvous node1:29500"
        )
    return host.strip("[]"), int(port)
