"""The facts about machines and devices that a plan is made for."""

from __future__ import annotations

from dataclasses import dataclass

from trainctl.config.schema import Accelerator


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """The machines that a plan is for. Sizes in bytes; ``None`` where unknown (then unchecked).

    Attributes:
        name: As written by the user, such as ``4x8xh100-80g``.
        accelerator: cuda, rocm or cpu; never auto.
        nodes: Machines.
        devices_per_node: Devices (on cpu: processes) of each.
        device_memory_bytes: Memory of a device as its driver reports it; on cpu a process's share
            of the host's memory.
        host_memory_bytes: Memory of a machine.
        nvme_bytes: Free space of its NVMe.
        peak_tflops_fp32: Dense fp32 throughput (not TF32), TFLOP/s per device.
        peak_tflops_bf16: Dense bf16 matrix throughput.
        peak_tflops_fp16: Dense fp16 matrix throughput.
        peak_tflops_fp8: Dense fp8 matrix throughput.
        memory_bandwidth_gb_per_second: Speed of a device's memory.
        device_link_gb_per_second: Between devices of a node, one direction.
        network_gb_per_second: Between nodes, per device.
        host_link_gb_per_second: Between a device and its host, one direction.
        matrix_efficiency: Share of the peak rates that large matrix products reach.
        attention_efficiency: Share of the peak rates that attention as one kernel reaches.
        supports_bf16: Whether the device computes in bf16.
        supports_fp8: Whether the device computes in fp8.
        detected: Whether the facts were read off this machine.
        runtime_bytes: What a process has on its device outside of tensors, where it was measured
            here.
        fragmentation: Reserved over allocated memory, minus one, where it was measured here.
        calibrated_on: Day of that measurement.
    """

    name: str
    accelerator: Accelerator
    nodes: int
    devices_per_node: int
    device_memory_bytes: int | None = None
    host_memory_bytes: int | None = None
    nvme_bytes: int | None = None
    peak_tflops_fp32: float | None = None
    peak_tflops_bf16: float | None = None
    peak_tflops_fp16: float | None = None
    peak_tflops_fp8: float | None = None
    memory_bandwidth_gb_per_second: float | None = None
    device_link_gb_per_second: float | None = None
    network_gb_per_second: float | None = None
    host_link_gb_per_second: float | None = None
    matrix_efficiency: float | None = None
    attention_efficiency: float | None = None
    supports_bf16: bool = True
    supports_fp8: bool = False
    detected: bool = False
    runtime_bytes: int | None = None
    fragmentation: float | None = None
    calibrated_on: str | None = None

    @property
    def world_size(self) -> int:
        return self.nodes * self.devices_per_node

    def peak_tflops(self, compute: str) -> float | None:
        """Dense throughput of a device in a number format, TFLOP/s; None where it is not known."""
        peak: float | None = getattr(self, f"peak_tflops_{compute}", None)
        return peak
