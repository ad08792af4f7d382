"""Hardware of a plan: declared facts, completed by detection and calibration on this machine.

`trainctl estimate-memory --measure` writes the calibration: one JSON file in the user's cache
folder with an entry for each kind of device. Estimates work without it: an unreadable file, or a
measurement with another version of torch, is ignored.
"""

from __future__ import annotations

import os
import re
from dataclasses import asdict, dataclass, fields
from importlib.util import find_spec
from math import ceil
from pathlib import Path
from typing import Any

from trainctl.config.catalog import list_options
from trainctl.config.extras import package_version
from trainctl.config.reading import local_path, read_json
from trainctl.config.schema import Accelerator, HardwareConfig
from trainctl.config.yaml_files import read_document
from trainctl.errors import MachineError, TrainctlError
from trainctl.hardware.detect import Device, Hardware, host_memory_limit, visible_devices

MEMORY_TOLERANCE = 0.03
"""Drivers report the memory of one kind of card within this share of each other. Kernel and
firmware keep about the same share of a machine's memory to themselves.
"""


def falls_short(found: int, planned: int) -> bool:
    """Return True if `found` bytes are less than `planned`, beyond `MEMORY_TOLERANCE`."""
    return found < planned * (1 - MEMORY_TOLERANCE)


def resolve_hardware(
    config: HardwareConfig, *, calibrated: bool = True, launches: bool = False
) -> Hardware:
    """Return the hardware of a plan: declared facts, and detected ones where nothing is declared.

    Facts of declared devices that are not in this machine stay unknown unless declared. A declared
    kind of device without a count means as many as this machine has, or one.

    Args:
        calibrated: Whether to use measurements of this machine, if the devices are its own.
        launches: Whether ranks are about to be started, in an environment like this one.
    """
    declared = config.accelerator is not Accelerator.auto
    on_cpu = config.accelerator is Accelerator.cpu
    found = () if on_cpu else visible_devices()
    if declared:
        found = tuple(device for device in found if device.accelerator is config.accelerator)

    if declared:
        accelerator = config.accelerator
    else:
        accelerator = found[0].accelerator if found else Accelerator.cpu
    devices = config.devices_per_node or len(found) or 1
    is_here = accelerator is Accelerator.cpu or _may_be_this_machine(config, found)

    host_memory = config.host_memory_bytes
    if host_memory is None and is_here:
        host_memory = host_memory_limit()
    device_memory = config.device_memory_bytes
    if device_memory is None and accelerator is Accelerator.cpu and host_memory is not None:
        device_memory = host_memory // devices
    elif device_memory is None and found:
        device_memory = min(device.memory_bytes for device in found)

    one = config.name
    if not declared:
        one = _short_name(found[0]) if found else "cpu"
    prefix = f"{config.nodes}x{devices}x" if config.nodes > 1 else f"{devices}x"
    read_off = not declared and bool(found)
    rates = _rates(config, found if read_off else ())
    calibration = read_calibration(one) if calibrated and is_here else None
    return Hardware(
        name=prefix + one,
        accelerator=accelerator,
        nodes=config.nodes,
        devices_per_node=devices,
        device_memory_bytes=device_memory,
        host_memory_bytes=host_memory,
        nvme_bytes=config.nvme_bytes,
        **rates,
        supports_bf16=(
            all(device.supports_bf16 for device in found) if read_off else config.supports_bf16
        ),
        supports_fp8=(
            all(device.supports_fp8 for device in found) if read_off else config.supports_fp8
        ),
        has_liger=find_spec("liger_kernel") is not None if is_here or launches else None,
        detected=not declared,
        **_calibrated_fields(calibration, config.nodes * devices),
    )


def _rates(config: HardwareConfig, found: tuple[Device, ...]) -> dict[str, Any]:
    """Return the declared rates, and the known ones of devices that were found here."""
    # With different cards, the rates of one would be wrong for another.
    alike = len({device.name for device in found}) == 1
    known = known_rates(found[0].name) if alike else {}
    declared = {key: getattr(config, key) for key in RATES}
    return known | {key: rate for key, rate in declared.items() if rate is not None}


def _calibrated_fields(calibration: Calibration | None, world_size: int) -> dict[str, Any]:
    if calibration is None:
        return {}
    return {
        "runtime_bytes": calibration.runtime_bytes(world_size),
        "fragmentation": calibration.fragmentation,
        "calibrated_on": calibration.date,
    }


