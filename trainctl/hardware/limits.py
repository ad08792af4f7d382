"""Checks of memory limits set by the system or a container."""

from __future__ import annotations

import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

from trainctl.config.quantities import memory_text
from trainctl.config.schema import OffloadDevice, RunConfig
from trainctl.errors import Finding
from trainctl.hardware.devices import Machine, this_machine
from trainctl.hardware.facts import Hardware
from trainctl.hardware.finding import problem, warning_finding
from trainctl.hardware.resolve import falls_short

SHARED_MEMORY = Path("/dev/shm")

SHARED_BYTES_PER_PROCESS = 64 * 2**20
"""Upper bound of shared memory for communication per process at default settings. Docker's default
is this much for a whole container.
"""


def shared_memory_is_large(config: RunConfig, hardware: Hardware) -> Iterator[str | Finding]:
    """Find a missing or too small `/dev/shm`.

    NCCL, gloo and data loaders of a node exchange data through it.
    """
    processes = hardware.devices_per_node
    if processes < 2:
        return
    try:
        space = shutil.disk_usage(SHARED_MEMORY)
    except OSError:
        yield problem(
            "TC129",
            "hardware.devices_per_node",
            f"there is no {SHARED_MEMORY}, through which the processes of a node communicate",
            f"mount -t tmpfs tmpfs {SHARED_MEMORY}",
        )
        return
    wanted = processes * SHARED_BYTES_PER_PROCESS
    free, total = (size / 2**20 for size in (space.free, space.total))
    if space.free >= wanted:
        yield f"{free:,.0f} of {total:,.0f} MiB free in {SHARED_MEMORY}"
        return
    yield warning_finding(
        "TC129",
        "hardware.devices_per_node",
        f"{SHARED_MEMORY} has {free:,.0f} of {total:,.0f} MiB free; {processes} processes may need "
        f"{wanted / 2**20:,.0f}, and die of SIGBUS without",
        "docker run --shm-size=8g (or --ipc=host); in Kubernetes an emptyDir of medium Memory",
    )


def memory_can_be_locked(config: RunConfig, hardware: Hardware) -> Iterator[str | Finding]:
    """Find a low limit of locked memory (ulimit -l).

    Memory registered with a network card, and memory pinned for NVMe, counts against it.
    """
    offload = config.offload
    to_nvme = OffloadDevice.nvme in (offload.optimizer, offload.parameters)
    if hardware.nodes == 1 and not to_nvme:
        return
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        yield "unlimited"
        return
    what = "reading and writing NVMe" if to_nvme else "InfiniBand and RoCE between the nodes"
    yield warning_finding(
        "TC130",
        "offload" if to_nvme else "hardware.nodes",
        f"at most {soft / 2**20:,.1f} MiB of memory can be locked (ulimit -l); {what} may fail "
        "or be slow",
        "ulimit -l unlimited, in limits.conf or the scheduler's; docker run --ulimit memlock=-1",
    )


def host_memory_suffices(config: RunConfig, hardware: Hardware) -> Iterator[str | Finding]:
    """Find host memory below the plan's budget, by the limit of this process."""
    machine = this_machine()
    found = list(lacking_memory(hardware, machine))
    yield from found or (f"{memory_text(machine.memory_bytes)} may be used",)


def lacking_memory(hardware: Hardware, machine: Machine) -> Iterator[Finding]:
    """Find what a machine lacks of the host memory that a plan is budgeted against."""
    planned, there = hardware.host_memory_bytes, machine.memory_bytes
    if planned is not None and falls_short(there, planned):
        yield problem(
            "TC131",
            "hardware.host_memory_bytes",
            f"the plan is for {memory_text(planned)} of host memory, and {machine.name} has "
            f"{memory_text(there)} of memory for it (its own, or the control group's)",
            f"more memory for the job or container, or hardware.host_memory_bytes={there}",
        )
