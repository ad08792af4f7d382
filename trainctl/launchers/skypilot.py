"""The SkyPilot launcher: the task of a managed job, given to `sky jobs launch`.

Each machine runs `trainctl.launchers.pod`. The run directory travels as a file mount. SkyPilot
starts the job again on new machines when it loses one or the job ends with 75 (saved and
interrupted); the pod then makes the run directory from `checkpoint.mirror`, or finds it on a
volume, and resumes.

Fields follow SkyPilot's `get_task_schema` and `get_resources_schema` (sky/utils/schemas.py).
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from trainctl.config.literal_secrets import referenced_variables
from trainctl.errors import ExitCode, Finding, MachineError, TrainctlError
from trainctl.launchers.config_checks import check_path, check_skypilot, skypilot_accelerators
from trainctl.launchers.interface import (
    AttemptRequest,
    LaunchRequest,
    Outcome,
    RenderedLaunch,
    submit_attempt,
)
from trainctl.launchers.kubernetes import PORT, job_name
from trainctl.launchers.rank_command import (
    attempt_command,
    public_variables,
    redact_references,
    scheduled_rank_variables,
)
from trainctl.options.launcher import section_of
from trainctl.options.launcher.skypilot import SkypilotConfig
from trainctl.plans.types import RunPlan
from trainctl.runs.command import AttemptCommand
from trainctl.runs.status import SchedulerJob
from trainctl.runs.tools import run_tool

TASK = "task.yaml"
_COPIES = ".trainctl-copies"
"""Folder in the machines' home directory with the run directory as it was submitted."""
_ADDRESSES = "SKYPILOT_NODE_IPS"
_CONTROLLER_SECONDS = 900
"""Longest time of a command that may have to start SkyPilot's server or controller first."""
_JOB_CODES = (100, 101, 103)
"""Exit codes of `sky jobs logs`: the job failed, has not ended, was cancelled (`JobExitCode`)."""


def check(plan: RunPlan, folder: Path, checkpoint_bytes: int | None) -> list[Finding]:
    """Return what keeps the task from training, or its result from outliving its machines."""
    return [*check_skypilot(plan.config, plan.hardware), *check_path(folder.absolute())]


def render(request: AttemptRequest) -> RenderedLaunch:
    """Return the task and the command that submits it. Pure."""
    secrets = sorted(referenced_variables(request.plan.config))
    words = [word for name in secrets for word in ("--secret", name)]
    task = str(request.attempt.root / TASK)
    command = node_command(redact_references(request))
    argv = ("sky", "jobs", "launch", "--yes", "--detach-run", *words, task)
    text = yaml.safe_dump(task_of(request), sort_keys=False, allow_unicode=True)
    return RenderedLaunch(command=command, commands=(argv,), files={TASK: text})


def task_of(request: AttemptRequest) -> dict[str, Any]:
    """Return the fields of the task."""
    plan, run = request.plan, request.run
    launcher, name = section_of(plan.config, SkypilotConfig), job_name(run)
    argv = (launcher.skypilot_python, "-P", "-m", "trainctl.launchers.pod")
    copy = f"{_COPIES}/{name}"
    paths = f"{_shell_path(f'{launcher.skypilot_folder}/{name}')} --copy {_shell_path(copy)}"
    return {
        "name": name,
        "num_nodes": plan.hardware.nodes,
        "resources": {
            **_optional("infra", launcher.skypilot_infra),
            **_optional("accelerators", skypilot_accelerators(plan.config, plan.hardware)),
            "use_spot": launcher.skypilot_use_spot,
            "job_recovery": {
                "recover_on_exit_codes": [int(ExitCode.requeue)],
                "max_restarts_on_errors": launcher.max_restarts,
            },
            **launcher.skypilot_resources,
        },
        **_optional("workdir", None if request.folder is None else str(request.folder)),
        "file_mounts": {f"~/{copy}": str(run.root)},
        **_optional("volumes", dict(launcher.skypilot_volumes)),
        "envs": public_variables(request),
        **_optional("secrets", dict.fromkeys(sorted(referenced_variables(plan.config)))),
        **_optional("setup", "\n".join(launcher.skypilot_setup)),
        "run": f"exec {shlex.join(argv)} {paths} --attempt {request.attempt.number}",
    }


def _optional(name: str, value: Any) -> dict[str, Any]:
    return {name: value} if value else {}


def _shell_path(path: str) -> str:
    """Return a path as a word of a shell; a relative one is in the home directory."""
    return shlex.quote(path) if path.startswith("/") else f'"$HOME"/{shlex.quote(path)}'


def node_command(request: AttemptRequest) -> AttemptCommand:
    """Return the command of the machines; their addresses are known only there."""
    launcher, nodes = section_of(request.plan.config, SkypilotConfig), request.plan.hardware.nodes
    addresses = request.environment.get(_ADDRESSES, "").split()
    hosts: Sequence[str] = addresses if len(addresses) == nodes else [""] * nodes
    return attempt_command(
        request,
        hosts,
        [scheduled_rank_variables(request)] * nodes,
        python=launcher.skypilot_python,
        port=launcher.port or PORT,
        address=hosts[0] or None,
    )


def run_launch(launch: LaunchRequest) -> Outcome:
    """Write the task, give it to SkyPilot and return.

    Raises:
        TrainctlError: `sky` is missing or refuses the task (exit code 4).
    """
    name = job_name(launch.run)
    rendered = render(launch.attempt_request(launch.attempt, launch.plan))

    def send(command: Sequence[str]) -> str:
        try:
            return run_tool(command, seconds=_CONTROLLER_SECONDS)
        except TrainctlError as error:  # such as a time-out: SkyPilot's server may go on
            error.hint = (
                error.hint or f"if SkyPilot has the job all the same: sky jobs cancel --name {name}"
            )
            raise

    return submit_attempt(launch, rendered, job_id=lambda _: name, is_known=True, send=send)


def cancel(job: SchedulerJob) -> None:
    """Cancel a job and take its machines down.

    Raises:
        TrainctlError: `sky` is missing or fails, or there are several of the name (exit code 4).
    """
    command = ("sky", "jobs", "cancel", "--yes", "--name", job.id)
    try:
        answer = run_tool(command, seconds=_CONTROLLER_SECONDS)
    except MachineError as error:
        if "jobs should have finished" in error.message:  # the controller is stopped
            return
        raise
    if "Multiple running jobs" in answer:
        raise MachineError(
            f"SkyPilot runs several jobs of the name {job.id}, and cancels none of them",
            hint="sky jobs queue lists them; sky jobs cancel ID ends one",
        )


def job_log(job: SchedulerJob) -> str:
    """Return the output of a job.

    Raises:
        TrainctlError: `sky` is missing or fails (exit code 4).
    """
    command = ("sky", "jobs", "logs", "--no-follow", "--name", job.id)
    return run_tool(command, seconds=_CONTROLLER_SECONDS, accepted=_JOB_CODES)
