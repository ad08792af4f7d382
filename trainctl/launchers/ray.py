"""The Ray launcher: a job of the cluster that starts an agent on each node of a placement group.

Outside of a job, `run_launch` submits one by Ray's job API and returns. Inside one (the submitted
job, or a job of the user's that calls trainctl) it reserves the nodes and runs their agents to the
end (`trainctl.launchers.ray_agents`).
"""

from __future__ import annotations

import json
import math
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainctl.errors import Finding, MachineError, TrainctlError
from trainctl.hardware.packages import check_extras
from trainctl.launchers.attempts import end_as_cancelled, require_space, run_attempts
from trainctl.launchers.config_checks import check_ray
from trainctl.launchers.interface import (
    AttemptRequest,
    LaunchRequest,
    Outcome,
    RenderedLaunch,
    submit_attempt,
)
from trainctl.launchers.node_agents import ElasticPlanner
from trainctl.launchers.rank_command import (
    attempt_command,
    public_variables,
    rank_variables,
    redact_references,
)
from trainctl.launchers.ray_agents import RayAgents, RayPool
from trainctl.options.launcher import section_of
from trainctl.options.launcher.ray import JOB_VARIABLE, RayConfig
from trainctl.plans.types import RunPlan
from trainctl.runs.status import SchedulerJob

if TYPE_CHECKING:
    from ray.job_submission import JobSubmissionClient

NO_JOB_SERVER = "TC511"
_STOP_MARGIN_SECONDS = 15
"""Time that Ray leaves a stopped job beyond the graces of its ranks; Ray's own default is 3 s."""


def check(plan: RunPlan, folder: Path, checkpoint_bytes: int | None) -> list[Finding]:
    """Return what is wrong with the address, or a finding if no job server answers there."""
    findings = check_ray(plan.config, plan.hardware)
    findings += [
        found
        for found in check_extras(plan.config, plan.hardware)
        if isinstance(found, Finding) and found.key == "launcher.kind"
    ]
    if findings or JOB_VARIABLE in os.environ:
        return findings
    try:
        _connect(section_of(plan.config, RayConfig).address)
    except TrainctlError as error:
        findings.append(
            Finding(
                rule=NO_JOB_SERVER,
                key="launcher.address",
                message=f"no job server of Ray answers from here ({error.message})",
                hint="launcher.address is the URL of the dashboard, such as http://HEAD:8265",
                exit_code=error.exit_code,
            )
        )
    return findings


def render(request: AttemptRequest) -> RenderedLaunch:
    """Render the agents' commands, and `ray job submit` outside of a job. Pure."""
    launcher, nodes = section_of(request.plan.config, RayConfig), request.plan.hardware.nodes
    is_in_job = JOB_VARIABLE in request.environment
    known = request if is_in_job else redact_references(request)
    variables = rank_variables(
        replace(known, cores=launcher.cpus_per_node or request.ranks_per_node)
    )
    variables.pop("CUDA_VISIBLE_DEVICES", None)  # Ray gives each agent its devices
    command = attempt_command(
        request,
        [""] * nodes,
        [variables] * nodes,
        python=launcher.python or sys.executable,
        port=launcher.port,
    )
    if is_in_job:
        return RenderedLaunch(command=command, commands=())
    job = _job_fields(request)
    address = () if launcher.address is None else ("--address", launcher.address)
    submit = ("ray", "job", "submit", *address, "--no-wait")
    environment = ("--runtime-env-json", json.dumps(job["runtime_env"]))
    argv = (*submit, *environment, "--", *shlex.split(job["entrypoint"]))
    return RenderedLaunch(command=command, commands=(argv,))


