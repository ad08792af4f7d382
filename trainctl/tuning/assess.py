"""Assessment of a configuration: plan, memory budget and findings in one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from trainctl.config.quantities import memory_text
from trainctl.config.schema import CompileKind, CrossEntropyKind, RunConfig
from trainctl.errors import ExitCode, Finding, Severity, TrainctlError
from trainctl.hardware import Hardware
from trainctl.memory.budget import MemoryBudget, budget, device_budget
from trainctl.memory.constants import GIB
from trainctl.memory.traced import TracedModel, traced_model
from trainctl.plans.types import RunPlan
from trainctl.rules.resolve import resolve
from trainctl.tuning.speed import time_variant

DEVICE_TOO_SMALL, HOST_TOO_SMALL, NVME_TOO_SMALL = "TC150", "TC151", "TC152"


@dataclass(frozen=True, slots=True, kw_only=True)
class Assessment:
    """Plan, memory budget and problems of a configuration, before anything starts."""

    plan: RunPlan | None
    """Plan; None exactly when the configuration is not legal."""
    budget: MemoryBudget | None
    """Memory budget of the plan; None without a plan."""
    findings: tuple[Finding, ...]
    """Findings of resolution, followed by findings on memory."""

    @property
    def fits(self) -> bool:
        """Whether the configuration can be launched and certainly fits."""
        no_error = not any(finding.is_error for finding in self.findings)
        return no_error and self.budget is not None and self.budget.fits is True


def assess(config: RunConfig, hardware: Hardware, traced: TracedModel | None = None) -> Assessment:
    """Resolve a configuration and compare its memory budget with the hardware.

    `traced` is a trace of the model. Without one, the closed form of its shape is budgeted, and a
    model that has none is traced.
    """
    resolution = resolve(config, hardware)
    if resolution.plan is None:
        return Assessment(plan=None, budget=None, findings=resolution.findings)
    if traced is None:
        try:
            traced = traced_model(config)
        except TrainctlError as error:
            found = (*resolution.findings, *error.findings)
            return Assessment(plan=None, budget=None, findings=found)
    memory = budget(resolution.plan, traced)
    return Assessment(
        plan=resolution.plan,
        budget=memory,
        findings=(*resolution.findings, *_too_small(memory, hardware)),
    )


def plain_kernels_cost(plan: RunPlan) -> str:
    """Return the predicted change of speed, and of memory on a device, by plain kernels in place of
    the plan's; empty if they are plain.
    """
    kernels, hardware = plan.config.kernels, plan.hardware
    if not (kernels.liger or kernels.is_compiled):
        return ""
    plain = replace(kernels, liger=False, compile=CompileKind.none)
    if kernels.cross_entropy is CrossEntropyKind.liger_fused:
        plain.cross_entropy = CrossEntropyKind.plain
    now = time_variant(plan.config, hardware)
    other = time_variant(replace(plan.config, kernels=plain), hardware)
    if now is None or other is None:
        return ""
    seconds, wider = now.seconds_per_token, other.seconds_per_token
    changes = [f"{seconds / wider - 1:+.0%} tokens/s"] if seconds and wider else []
    peaks = [
        device_budget(each.sketch, traced_model(plan.config)).device_peak_bytes
        for each in (now, other)
    ]
    gibibytes = (peaks[1] - peaks[0]) / GIB
    # What the compiler saves is not budgeted.
    return ", ".join([*changes, f"{gibibytes:+.1f} GiB"] if abs(gibibytes) >= 0.05 else changes)


def _too_small(memory: MemoryBudget, hardware: Hardware) -> Iterator[Finding]:
    """Yield a finding for each memory of the hardware that is, or may be, too small. Disk space is
    unknown here: launching checks it.
    """
    capacity = hardware.device_memory_bytes
    if capacity is not None and memory.fits is not True:
        certain = memory.fits is False
        between = (
            f"{_gib(memory.device_peak_bytes)} at its fullest ({memory.peak_phase}), between "
            f"{_gib(memory.device_peak_low_bytes)} and {_gib(memory.device_peak_high_bytes)}"
        )
        yield Finding(
            rule=DEVICE_TOO_SMALL,
            key="hardware.device_memory_bytes",
            message=f"{'does not' if certain else 'may not'} fit: a device needs {between}, and "
            f"has {_gib(capacity)}",
            hint=f"its largest part is {_largest_part(memory)}",
            severity=Severity.error if certain else Severity.warning,
            exit_code=ExitCode.does_not_fit,
        )
    host = memory.host
    if hardware.host_memory_bytes is not None and host.bytes_per_node > hardware.host_memory_bytes:
        parts = ", ".join(f"{name} {_gib(size)}" for name, size in host.components.items())
        yield Finding(
            rule=HOST_TOO_SMALL,
            key="hardware.host_memory_bytes",
            message=f"does not fit: a machine needs {_gib(host.bytes_per_node)} of host memory "
            f"({parts}), and has {_gib(hardware.host_memory_bytes)}",
            hint="fewer processes on a machine, or less offloaded to it",
            exit_code=ExitCode.does_not_fit,
        )
    if hardware.nvme_bytes is not None and memory.nvme_bytes_per_node > hardware.nvme_bytes:
        yield Finding(
            rule=NVME_TOO_SMALL,
            key="hardware.nvme_bytes",
            message=f"does not fit: a machine swaps {_gib(memory.nvme_bytes_per_node)} to NVMe, "
            f"and has {_gib(hardware.nvme_bytes)}",
            hint="more machines, or offload.optimizer=cpu",
            exit_code=ExitCode.does_not_fit,
        )


def _largest_part(memory: MemoryBudget) -> str:
    parts = memory.components.to_json()
    name = max(parts, key=lambda part: parts[part])
    return f"{name.replace('_', ' ')} with {_gib(parts[name])}"


def _gib(size: int) -> str:
    return memory_text(size)
