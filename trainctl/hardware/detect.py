"""Hardware detection: GPUs by the vendor's tool, memory by the kernel, without torch."""

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

from trainctl.config.schema import Accelerator

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
