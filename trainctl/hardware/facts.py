"""Facts about the machines and devices that a plan is made for."""

from __future__ import annotations

from dataclasses import dataclass

from trainctl.config.schema import Accelerator
from trainctl.errors import ExitCode, Finding, Severity


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
