"""Whether the plan's devices are here, visible, and compute in the plan's number format."""

from __future__ import annotations

import os
from collections.abc import Iterator

from trainctl.config.quantities import memory_text
from trainctl.config.schema import Accelerator, RunConfig
from trainctl.config.secrets import resolve_variables
from trainctl.errors import Finding
from trainctl.hardware.detect import Device, all_devices, visible_devices
from trainctl.hardware.facts import Hardware
from trainctl.hardware.finding import doubt, problem
from trainctl.hardware.resolve import falls_short
from trainctl.options.precision import precision_of


def are_here(config: RunConfig, hardware: Hardware) -> Iterator[str | Finding]:
    """As many devices as planned, each with the memory that was planned for."""
    if hardware.accelerator is Accelerator.cpu:
        yield _cores(hardware)
        return
    kind = hardware.accelerator.value
    here = _of_the_plan(hardware)
    if not here:
        yield problem(
            "TC120",
            "hardware.accelerator",
            f"the plan is for {hardware.name}, and this machine has no {kind} device that "
            "this process can see",
            "hardware=auto, or hardware=2xcpu with a small model",
        )
        return
    if len(here) < hardware.devices_per_node:
        yield problem(
            "TC121",
            "hardware.devices_per_node",
            f"the plan is for {hardware.devices_per_node} {kind} devices, and this machine "
            f"shows {len(here)}{_visibility()}",
            f"hardware.devices_per_node={len(here)}, or hardware=auto",
        )
        return
    smallest = min(here, key=lambda device: device.memory_bytes)
    planned = hardware.device_memory_bytes or 0
    if falls_short(smallest.memory_bytes, planned):
        yield problem(
            "TC122",
            "hardware.device_memory_bytes",
            f"the plan is for devices of {memory_text(planned)}, and this machine has "
            f"{smallest.name} with {memory_text(smallest.memory_bytes)}",
            "hardware=auto",
        )
        return
    yield f"{len(here)} x {smallest.name}, {memory_text(smallest.memory_bytes)} each"


def _cores(hardware: Hardware) -> str | Finding:
    cores = len(os.sched_getaffinity(0))
    if hardware.devices_per_node <= cores:
        return f"{hardware.devices_per_node} processes on {cores} cores"
    return doubt(
        "TC123",
        "hardware.devices_per_node",
        f"{hardware.devices_per_node} processes will share {cores} cores: this will be slow",
        f"hardware={cores}xcpu",
    )


def visible_ones_exist(config: RunConfig, hardware: Hardware) -> Iterator[str | Finding]:
    """CUDA stops reading its variable at the first entry that names nothing, silently."""
    if hardware.accelerator is Accelerator.cpu:
        return
    variables = ["CUDA_VISIBLE_DEVICES"]
    if hardware.accelerator is Accelerator.rocm:
        variables.insert(0, "HIP_VISIBLE_DEVICES")
    own = resolve_variables(config.launcher.environment, os.environ)
    for variable in variables:
        set_by = "launcher.environment" if variable in own else ""
        value = own.get(variable, os.environ.get(variable))
        if value is None:
            continue
        entries = [entry.strip() for entry in value.split(",") if entry.strip()]
        missing = [entry for entry in entries if not _names_one(entry, all_devices())]
        twice = sorted({entry for entry in entries if entries.count(entry) > 1})
        if missing:
            what = f"names {', '.join(missing)}, which is not here: it and all after it are ignored"
        elif twice:
            what = f"names {', '.join(twice)} twice: CUDA then shows no device at all"
        elif len(entries) < hardware.devices_per_node:
            what = f"shows {len(entries)} of the {hardware.devices_per_node} devices of the plan"
        else:
            yield f"{variable}={value}"
            continue
        yield problem(
            "TC133",
            set_by or "hardware.devices_per_node",
            f"{variable}={value} {what}",
            f"unset {variable}, or name {hardware.devices_per_node} of the devices that "
            "`nvidia-smi -L` lists",
        )


def compute_in_the_format(config: RunConfig, hardware: Hardware) -> Iterator[str | Finding]:
    """The declared abilities are those of the devices that are here."""
    compute = precision_of(config.precision)
    for device in _of_the_plan(hardware):
        if not compute.runs_on(device):
            other = compute.alternatives(device)[0]
            yield problem(
                "TC134",
                "precision.compute",
                f"{device.name} (device {device.index}) does not compute in {compute.name}",
                f"precision={other}, or leave the device out with CUDA_VISIBLE_DEVICES",
            )
            return
    if hardware.accelerator is Accelerator.cpu and compute.on_cpu:
        yield f"{compute.name} on a CPU: {compute.on_cpu}"
    elif hardware.accelerator is Accelerator.cpu or _of_the_plan(hardware):
        yield compute.name


def _of_the_plan(hardware: Hardware) -> list[Device]:
    if hardware.accelerator is Accelerator.cpu:
        return []
    return [item for item in visible_devices() if item.accelerator is hardware.accelerator]


def _names_one(entry: str, devices: tuple[Device, ...]) -> bool:
    return any(
        entry == str(device.index) or (len(entry) > 3 and device.uuid.startswith(entry))
        for device in devices
    )


def _visibility() -> str:
    value = os.environ.get("CUDA_VISIBLE_DEVICES")
    return "" if value is None else f" (CUDA_VISIBLE_DEVICES={value})"
