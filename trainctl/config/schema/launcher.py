"""Hardware, and start and stop of processes, for every launcher."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

from trainctl.config.schema.option import option


class CpuBinding(Enum):
    """CPU cores of a rank; memory that it touches first is then allocated on their NUMA node."""

    none = "none"
    """No binding: the operating system schedules ranks on any core."""
    cores = "cores"
    """An equal share of the cores for each rank, in the order of the machine's sockets."""
    device = "device"
    """An equal share of the cores on the socket that the rank's device is attached to."""


@dataclass
class LauncherConfig:
    """Start and stop of the processes of a run."""

    units: ClassVar[str] = "launcher"

    kind: str = option("local", "Launcher that starts the agents on the nodes.", units="launcher")
    cpu_binding: CpuBinding = option(CpuBinding.none, "CPU cores that each rank is bound to.")
    benchmark: bool = option(
        False,
        "Benchmark computation and collectives before training, and report slow devices and links.",
    )
    min_bandwidth_gb_per_second: float | None = option(
        None, "Minimum all-reduce bandwidth; the run does not start below it.", unit="GB/s", above=0
    )
    straggler_factor: float | None = option(
        1.3,
        "Report a rank as a straggler if its own work takes this many times as long as its "
        "peers'; none reports no rank.",
        above=1,
    )
    port: int | None = option(
        None, "Rendezvous port; none picks a free one.", minimum=1, maximum=65535
    )
    environment: dict[str, str] = option(
        {},
        "Environment variables set for every rank; `${oc.env:NAME}` is resolved at the start, "
        "and its value is never written.",
        runs_code=True,
    )
    plain_environment: list[str] = option(
        [],
        "Names (globs) of environment variables that are not secret: their values may be written.",
    )
    forward_environment: list[str] = option(
        [
            "CUDA_VISIBLE_DEVICES",
            "NCCL_*",
            "GLOO_*",
            "HF_HOME",
            "HF_HUB_OFFLINE",
            "OMP_NUM_THREADS",
            "TORCH_*",
            "PYTORCH_*",
        ],
        "Environment variables (globs) forwarded from this shell to every rank and recorded with "
        "the run.",
    )
    omp_num_threads: int | None = option(
        None, "CPU threads per rank; none divides the cores among the ranks.", minimum=1
    )
    grace_seconds: float = option(
        3.0, "Time between SIGTERM and SIGKILL when ranks are stopped.", unit="seconds", minimum=0
    )
    communication_timeout_seconds: float = option(
        600.0, "Timeout of a collective, after which it fails.", unit="seconds", above=0
    )
    stop_grace_seconds: float = option(
        0.0,
        "Time after SIGTERM to finish the step, save and exit with code 75; 0 exits at once.",
        unit="seconds",
        minimum=0,
    )
    interrupt_grace_seconds: float = option(
        300.0,
        "Time to finish the step, save and exit with 128 + the signal number after Ctrl-C, a "
        "closed terminal, or SIGTERM where stop_grace_seconds is 0; 0 exits at once.",
        unit="seconds",
        minimum=0,
    )
    max_restarts: int = option(
        0,
        "Maximum number of automatic restarts of a launch after failures, each from the newest "
        "checkpoint.",
        minimum=0,
    )
    heartbeat_seconds: float = option(
        600.0,
        "Time without a heartbeat, in a step or an evaluation, after which a rank counts as hung.",
        unit="seconds",
        above=0,
    )
    slow_phase_seconds: float = option(
        3600.0,
        "Heartbeat timeout while a rank starts (up to its first step), saves or shuts down.",
        unit="seconds",
        above=0,
    )


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
