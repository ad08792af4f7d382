"""Checks that the plan's devices exist, are visible, and compute in the plan's number format."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path

from trainctl.config.quantities import memory_text
from trainctl.config.schema import Accelerator, RunConfig
from trainctl.config.secrets import resolve_variables
from trainctl.errors import Finding
from trainctl.hardware.detect import (
    Device,
    Hardware,
    all_devices,
    error_finding,
    host_memory_limit,
    visible_devices,
    warning_finding,
)
from trainctl.hardware.resolve import falls_short
from trainctl.options.precision import precision_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Resources of a machine that plans rely on: this one, or a remote host that was probed."""

    name: str = "this machine"
    """Name of the machine in messages."""
    devices: Sequence[tuple[str, int]]
    """Name and bytes of memory of each visible device."""
    cores: int
    """Number of CPU cores that its processes may run on."""
    memory_bytes: int
    """Host memory that its processes may use: the machine's, or their cgroup's."""
    remedy: str = "hardware=auto"
    """Remedy offered in messages beside changing a number of the plan."""
    visibility_note: str = ""
    """Setting that may hide devices, in parentheses, for messages; empty if there is none."""


def this_machine(devices: Sequence[Device] = ()) -> Machine:
    """Return this machine with the given devices."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return Machine(
        devices=[(each.name, each.memory_bytes) for each in devices],
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=host_memory_limit(),
        visibility_note="" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible})",
    )


def check_devices(config: RunConfig, hardware: Hardware) -> Iterator[str | Finding]:
    """Find missing devices, or devices with less memory than planned."""
    machine = this_machine(_devices_of_plan(hardware))
    found = list(lacking_devices(hardware, machine, range(hardware.devices_per_node)))
    yield from found
    if not found and hardware.accelerator is Accelerator.cpu:
        yield f"{hardware.devices_per_node} processes on {machine.cores} cores"
    elif not found:
        name, memory = min(machine.devices, key=itemgetter(1))
        yield f"{len(machine.devices)} x {name}, {memory_text(memory)} each"


def lacking_devices(
    hardware: Hardware, machine: Machine, wanted: Sequence[int]
) -> Iterator[Finding]:
    """Find what a machine lacks of a plan's devices; on CPU, of cores for as many processes."""
    key, shown = "hardware.devices_per_node", len(machine.devices)
    kind, planned = hardware.accelerator.value, hardware.device_memory_bytes or 0
    if hardware.accelerator is Accelerator.cpu:
        if len(wanted) > machine.cores:
            yield warning_finding(
                "TC123",
                key,
                f"{len(wanted)} processes will share {machine.cores} cores of {machine.name}: this "
                "will be slow",
                f"hardware={machine.cores}xcpu",
            )
    elif not shown:
        yield error_finding(
            "TC120",
            "hardware.accelerator",
            f"the plan is for {hardware.name}, and {machine.name} has no {kind} device that "
            "its processes can see",
            f"{machine.remedy}, or hardware=2xcpu with a small model",
        )
    elif max(wanted) >= shown:
        uses = f"{len(wanted)} {kind} devices"
        if len(wanted) <= max(wanted):
            uses = f"the {kind} devices {', '.join(map(str, wanted))}"
        yield error_finding(
            "TC121",
            key,
            f"the plan is for {uses}, and {machine.name} shows {shown} devices"
            f"{machine.visibility_note}",
            f"{key}={shown}, or {machine.remedy}",
        )
    else:
        name, memory = min((machine.devices[each] for each in wanted), key=itemgetter(1))
        if falls_short(memory, planned):
            yield error_finding(
                "TC122",
                "hardware.device_memory_bytes",
                f"the plan is for devices of {memory_text(planned)}, and {machine.name} has {name} "
                f"with {memory_text(memory)}",
                f"hardware.device_memory_bytes={memory}, or {machine.remedy}",
            )


def check_visible_devices(config: RunConfig, hardware: Hardware) -> Iterator[str | Finding]:
    """Find entries of CUDA_VISIBLE_DEVICES (HIP_VISIBLE_DEVICES) that name no device, or one twice.

    CUDA silently ignores everything from the first unknown entry on.
    """
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
        missing = [entry for entry in entries if not _names_one_device(entry, all_devices())]
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
        yield error_finding(
            "TC133",
            set_by or "hardware.devices_per_node",
            f"{variable}={value} {what}",
            f"unset {variable}, or name {hardware.devices_per_node} of the devices that "
            "`nvidia-smi -L` lists",
        )


def check_number_formats(config: RunConfig, hardware: Hardware) -> Iterator[str | Finding]:
    """Find devices, or a CPU, that cannot compute in the plan's number format."""
    compute = precision_of(config.precision)
    for device in _devices_of_plan(hardware):
        if not compute.runs_on(device):
            other = compute.alternatives(device)[0]
            yield error_finding(
                "TC134",
                "precision.compute",
                f"{device.name} (device {device.index}) does not compute in {compute.name}",
                f"precision={other}, or leave the device out with CUDA_VISIBLE_DEVICES",
            )
            return
    narrow = compute.format.value
    if hardware.accelerator is Accelerator.cpu and narrow in lacking_formats():
        if config.trains_itself:  # in fp32: `trainctl.engines.cpu_matmul`
            yield f"{compute.name} on a CPU without instructions for it: products in fp32, rounded"
            return
        yield warning_finding(
            "TC372",
            "precision.compute",
            f"this machine's processor has no instructions for {narrow}: in a program of your own "
            "matrix products take some thirty times as long as in fp32",
            "precision=fp32",
        )
    elif hardware.accelerator is Accelerator.cpu and compute.on_cpu:
        yield f"{compute.name} on a CPU: {compute.on_cpu}"
    elif hardware.accelerator is Accelerator.cpu or _devices_of_plan(hardware):
        yield compute.name


def lacking_formats(processor: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """Return the number formats, of bf16 and fp16, in which this CPU has no matrix instructions.

    Empty where `/proc/cpuinfo` lists no x86 flags. The instruction sets are those that torch
    requires for oneDNN (aten/src/ATen/native/mkldnn/Utils.h).
    """
    try:
        text = processor.read_text()
    except OSError:
        return frozenset()
    flags = next((set(line.split()) for line in text.splitlines() if line[:5] == "flags"), set())
    if not flags:
        return frozenset()
    helped = {"bf16": {"avx512bw", "avx_ne_convert"}, "fp16": {"avx512_fp16", "avx_ne_convert"}}
    return frozenset(name for name, any_of in helped.items() if not any_of & flags)


def _devices_of_plan(hardware: Hardware) -> list[Device]:
    if hardware.accelerator is Accelerator.cpu:
        return []
    return [item for item in visible_devices() if item.accelerator is hardware.accelerator]


def _names_one_device(entry: str, devices: tuple[Device, ...]) -> bool:
    return any(
        entry == str(device.index) or (len(entry) > 3 and device.uuid.startswith(entry))
        for device in devices
    )
