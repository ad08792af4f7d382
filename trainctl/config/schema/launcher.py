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

    kind: str = option("local", "What starts the agents.", units="launcher")
    cpu_binding: CpuBinding = option(CpuBinding.none, "Processors that a rank may run on.")
    benchmark: bool = option(
        False, "Measure computation and collectives before training; names what is slow."
    )
    min_bandwidth_gb_per_second: float | None = option(
        None, "Refuse to train below this bandwidth of an all-reduce.", unit="GB/s", above=0
    )
    straggler_factor: float | None = option(
        1.3,
        "Name a rank whose own work takes so many times as long as its peers'; none names nobody.",
        above=1,
    )
    port: int | None = option(
        None, "Rendezvous port; none takes a free one.", minimum=1, maximum=65535
    )
    environment: dict[str, str] = option(
        {},
        "Variables set for every rank; `${oc.env:NAME}` is resolved at the start, never written.",
    )
    plain_environment: list[str] = option(
        [], "Names (globs) of variables that are no secrets: their values may be written."
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
        "Variables (globs) carried from this shell to every rank and recorded with the run.",
    )
    omp_num_threads: int | None = option(
        None, "Threads of each rank on the CPU; none shares the cores.", minimum=1
    )
    grace_seconds: float = option(
        3.0, "Time for ranks to end after SIGTERM before SIGKILL.", unit="seconds", minimum=0
    )
    communication_timeout_seconds: float = option(
        600.0, "A collective that takes longer fails.", unit="seconds", above=0
    )
    stop_grace_seconds: float = option(
        0.0,
        "After SIGTERM: time to finish the step, save and end with exit code 75; 0 ends at once.",
        unit="seconds",
        minimum=0,
    )
    interrupt_grace_seconds: float = option(
        300.0,
        "After Ctrl-C, a closed terminal, or SIGTERM where stop_grace_seconds is 0: time to finish "
        "the step, save and end with 128 + the signal; 0 ends at once.",
        unit="seconds",
        minimum=0,
    )
    max_restarts: int = option(
        0,
        "Times that a launch starts again by itself, from the newest checkpoint, after a failure.",
        minimum=0,
    )
    heartbeat_seconds: float = option(
        600.0,
        "A rank that gives no sign of life for so long, in a step or an evaluation, is hung.",
        unit="seconds",
        above=0,
    )
    slow_phase_seconds: float = option(
        3600.0,
        "As heartbeat_seconds, while a rank starts (up to its first step), saves or ends.",
        unit="seconds",
        above=0,
    )
