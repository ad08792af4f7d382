"""Identity of an agent's node, from variables that its launcher or scheduler set."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from trainctl.errors import TrainctlError
from trainctl.hardware.binding import rank_processors
from trainctl.hardware.builds import tools_path
from trainctl.plan.types import RunPlan
from trainctl.runs.directory import run_id
from trainctl.runs.layout import RunPaths
from trainctl.runs.network import outgoing_interface
from trainctl.runs.processes import LEASE_VARIABLE, NODE_VARIABLE, RunTag
from trainctl.runs.rank_entry import BENCHMARK_VARIABLE, PROCESSORS_VARIABLE

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
        rendezvous=None if rendezvous is None else _endpoint(rendezvous),
        lease_seconds=None if lease is None else float(lease),
    )


def exec_with_tag(run: RunPaths, attempt: int, node: int) -> RunTag:
    """Return the tag of the attempt on this node, and make sure that this process carries it.

    An agent that a scheduler started has no tag. It executes itself again with the tag's variables:
    other processes see only the environment that a process was started with.
    """
    tag = RunTag(run_id(run), run.root.resolve(), attempt, node)
    if not tag.environment().items() <= os.environ.items():
        command = [sys.executable, "-P", "-m", "trainctl.launch.agent", *sys.argv[1:]]
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


def _endpoint(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit():
        raise TrainctlError(
            f"--rendezvous {text!r} is not HOST:PORT", hint="as in --rendezvous node1:29500"
        )
    return host.strip("[]"), int(port)
