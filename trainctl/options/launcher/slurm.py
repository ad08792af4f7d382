"""Slurm: a job that starts an agent on each node; inside an allocation it starts at once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from trainctl.config.schema import LauncherConfig
from trainctl.config.schema.option import option
from trainctl.options.launcher import Launcher

JOB_VARIABLE = "SLURM_JOB_ID"


@dataclass
class SlurmConfig(LauncherConfig):
    """Keys of Slurm."""

    slurm_partition: str | None = option(
        None, "Partitions to submit the job to; none is the cluster's default."
    )
    slurm_account: str | None = option(None, "Account that the job is charged to.")
    slurm_qos: str | None = option(None, "Quality of service.")
    slurm_constraint: str | None = option(None, "Node features required by the job.")
    slurm_time_minutes: int | None = option(
        None,
        "Time limit of the job; the run saves stop_grace_seconds before it and is requeued.",
        unit="minutes",
        minimum=1,
    )
    slurm_cpus_per_node: int | None = option(
        None, "CPUs requested per node; none requests whole nodes.", minimum=1
    )
    slurm_gres: str | None = option(
        None, "Generic resources requested per node; none requests the planned GPUs."
    )
    slurm_dependency: str | None = option(
        None, "Job dependency in Slurm's syntax, such as afterok:4711."
    )
    slurm_requeue: bool = option(True, "Requeue the job after a preemption or at the time limit.")
    slurm_modules: list[str] = option(
        [], "Environment modules to load before the run.", runs_code=True
    )
    slurm_options: list[str] = option(
        [], "Additional options of sbatch, such as --exclude=node7.", runs_code=True
    )
    slurm_container: str | None = option(
        None, "Container image for agents and ranks, run by Slurm's pyxis plugin.", runs_code=True
    )
    slurm_container_mounts: list[str] = option(
        [],
        "Directories mounted in the container, as SOURCE:TARGET; the run directory is always "
        "mounted.",
        needs=(lambda section: section.slurm_container is not None, "launcher.slurm_container"),
    )


def shared_options(section: SlurmConfig) -> dict[str, object]:
    """Return the options of sbatch that a run's job and the array jobs of its data share."""
    return {
        "partition": section.slurm_partition,
        "account": section.slurm_account,
        "qos": section.slurm_qos,
        "constraint": section.slurm_constraint,
        "time": section.slurm_time_minutes,
    }


def is_one_of(option: str, names: Iterable[str]) -> bool:
    """Whether `--name` or `--name=VALUE` is one of these options of sbatch, or abbreviates one."""
    written = option.removeprefix("--").partition("=")[0]
    return any(name.startswith(written) for name in names)


SPEC = Launcher(
    name="slurm",
    keys=SlurmConfig,
    build="trainctl.launchers.slurm:run_launch",
    render="trainctl.launchers.slurm:render",
    check="trainctl.launchers.slurm:check",
    check_config="trainctl.launchers.config_checks:check_slurm",
    queue="Slurm",
    job_variable=JOB_VARIABLE,
    tool="sbatch",
    tool_in_job="srun",
    cancel="trainctl.launchers.slurm:cancel",
    after_job="trainctl.launchers.slurm:after_job",
    submit_sweep="trainctl.launchers.slurm:submit_sweep",
)
