"""Start and stop of processes, for every launcher."""

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