def _job_fields(request: AttemptRequest) -> dict[str, Any]:
    """Return the arguments of Ray's `submit_job`. Ray shows them to all users of the cluster, so
    the job gets only variables that are not secret; it finds the others on its nodes.
    """
    run, launcher = request.run, section_of(request.plan.config, RayConfig)
    graces = launcher.stop_grace_seconds or launcher.interrupt_grace_seconds
    variables = {
        **public_variables(request),
        "RAY_JOB_STOP_WAIT_TIME_S": str(
            math.ceil(graces + launcher.grace_seconds) + _STOP_MARGIN_SECONDS
        ),
    }
    python = launcher.python or sys.executable
    argv = (python, "-P", "-m", "trainctl.launchers", str(run.root))
    return {
        "entrypoint": shlex.join(("exec", *argv, "--attempt", str(request.attempt.number))),
        "runtime_env": {"env_vars": variables}
        | ({} if launcher.python is None else {"py_executable": launcher.python}),
        "metadata": {"trainctl_run": str(run.root)},
    }


def run_launch(launch: LaunchRequest) -> Outcome:
    """Submit the attempt, or, inside a job, run it and those that replace it to their end.

    Ray sends a job SIGTERM only if somebody stops it.

    Raises:
        TrainctlError: The run is in use (5), Ray refuses the job, does not have the nodes in
            `launcher.node_wait_seconds`, or the run's disk has no space for a checkpoint (4).
    """
    require_space(launch.run.root, launch.checkpoint_bytes)
    launcher = section_of(launch.plan.config, RayConfig)
    if JOB_VARIABLE not in os.environ:
        request = launch.attempt_request(launch.attempt, launch.plan)

        def send(_: Sequence[str]) -> str:
            client = _connect(launcher.address)
            with _ray_errors():
                return f"{client.get_address()}/{client.submit_job(**_job_fields(request))}"

        return submit_attempt(launch, render(request), job_id=str, send=send)
    with _ray_errors():
        import ray

        ray.init("auto", log_to_driver=False, configure_logging=False)
    pool = RayPool(launch)
    try:
        outcome = run_attempts(
            launch,
            render=render,
            start=lambda prepared: RayAgents(prepared, pool, launch),
            replan=ElasticPlanner(launch, pool).replan,
        )
    finally:
        ray.shutdown()
    return end_as_cancelled(launch.run, outcome) if outcome.was_signalled else outcome


def _connect(address: str | None) -> JobSubmissionClient:
    """Return a client of the job server.

    Raises:
        TrainctlError: None answers (exit code 4).
    """
    names = ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS")  # which Ray prefers to the argument
    hidden = {name: os.environ.pop(name) for name in names if address and name in os.environ}
    try:
        with _ray_errors():
            from ray.job_submission import JobSubmissionClient

            return JobSubmissionClient(address)
    finally:
        os.environ.update(hidden)


@contextmanager
def _ray_errors() -> Iterator[None]:
    """Raise errors of Ray's clients, or that there is no Ray, as `TrainctlError` (exit code 4)."""
    try:
        from ray.exceptions import RayError
    except ImportError:
        raise MachineError(
            "ray is not installed on this machine", hint="pip install 'trainctl[ray]'"
        ) from None
    try:
        yield
    except (RayError, OSError, RuntimeError, ValueError) as error:  # OSError: requests' own, too
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise MachineError(f"Ray: {first}") from None


def _ask(job: SchedulerJob, method: str) -> Any:
    """Return the answer of a method of Ray's client about a job.

    Raises:
        TrainctlError: The job server does not answer, or does not know the job (exit code 4).
    """
    address, _, identity = job.id.rpartition("/")
    client = _connect(address)
    with _ray_errors():
        return getattr(client, method)(identity)


def cancel(job: SchedulerJob) -> None:
    """Stop a job, or take it from its queue; a job that Ray does not know has ended.

    Raises:
        TrainctlError: The job server does not answer (exit code 4).
    """
    try:
        _ask(job, "stop_job")
    except TrainctlError as error:
        if "does not exist" not in error.message:  # Ray forgets its jobs with its cluster
            raise


def job_state(job: SchedulerJob) -> str:
    """Return Ray's status of a job, such as `PENDING`. Raises as `_ask`."""
    return str(_ask(job, "get_job_status"))


def job_log(job: SchedulerJob) -> str:
    """Return the output of a job's launcher. Raises as `_ask`."""
    return str(_ask(job, "get_job_logs"))
