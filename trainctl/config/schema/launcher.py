"""How processes are started, over every launcher."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from trainctl.config.schema.option import option


class LauncherKind(Enum):
    """What starts the agents."""

    local = "local"
    ssh = "ssh"
    slurm = "slurm"
    mpi = "mpi"
    kubernetes = "kubernetes"


class CpuBinding(Enum):
    """Processors of a rank; the memory that it touches first then lies beside them."""

    none = "none"
    """The operating system moves ranks as it sees fit."""
    cores = "cores"
    """An equal share of the cores for each rank, in the order of the machine's sockets."""
    device = "device"
    """Its share of the cores on the socket that its device is attached to."""


class MpiFlavor(Enum):
    """Command lines of mpirun."""

    openmpi = "openmpi"
    mpich = "mpich"


class KubernetesApi(Enum):
    """Controllers that start a set of pods together."""

    jobset = "jobset"
    trainjob = "trainjob"


@dataclass
class LauncherConfig:
    """How processes are started and stopped."""

    kind: LauncherKind = option(LauncherKind.local, "What starts the agents.")
    hosts: list[str] = option([], "Host names, for ssh.")
    hostfile: str | None = option(None, "File of `host slots=n` lines, for ssh.")
    include: str | None = option(
        None, "Hosts, and devices of each, to use, as in `node1@node2:0,2`; for ssh."
    )
    exclude: str | None = option(
        None, "Hosts, or devices of them, to leave out, as in `node1@node2:0,2`; for ssh."
    )
    interface: str | None = option(
        None, "Network interface of every host; none takes the one that reaches the others."
    )
    interfaces: dict[str, str] = option({}, "Interface of a host that has another, by its name.")
    python: str | None = option(
        None, "Python of every host, for ssh; none is the path of this one."
    )
    ssh_config: str | None = option(
        None, "File of ssh's own settings (`ssh -F`): ports, users, keys; none is the user's."
    )
    preflight_seconds: float = option(
        60.0, "Time for all hosts to answer before the start, for ssh.", unit="seconds", above=0
    )
    node_timeout_seconds: float = option(
        60.0,
        "A node that is not heard for so long is lost; one that does not hear its launcher ends.",
        unit="seconds",
        minimum=3,
    )
    min_nodes: int | None = option(
        None,
        "After losing nodes, go on with the others if there are so many; none waits for all.",
        minimum=1,
    )
    node_wait_seconds: float = option(
        600.0, "How long to wait for nodes before a restart.", unit="seconds", minimum=0
    )
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
    slurm_partition: str | None = option(None, "Partitions of the job; none is the cluster's own.")
    slurm_account: str | None = option(None, "Account that the job is charged to.")
    slurm_qos: str | None = option(None, "Quality of service.")
    slurm_constraint: str | None = option(None, "Features that the nodes must have.")
    slurm_time_minutes: int | None = option(
        None,
        "Time limit of the job; stop_grace_seconds before it the run saves and is requeued.",
        unit="minutes",
        minimum=1,
    )
    slurm_cpus_per_node: int | None = option(
        None, "Processors of each node; none asks for whole nodes.", minimum=1
    )
    slurm_gres: str | None = option(
        None, "Generic resources of each node; none asks for the planned GPUs."
    )
    slurm_dependency: str | None = option(
        None, "What the job waits for, such as afterok:4711, in Slurm's own words."
    )
    slurm_requeue: bool = option(True, "Start again after a preemption or at the time limit.")
    slurm_modules: list[str] = option([], "Environment modules that are loaded first.")
    slurm_options: list[str] = option([], "Further options of sbatch, such as --exclude=node7.")
    slurm_container: str | None = option(
        None, "Container image that agents and ranks run in, by Slurm's plugin pyxis."
    )
    slurm_container_mounts: list[str] = option(
        [], "Folders in the container, as SOURCE:TARGET; the run's own is always there."
    )
    mpi_program: str = option("mpirun", "The program that starts processes: a name or a path.")
    mpi_flavor: MpiFlavor = option(MpiFlavor.openmpi, "Whose command line it understands.")
    mpi_hostfile: str | None = option(
        None, "File of the hosts, as that program reads it; none leaves them to a scheduler."
    )
    mpi_options: list[str] = option([], "Further options of mpirun, each one word.")
    kubernetes_api: KubernetesApi = option(
        KubernetesApi.jobset, "Which controller the manifest is for."
    )
    kubernetes_image: str | None = option(
        None, "Container image that has trainctl; required for launcher=kubernetes."
    )
    kubernetes_namespace: str | None = option(None, "Namespace; none is kubectl's current one.")
    kubernetes_queue: str | None = option(None, "Kueue's local queue that admits the job.")
    kubernetes_claims: dict[str, str] = option(
        {}, "Persistent volume claims and where each is mounted; the run's folder must be on one."
    )
    kubernetes_shared_memory: str | None = option(
        "16Gi", "Size of /dev/shm, in memory; none leaves the 64 MiB of the container runtime."
    )
    kubernetes_node_selector: dict[str, str] = option({}, "Labels that the nodes must have.")
    kubernetes_service_account: str | None = option(None, "Service account of the pods.")
    kubernetes_python: str = option("python", "The interpreter inside the image.")
    kubernetes_secret: str | None = option(
        None, "Secret of Kubernetes with the variables that `${oc.env:NAME}` names in a pod."
    )
