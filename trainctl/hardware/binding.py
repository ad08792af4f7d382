"""CPU binding: the cores each local rank runs on, by the kernel's NUMA topology."""

from __future__ import annotations

import csv
import os
from collections.abc import Sequence
from pathlib import Path

from trainctl.config.schema import Accelerator, CpuBinding
from trainctl.hardware.detect import query_tool, visible_devices

_SYS = Path("/sys")


def rank_processors(
    binding: CpuBinding, ranks: int, accelerator: Accelerator, root: Path = _SYS
) -> list[list[int]]:
    """Return the logical CPUs of each local rank; empty without a binding.

    Args:
        accelerator: Kind of the ranks' devices; local rank i uses visible device i.
        root: Directory read in place of `/sys`; for tests.
    """
    if binding is CpuBinding.none:
        return []
    sockets = processors_by_socket(os.sched_getaffinity(0), root)
    homes: list[int | None] = [None] * ranks
    if binding is CpuBinding.device and accelerator is Accelerator.cuda:
        homes = (_device_sockets(root) + homes)[:ranks]
    return processor_shares(sockets, homes)


def processor_shares(sockets: dict[int, list[int]], homes: Sequence[int | None]) -> list[list[int]]:
    """Return an equal share of logical CPUs for each rank, adjacent CPUs together.

    Args:
        sockets: CPUs of each NUMA node, threads of one core side by side.
        homes: NUMA node of each rank's device; None if unknown. If one is unknown, all ranks share
            the CPUs of all nodes.
    """
    if any(home not in sockets for home in homes):
        return _split_evenly(
            [cpu for _, cpus in sorted(sockets.items()) for cpu in cpus], len(homes)
        )
    given: list[list[int]] = [[] for _ in homes]
    for socket, cpus in sockets.items():
        ranks = [rank for rank, home in enumerate(homes) if home == socket]
        for rank, share in zip(ranks, _split_evenly(cpus, len(ranks)), strict=True):
            given[rank] = share
    return given


def processors_by_socket(allowed: set[int], root: Path = _SYS) -> dict[int, list[int]]:
    """Return the allowed processors of each NUMA node, threads of one core side by side."""
    sockets: dict[int, list[int]] = {}
    for folder in sorted((root / "devices/system/node").glob("node[0-9]*")):
        cpus = allowed & set(parse_list((folder / "cpulist").read_text()))
        if cpus:
            number = int(folder.name.removeprefix("node"))
            sockets[number] = sorted(cpus, key=lambda cpu: (_core_key(cpu, root), cpu))
    return sockets or {0: sorted(allowed)}


def parse_list(text: str) -> list[int]:
    """Parse a list of the kernel's, such as ``0-3,8``, into its numbers."""
    numbers: list[int] = []
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first:
            numbers += range(int(first), int(last or first) + 1)
    return numbers


def _split_evenly(cpus: Sequence[int], parts: int) -> list[list[int]]:
    """Split into `parts` equal, contiguous slices; some share a CPU if there are too few."""
    size = len(cpus)
    bounds = [(part * size // parts, (part + 1) * size // parts) for part in range(parts)]
    return [list(cpus[first : max(first + 1, last)]) for first, last in bounds]


def _core_key(cpu: int, root: Path) -> int:
    """Return the lowest-numbered CPU of the same core, to sort by."""
    path = root / f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
    try:
        return min(parse_list(path.read_text()))
    except (OSError, ValueError):
        return cpu


def _device_sockets(root: Path) -> list[int | None]:
    """Return the NUMA node of each visible CUDA device; None where the kernel does not know it."""
    text = query_tool(("nvidia-smi", "--query-gpu=uuid,pci.bus_id", "--format=csv,noheader"))
    buses = {row[0]: row[1].lower() for row in csv.reader(text.splitlines(), skipinitialspace=True)
             if len(row) == 2}  # fmt: skip
    found: list[int | None] = []
    for device in visible_devices():
        domain, _, rest = buses.get(device.uuid, "").partition(":")
        path = root / "bus/pci/devices" / f"{domain[-4:]}:{rest}" / "numa_node"
        try:
            found.append(int(path.read_text()))
        except (OSError, ValueError):
            found.append(None)
    return found
