"""Resolution of a plan's hardware: declared facts, completed by detection on this machine."""

from __future__ import annotations

from math import ceil
from typing import Any

from trainctl.config.schema import Accelerator, HardwareConfig
from trainctl.hardware.calibration import Calibration, read_calibration
from trainctl.hardware.detect import Device, host_memory_limit, visible_devices
from trainctl.hardware.facts import Hardware
from trainctl.hardware.known import RATES, known_rates

MEMORY_TOLERANCE = 0.03
"""Drivers report the memory of one kind of card within this share of each other. Kernel and
firmware keep about the same share of a machine's memory to themselves.
"""


def falls_short(found: int, planned: int) -> bool:
    """Return True if `found` bytes are less than `planned`, beyond `MEMORY_TOLERANCE`."""
    return found < planned * (1 - MEMORY_TOLERANCE)


def resolve_hardware(config: HardwareConfig, *, calibrated: bool = True) -> Hardware:
    """Return the hardware of a plan: declared facts, and detected ones where nothing is declared.

    Facts of declared devices that are not in this machine stay unknown unless declared. A declared
    kind of device without a count means as many as this machine has, or one.

    Args:
        calibrated: Whether to use measurements of this machine, if the devices are its own.
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
    # With different cards, the rates of one would be wrong for another.
    alike = read_off and len({device.name for device in found}) == 1
    known = known_rates(found[0].name) if alike else {}
    declared_rates = {key: getattr(config, key) for key in RATES}
    rates = known | {key: rate for key, rate in declared_rates.items() if rate is not None}
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
        detected=not declared,
        **_calibrated(calibration, config.nodes * devices),
    )


def _calibrated(calibration: Calibration | None, world_size: int) -> dict[str, Any]:
    """Return the fields of `Hardware` that a calibration sets."""
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
