"""Whether this machine is what a plan is for, before a local launch."""

from __future__ import annotations

import os

from trainctl.config.schema import Accelerator
from trainctl.errors import ExitCode, Finding, Severity
from trainctl.hardware.detect import visible_devices
from trainctl.hardware.facts import Hardware
from trainctl.hardware.resolve import MEMORY_TOLERANCE


def preflight(hardware: Hardware) -> list[Finding]:
    """What this machine lacks for a local launch of the plan's devices."""
    if hardware.accelerator is Accelerator.cpu:
        return _enough_cores(hardware)
    kind = hardware.accelerator.value
    here = [item for item in visible_devices() if item.accelerator is hardware.accelerator]
    if not here:
        return [
            _problem(
                "TC120",
                "hardware.accelerator",
                f"the plan is for {hardware.name}, and this machine has no {kind} device that "
                "this process can see",
                "hardware=auto, or hardware=2xcpu with a small model",
            )
        ]
    if len(here) < hardware.devices_per_node:
        return [
            _problem(
                "TC121",
                "hardware.devices_per_node",
                f"the plan is for {hardware.devices_per_node} {kind} devices, and this machine "
                f"shows {len(here)}{_visibility()}",
                f"hardware.devices_per_node={len(here)}, or hardware=auto",
            )
        ]
    smallest = min(here, key=lambda device: device.memory_bytes)
    planned = hardware.device_memory_bytes or 0
    if smallest.memory_bytes < planned * (1 - MEMORY_TOLERANCE):
        return [
            _problem(
                "TC122",
                "hardware.device_memory_bytes",
                f"the plan is for devices of {planned / 2**30:.1f} GiB, and this machine has "
                f"{smallest.name} with {smallest.memory_bytes / 2**30:.1f} GiB",
                "hardware=auto",
            )
        ]
    return []


def _enough_cores(hardware: Hardware) -> list[Finding]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    if cores is None or hardware.devices_per_node <= cores:
        return []
    message = f"{hardware.devices_per_node} processes will share {cores} cores: this will be slow"
    return [
        _problem(
            "TC123",
            "hardware.devices_per_node",
            message,
            f"hardware={cores}xcpu",
            severity=Severity.warning,
        )
    ]


def _problem(
    rule: str, key: str, message: str, hint: str, *, severity: Severity = Severity.error
) -> Finding:
    return Finding(
        rule=rule,
        key=key,
        message=message,
        hint=hint,
        severity=severity,
        exit_code=ExitCode.environment,
    )


def _visibility() -> str:
    value = os.environ.get("CUDA_VISIBLE_DEVICES")
    return "" if value is None else f" (CUDA_VISIBLE_DEVICES={value})"
