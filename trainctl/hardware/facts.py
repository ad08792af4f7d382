"""The facts about machines and devices that a plan is made for."""

from __future__ import annotations

from dataclasses import dataclass

from trainctl.config.schema import Accelerator


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """The machines that a plan is for. Sizes in bytes; ``None`` where unknown (then unchecked)."""

    name: str
    """As written by the user, such as ``4x8xh100-80g``."""
    accelerator: Accelerator
    """cuda, rocm or cpu; never auto."""
    nodes: int
    devices_per_node: int
    """Devices (on cpu: processes) of each."""
    device_memory_bytes: int | None = None
    """Memory of a device as its driver reports it; on cpu a process's share of the host's
    memory."""
    host_memory_bytes: int | None = None
    """Memory of a machine."""
    nvme_bytes: int | None = None
    """Free space of its NVMe."""
    peak_tflops_fp32: float | None = None
    """Dense fp32 throughput (not TF32), TFLOP/s per device."""
    peak_tflops_bf16: float | None = None
    """Dense bf16 matrix throughput."""
    peak_tflops_fp16: float | None = None
    """Dense fp16 matrix throughput."""
    peak_tflops_fp8: float | None = None
    """Dense fp8 matrix throughput."""
    memory_bandwidth_gb_per_second: float | None = None
    """Speed of a device's memory."""
    device_link_gb_per_second: float | None = None
    """Between devices of a node, one direction."""
    network_gb_per_second: float | None = None
    """Between nodes, per device."""
    host_link_gb_per_second: float | None = None
    """Between a device and its host, one direction."""
    matrix_efficiency: float | None = None
    """Share of the peak rates that large matrix products reach."""
    attention_efficiency: float | None = None
    """Share of the peak rates that attention as one kernel reaches."""
    supports_bf16: bool = True
    """Whether the device computes in bf16."""
    supports_fp8: bool = False
    """Whether the device computes in fp8."""
    detected: bool = False
    """Whether the facts were read off this machine."""
    runtime_bytes: int | None = None
    """What a process has on its device outside of tensors, where it was measured here."""
    fragmentation: float | None = None
    """Reserved over allocated memory, minus one, where it was measured here."""
    calibrated_on: str | None = None
    """Day of that measurement."""

    @property
    def world_size(self) -> int:
        return self.nodes * self.devices_per_node

    def peak_tflops(self, compute: str) -> float | None:
        """Dense throughput of a device in a number format, TFLOP/s; None where it is not known."""
        peak: float | None = getattr(self, f"peak_tflops_{compute}", None)
        return peak