def _may_be_this_machine(config: HardwareConfig, found: tuple[Device, ...]) -> bool:
    """Return True if the plan's machine may be this one: enough devices, of the declared memory."""
    if not found or config.nodes > 1 or len(found) < (config.devices_per_node or 1):
        return False
    declared = config.device_memory_bytes
    if declared is None:
        return True
    actual = min(device.memory_bytes for device in found)
    return abs(actual - declared) <= MEMORY_TOLERANCE * declared


def _short_name(device: Device) -> str:
    """Return a short name: `h100-80g` for "NVIDIA H100 80GB HBM3" with 79.6 GiB."""
    noise = {"nvidia", "amd", "geforce", "tesla", "instinct", "quadro", "graphics"}
    words = [word for word in device.name.lower().split() if word not in noise]
    model: list[str] = []
    for word in words:
        head = word.split("-")[0]
        if model and not (model == ["rtx"] and head[:1].isdigit()):
            break
        model.append(head)
    return f"{'-'.join(model) or 'gpu'}-{ceil(device.memory_bytes / 2**30)}g"


RATES = (
    *(item.name for item in fields(HardwareConfig) if item.name.startswith("peak_tflops_")),
    "memory_bandwidth_gb_per_second",
    "device_link_gb_per_second",
    "network_gb_per_second",
    "host_link_gb_per_second",
    "matrix_efficiency",
    "attention_efficiency",
)
"""Keys taken from the option. Memory and number formats are detected on the device itself."""


def known_rates(driver_name: str) -> dict[str, float]:
    """Return the rates of the option whose `driver_names` has this name; empty if there is none.

    Only whole names match: a card with the same chip in another form (PCIe, NVL) has other rates.
    """
    for option in list_options("hardware"):
        document = read_document(option.path, option.name)
        facts: dict[str, Any] = {setting.key: setting.value for setting in document.settings}
        if driver_name in (facts.get("driver_names") or []):
            return {key: float(facts[key]) for key in RATES if facts.get(key) is not None}
    return {}


CALIBRATION_SCHEMA = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Measured memory of a process that no formula predicts."""

    device: str
    """Name of the device, as in a plan."""
    date: str
    """Day of the measurement."""
    torch: str
    """Version of torch during the measurement."""
    runtime_bytes_alone: int | None = None
    """Device memory outside tensors of a single process: driver context, loaded kernels; on a CPU
    the interpreter and its libraries.
    """
    runtime_bytes_in_group: int | None = None
    """Device memory outside tensors of a rank among several, with its communication library."""
    fragmentation: float | None = None
    """Reserved over allocated memory, minus one; None on devices that reserve nothing."""

    def runtime_bytes(self, world_size: int) -> int | None:
        """Return the device memory outside tensors of a rank at this world size."""
        return self.runtime_bytes_alone if world_size == 1 else self.runtime_bytes_in_group


def device_name(hardware: Hardware) -> str:
    """Return the name of a plan's device without counts: ``h100-80g`` of ``8xh100-80g``."""
    return re.sub(r"^(\d+x)+", "", hardware.name)


def calibration_file() -> Path:
    """Return the path of the file; the variable TRAINCTL_CALIBRATION_FILE overrides it.

    Raises:
        TrainctlError: The user has no home directory (exit code 4), as in a container that runs
            under a bare user ID.
    """
    named = os.environ.get("TRAINCTL_CALIBRATION_FILE")
    if named:
        return Path(named)
    cache = local_path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    if not cache.is_absolute():
        raise MachineError(
            "this user has no home directory to keep measurements in",
            hint="set HOME, XDG_CACHE_HOME or TRAINCTL_CALIBRATION_FILE",
        )
    return cache / "trainctl" / "calibration.json"


def read_calibration(device: str) -> Calibration | None:
    """Return the device's measurement with the installed version of torch; None without one."""
    entry = _calibration_entries().get(device)
    if entry is None:
        return None
    try:
        found = Calibration(**entry)
    except TypeError:
        return None
    return found if found.torch == package_version("torch") else None


def merge_calibration(new: Calibration) -> dict[str, Any]:
    """Return the file's content with a new measurement; fields that it lacks keep their values."""
    old = read_calibration(new.device)
    entry = asdict(new)
    if old is not None:
        entry = {key: asdict(old)[key] if value is None else value for key, value in entry.items()}
    return {"schema": CALIBRATION_SCHEMA, "devices": _calibration_entries() | {new.device: entry}}


def _calibration_entries() -> dict[str, Any]:
    try:
        content = read_json(calibration_file())
    except (OSError, ValueError, TrainctlError):
        return {}
    is_ours = isinstance(content, dict) and content.get("schema") == CALIBRATION_SCHEMA
    devices = content.get("devices") if is_ours else None
    return devices if isinstance(devices, dict) else {}
