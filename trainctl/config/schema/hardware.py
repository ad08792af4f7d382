"""Hardware of the run: devices, machines and the links between them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from trainctl.config.schema.option import option


class Accelerator(Enum):
    """Kind of compute device; `auto` detects it."""

    auto = "auto"
    cuda = "cuda"
    rocm = "rocm"
    cpu = "cpu"


@dataclass
class HardwareConfig:
    """Facts about the machines, declared by an option of `hardware` or detected."""

    name: str = option("auto", "Name shown in plans, such as h100-80g.")
    driver_names: list[str] = option(
        [],
        "Device names reported by the vendor's tool, by which hardware=auto recognises the device.",
    )
    accelerator: Accelerator = option(Accelerator.auto, "Kind of device; auto detects everything.")
    nodes: int = option(1, "Number of nodes.", minimum=1, maximum=100_000)
    devices_per_node: int | None = option(
        None, "Devices per node (on cpu: processes); none detects them.", minimum=1, maximum=100_000
    )
    device_memory_bytes: int | None = option(
        None,
        "Memory of one device, as its driver reports it; none detects it.",
        unit="bytes",
        minimum=0,
    )
    host_memory_bytes: int | None = option(
        None,
        "Host memory of one node; none detects it on this machine and leaves it unchecked for "
        "others.",
        unit="bytes",
        minimum=0,
    )
    nvme_bytes: int | None = option(
        None, "Free NVMe space of one node; none leaves it unchecked.", unit="bytes", minimum=0
    )
    peak_tflops_fp32: float | None = option(
        None, "Peak dense fp32 throughput of one device, without TF32.", unit="TFLOP/s", above=0
    )
    peak_tflops_bf16: float | None = option(
        None, "Peak dense bf16 matrix throughput of one device.", unit="TFLOP/s", above=0
    )
    peak_tflops_fp16: float | None = option(
        None,
        "Peak dense fp16 matrix throughput of one device, with fp32 accumulation.",
        unit="TFLOP/s",
        above=0,
    )
    peak_tflops_fp8: float | None = option(
        None,
        "Peak dense fp8 matrix throughput of one device, with fp32 accumulation.",
        unit="TFLOP/s",
        above=0,
    )
    memory_bandwidth_gb_per_second: float | None = option(
        None, "Device memory bandwidth.", unit="GB/s", above=0
    )
    device_link_gb_per_second: float | None = option(
        None, "Bandwidth between devices of a node, in one direction.", unit="GB/s", above=0
    )
    network_gb_per_second: float | None = option(
        None, "Bandwidth between nodes, per device.", unit="GB/s", above=0
    )
    host_link_gb_per_second: float | None = option(
        None, "Bandwidth between a device and its host, in one direction.", unit="GB/s", above=0
    )
    matrix_efficiency: float | None = option(
        None,
        "Fraction of the peak throughput that large matrix products reach; none assumes a "
        "typical value.",
        above=0,
        maximum=1,
    )
    attention_efficiency: float | None = option(
        None,
        "Fraction of the peak throughput that a fused attention kernel reaches, forward and "
        "backward; none assumes a typical value.",
        above=0,
        maximum=1,
    )
    supports_bf16: bool = option(True, "Whether the device computes in bf16.")
    supports_fp8: bool = option(False, "Whether the device computes in fp8.")
