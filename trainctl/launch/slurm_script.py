"""Scripts for `sbatch`: readable, and inert whatever characters values have."""

from __future__ import annotations

import math
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from trainctl.config.schema import Accelerator
from trainctl.errors import ExitCode
from trainctl.options.launcher import section_of
from trainctl.options.launcher.slurm import SlurmConfig
from trainctl.plan.types import RunPlan
from trainctl.runs.layout import AttemptPaths, RunPaths

SCRIPT = "job.sh"
ARRAY_TASK = "ARRAY-TASK"
"""Placeholder of the task's number in the name of a log."""

_SIGNAL_MARGIN_SECONDS = 15
"""Time between the end of `launcher.stop_grace_seconds` and the job's time limit."""


def job_script(plan: RunPlan, run: RunPaths, attempt: AttemptPaths) -> str:
    """Return the `sbatch` script of a run's job."""
    launch = (sys.executable, "-P", "-m", "trainctl.launch", str(run.root))
    lines = [
        "#!/bin/bash",
        *_directives(plan, run.root.name, attempt.launcher_log),
        "",
        f"# Attempt {attempt.number} of {shlex.quote(str(run.root))}, or, after a requeue, the",
        "# next one: this starts one agent on each node, saves and requeues when Slurm wants it.",
        *_modules(plan),
        f"exec {shlex.join((*launch, '--attempt', str(attempt.number)))}",
    ]
    return "\n".join(lines) + "\n"


def array_script(plan: RunPlan, folder: Path, *, tasks: Sequence[int], parallel: int | None) -> str:
    """Return the script of a sweep: an array whose task K runs the run `folder/K`.

    Args:
        plan: Plan with the resources of every task.
        tasks: Numbers of the runs to start; each continues its newest attempt.
        parallel: Largest number of tasks at a time; None leaves it to the cluster.
    """
    limit = f"%{parallel}" if parallel is not None else ""
    log = RunPaths(folder / ARRAY_TASK).attempt(1).launcher_log
    run = f'{shlex.quote(str(folder))}/"$SLURM_ARRAY_TASK_ID"'
    launch = f"{shlex.quote(sys.executable)} -P -m trainctl.launch {run}"
    is_whole = list(tasks) == list(range(len(tasks)))
    indices = f"0-{len(tasks) - 1}" if is_whole else ",".join(map(str, tasks))
    lines = [
        "#!/bin/bash",
        *_directives(plan, folder.name, log, array=f"{indices}{limit}"),
        "",
        "# Task K trains the run K of this folder; see sweep.json for its values.",
        *_modules(plan),
        f"exec {launch}",
    ]
    return "\n".join(lines) + "\n"


def _directives(plan: RunPlan, name: str, log: Path, *, array: str = "") -> Iterator[str]:
    """Yield the `#SBATCH` lines.

    Args:
        plan: Plan with the resources to request.
        log: Output of the job; in an array, `ARRAY_TASK` in it stands for the task's number.
        array: Indices of an array's tasks, such as `0-3%2`.
    """
    launcher, hardware = section_of(plan.config, SlurmConfig), plan.hardware
    options: list[tuple[str, object]] = [
        ("job-name", "trainctl-" + re.sub(r"[^A-Za-z0-9._-]+", "-", name)),
        ("nodes", hardware.nodes),
        ("ntasks-per-node", 1),
    ]
    if launcher.slurm_gres is not None:
        options.append(("gres", launcher.slurm_gres))
    elif hardware.accelerator is not Accelerator.cpu:
        options.append(("gpus-per-node", hardware.devices_per_node))
    if launcher.slurm_cpus_per_node is not None:
        options.append(("cpus-per-task", launcher.slurm_cpus_per_node))
    options += [
        ("partition", launcher.slurm_partition),
        ("account", launcher.slurm_account),
        ("qos", launcher.slurm_qos),
        ("constraint", launcher.slurm_constraint),
        ("time", launcher.slurm_time_minutes),
        ("dependency", launcher.slurm_dependency),
        ("array", array or None),
    ]
    pattern = str(log).replace("%", "%%")
    options.append(("output", pattern.replace(ARRAY_TASK, "%a") if array else pattern))
    for option, value in options:
        if value is not None:
            yield f"#SBATCH --{option}={_quoted(str(value))}"
    if launcher.slurm_cpus_per_node is None:
        yield "#SBATCH --exclusive"
    yield "#SBATCH --open-mode=append"
    yield f"#SBATCH --{'requeue' if launcher.slurm_requeue else 'no-requeue'}"
    # A user's program gets Slurm's own SIGTERM, and has KillWait to save.
    if plan.config.trains_itself and launcher.stop_grace_seconds > 0:
        lead = math.ceil(launcher.stop_grace_seconds) + _SIGNAL_MARGIN_SECONDS
        yield f"#SBATCH --signal=B:TERM@{lead}"
    yield from (f"#SBATCH {option}" for option in launcher.slurm_options)


def _modules(plan: RunPlan) -> Iterator[str]:
    """Yield lines that load the modules.

    The launcher must replace the shell after them: Slurm signals the process that it started.
    """
    for module in section_of(plan.config, SlurmConfig).slurm_modules:
        yield f"module load {shlex.quote(module)} || exit {int(ExitCode.environment)}"


def _quoted(value: str) -> str:
    """Return a value quoted for an `#SBATCH` line: sbatch knows quotes and backslashes only."""
    if re.fullmatch(r"[A-Za-z0-9_.,:;+@%/=&|*()\[\]?!~^-]+", value):
        return value
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
