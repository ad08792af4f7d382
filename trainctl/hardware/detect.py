"""Facts about the machines and devices that a plan is made for, and their detection: GPUs by the
vendor's tool, memory by the kernel, without torch.

Cores are bound to local ranks by the kernel's NUMA topology.
"""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from trainctl.config.schema import Accelerator, CpuBinding
from trainctl.errors import ExitCode, Finding, Severity

TOOL_TIMEOUT_SECONDS = 20.0
"""A healthy tool takes a second or two; with a broken driver it can hang forever."""

BF16_CAPABILITY = (8, 0)
FP8_CAPABILITY = (8, 9)
"""First compute capabilities whose tensor cores have the type (CUDA C++ Programming Guide)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One GPU that this process can see."""

    accelerator: Accelerator
    index: int
    """Number in the vendor's tool, before any environment variable."""
    uuid: str
    """Identifier that environment variables may use; empty if unknown."""
    name: str
    memory_bytes: int
    """Total memory as the driver reports it."""
    supports_bf16: bool
    supports_fp8: bool


def visible_devices() -> tuple[Device, ...]:
    """Return the GPUs of this machine that the environment leaves visible; often none.

    A tool that is missing, fails or hangs counts as "no such device": the frameworks would not
    find one either.
    """
    cuda = _nvidia_devices()
    if cuda:
        return _select_visible(cuda, ("CUDA_VISIBLE_DEVICES",))
    return _select_visible(_amd_devices(), ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"))


def all_devices() -> tuple[Device, ...]:
    """Return the GPUs of this machine, including those that the environment hides."""
    return _nvidia_devices() or _amd_devices()


def driver_cuda_version() -> tuple[int, int] | None:
    """Return the newest CUDA version that NVIDIA's driver supports; None if unknown."""
    found = re.search(r"CUDA Version:\s*(\d+)\.(\d+)", query_tool(("nvidia-smi",)))
    return (int(found[1]), int(found[2])) if found else None


def host_memory_limit(root: Path = Path("/")) -> int:
    """Return the bytes of memory that this process may use: the machine's, or its cgroup's if less.

    `root` replaces `/` in paths under `/proc` and `/sys`, for tests.
    """
    import psutil  # missing in the environment of `logging.python`, which imports this module

    return min([psutil.virtual_memory().total, *_control_group_limits(root)])


def _nvidia_devices() -> tuple[Device, ...]:
    fields = "index,uuid,name,memory.total,compute_cap"
    text = query_tool(("nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"))
    devices = []
    for row in csv.reader(text.splitlines(), skipinitialspace=True):
        try:
            index, uuid, name, mebibytes, capability = row
            major, minor = (int(part) for part in capability.split("."))
            memory = int(mebibytes) * 2**20
        except ValueError:
            continue  # a line that is not a device: a message, or a device in an error state
        devices.append(
            Device(
                accelerator=Accelerator.cuda,
                index=int(index),
                uuid=uuid,
                name=name,
                memory_bytes=memory,
                supports_bf16=(major, minor) >= BF16_CAPABILITY,
                supports_fp8=(major, minor) >= FP8_CAPABILITY,
            )
        )
    return tuple(devices)


def _amd_devices() -> tuple[Device, ...]:
    text = query_tool(
        ("rocm-smi", "--showproductname", "--showmeminfo", "vram", "--showuniqueid", "--json")
    )
    try:
        cards = json.loads(text)
    except ValueError:
        return ()
    devices = []
    for card, facts in sorted(cards.items()) if isinstance(cards, dict) else ():
        memory = facts.get("VRAM Total Memory (B)") if isinstance(facts, dict) else None
        if not card.startswith("card") or memory is None:
            continue
        name = facts.get("Card Series") or facts.get("Card series") or "AMD GPU"
        devices.append(
            Device(
                accelerator=Accelerator.rocm,
                index=int(card.removeprefix("card")),
                uuid=str(facts.get("Unique ID", "")),
                name=str(name),
                memory_bytes=int(memory),
                supports_bf16=True,
                supports_fp8="MI3" in str(name),
            )
        )
    return tuple(sorted(devices, key=lambda device: device.index))


@cache
def query_tool(command: tuple[str, ...]) -> str:
    """Return the standard output of a vendor's tool, run once per process; empty if it fails."""
    if shutil.which(command[0]) is None:
        return ""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=TOOL_TIMEOUT_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout


def _select_visible(devices: tuple[Device, ...], variables: Sequence[str]) -> tuple[Device, ...]:
    """Return the devices that the first variable set in the environment names, in its order.

    The variable is read as CUDA reads it: indices or (prefixes of) identifiers, up to the first
    entry that names no device.
    """
    wanted = next((os.environ[name] for name in variables if name in os.environ), None)
    if wanted is None:
        return devices
    chosen = []
    for part in (part.strip() for part in wanted.split(",")):
        named = [
            device
            for device in devices
            if part == str(device.index) or (len(part) > 3 and device.uuid.startswith(part))
        ]
        if len(named) != 1:
            break
        chosen.append(named[0])
    return tuple(chosen)


def _control_group_limits(root: Path) -> list[int]:
    """Return the memory limits of this process's cgroup and its parents, versions 1 and 2."""
    limits = []
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, name = root / "sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            base, name = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        group = base / path.strip("/")
        # Inside a container the path may be the host's: the mount's own root always counts.
        while True:
            limits.extend(_read_limit(group / name))
            if group == base:
                break
            group = group.parent
    return limits


def _read_limit(path: Path) -> list[int]:
    try:
        return [int(path.read_text())]
    except (OSError, ValueError):  # no such group, or "max": no limit
        return []


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """Machines that a plan is for. Sizes are in bytes; ``None`` means unknown and unchecked."""

    name: str
    """Name in the user's notation, such as ``4x8xh100-80g``."""
    accelerator: Accelerator
    """cuda, rocm or cpu; never auto."""
    nodes: int
    devices_per_node: int
    """Devices (on cpu: processes) of each node."""
    device_memory_bytes: int | None = None
    """Memory of a device, as its driver reports it; on cpu a process's share of host memory."""
    host_memory_bytes: int | None = None
    """Memory of a node."""
    nvme_bytes: int | None = None
    """Free space on a node's NVMe."""
    peak_tflops_fp32: float | None = None
    """Dense fp32 throughput (not TF32), TFLOP/s per device."""
    peak_tflops_bf16: float | None = None
    """Dense bf16 matrix throughput."""
    peak_tflops_fp16: float | None = None
    """Dense fp16 matrix throughput."""
    peak_tflops_fp8: float | None = None
    """Dense fp8 matrix throughput."""
    memory_bandwidth_gb_per_second: float | None = None
    """Bandwidth of a device's memory."""
    device_link_gb_per_second: float | None = None
    """Bandwidth between devices of a node, one direction."""
    network_gb_per_second: float | None = None
    """Bandwidth between nodes, per device."""
    host_link_gb_per_second: float | None = None
    """Bandwidth between a device and its host, one direction."""
    matrix_efficiency: float | None = None
    """Share of the peak rates that large matrix products reach."""
    attention_efficiency: float | None = None
    """Share of the peak rates that a fused attention kernel reaches."""
    supports_bf16: bool = True
    supports_fp8: bool = False
    has_liger: bool | None = None
    """Whether liger-kernel is installed in this environment; None if the ranks are to run in
    another one, where it is assumed to be.
    """
    detected: bool = False
    """Whether the facts were detected on this machine."""
    runtime_bytes: int | None = None
    """Device memory of a process outside tensors, if it was measured here."""
    fragmentation: float | None = None
    """Reserved over allocated memory, minus one, if it was measured here."""
    calibrated_on: str | None = None
    """Date of that measurement."""

    @property
    def world_size(self) -> int:
        return self.nodes * self.devices_per_node

    def peak_tflops(self, compute: str) -> float | None:
        """Return the dense throughput of a device in a number format, TFLOP/s; None if unknown."""
        peak: float | None = getattr(self, f"peak_tflops_{compute}", None)
        return peak


def error_finding(rule: str, key: str, message: str, hint: str = "") -> Finding:
    """Return an error: the run cannot start, or would not be what the plan says."""
    return Finding(rule=rule, key=key, message=message, hint=hint, exit_code=ExitCode.environment)


def warning_finding(rule: str, key: str, message: str, hint: str) -> Finding:
    """Return a warning: something may fail or be slow."""
    return Finding(
        rule=rule,
        key=key,
        message=message,
        hint=hint,
        severity=Severity.warning,
        exit_code=ExitCode.environment,
    )
