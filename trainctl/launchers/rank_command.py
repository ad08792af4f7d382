"""Command and environment of a run's ranks: trainctl's trainer, or code of the user's."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from trainctl.config.literal_secrets import referenced_variables
from trainctl.config.registry import trusted_folder_variable
from trainctl.config.schema import Accelerator, CpuBinding, RunConfig
from trainctl.config.secrets import REDACTED, is_plain_variable, resolve_variables
from trainctl.config.user_code import function_keys, has_own_config
from trainctl.errors import Finding, MachineError, Severity
from trainctl.options.precision import precision_of
from trainctl.plans import settings
from trainctl.plans.types import RunPlan
from trainctl.runs.command import AttemptCommand, NodeCommand
from trainctl.runs.directory import read_record
from trainctl.runs.layout import AttemptPaths, RunPaths
from trainctl.runs.processes import SIGTERM_SAVES_VARIABLE
from trainctl.runs.provenance import select_variables

if TYPE_CHECKING:
    from trainctl.launchers.interface import AttemptRequest

CONFIG_VARIABLE = "TRAINCTL_DEEPSPEED_CONFIG"
PLAN_VARIABLE = "TRAINCTL_PLAN"
TRANSFORMERS_FLAG = "--deepspeed"
"""The flag that `transformers.TrainingArguments` defines, as a value of `script_config_flag`."""
MIXED_PRECISIONS = ("bf16", "fp16")
"""Sections of DeepSpeed's JSON, and values of accelerate's `mixed_precision`."""
FORK_VARIABLE = "TRAINCTL_FORK_RANKS"
"""Variable that turns forking off if it is 0: every rank then imports for itself."""

SILENT_VARIABLES = (
    "NCCL_*",
    "GLOO_*",
    "UCX_*",
    "FI_*",
    "CUDA_*",
    "HSA_*",
    "HF_*",
    "TORCH_*",
    "TRITON_*",
    "LD_LIBRARY_PATH",
    "LD_PRELOAD",
    "PYTHONPATH",
)
"""Variables that change how ranks run: on a host without them, ranks differ silently."""


def attempt_command(
    request: AttemptRequest,
    hosts: Sequence[str],
    variables: Sequence[dict[str, str]],
    *,
    python: str = sys.executable,
    is_numbered: bool = True,
    address: str | None = None,
    port: int | None = None,
) -> AttemptCommand:
    """Return the commands of an attempt's agents and ranks.

    Args:
        variables: Environment variables of each node's agent and ranks.
        is_numbered: Whether an agent is told the number of its node; else a scheduler tells it.
        address: Address of the first node, if agents are not told it when they are started.
        port: Port of the rendezvous; None takes a free one.
    """
    plan, config = request.plan, request.plan.config
    paths = (str(request.run.root), "--attempt", str(request.attempt.number))
    agent = (python, "-P", "-m", "trainctl.launchers.agent", *paths)
    own = request.rank_command or rank_argv(config, request.run, request.attempt, python=python)
    return AttemptCommand(
        nodes=tuple(
            NodeCommand(
                node=node,
                host=host,
                argv=(*agent, "--node", str(node)) if is_numbered else agent,
                environment=of_node,
            )
            for node, (host, of_node) in enumerate(zip(hosts, variables, strict=True))
        ),
        ranks_per_node=request.ranks_per_node,
        rank_command=tuple(own),
        prepare=request.rank_command is None and config.trains_itself,
        is_users=not config.trains_itself,
        is_forked=request.rank_command is None and _should_fork(plan),
        folder=None if request.folder is None else str(request.folder),
        hidden=hidden_variables(config),
        address=address,
        port=port,
    )


def rank_argv(
    config: RunConfig, run: RunPaths, attempt: AttemptPaths, *, python: str = sys.executable
) -> tuple[str, ...]:
    """Return the command line of every rank; `python` is the interpreter on its machine."""
    if config.script is None:
        attempt_of = (str(run.root), "--attempt", str(attempt.number))
        return (python, "-P", "-m", "trainctl.train", *attempt_of)
    start = (python, config.script) if config.script.endswith(".py") else (config.script,)
    return (*start, *config.script_arguments, *_config_arguments(config, attempt))


def _config_arguments(config: RunConfig, attempt: AttemptPaths) -> tuple[str, ...]:
    flag = config.script_config_flag
    if flag is None or has_own_config(config):
        return ()
    return (flag, str(attempt.deepspeed))


def _should_fork(plan: RunPlan) -> bool:
    """Return True if ranks are forked: on CPUs only, and where nothing needs a fresh process.

    A process that has used CUDA cannot be forked, and an import may use it. A benchmark before
    training execs the rank's command, and OpenMP reads its CPU binding when it is loaded.
    """
    launcher = plan.config.launcher
    return (
        plan.config.trains_itself
        and plan.hardware.accelerator is Accelerator.cpu
        and not launcher.benchmark
        and launcher.cpu_binding is CpuBinding.none
        and os.environ.get(FORK_VARIABLE) != "0"
    )


def hidden_variables(config: RunConfig) -> tuple[str, ...]:
    """Return the names of the user's variables for ranks whose values must not be written."""
    launcher = config.launcher
    names = {*launcher.environment, *referenced_variables(config)}
    return tuple(
        sorted(name for name in names if not is_plain_variable(name, launcher.plain_environment))
    )


def program_variables(plan: RunPlan, attempt: AttemptPaths) -> dict[str, str]:
    """Return variables for a user's program or function; none for trainctl's trainer.

    Besides them every process has `TRAINCTL_RUN_DIR` and `TRAINCTL_ATTEMPT`, and every rank has
    what torch reads: `RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `LOCAL_WORLD_SIZE`, `MASTER_ADDR`,
    `MASTER_PORT`.
    """
    if plan.config.trains_itself:
        return {}
    on_cpu = plan.hardware.accelerator is Accelerator.cpu
    return {
        CONFIG_VARIABLE: str(attempt.deepspeed),
        PLAN_VARIABLE: str(attempt.plan),
        "DS_ACCELERATOR": "cpu" if on_cpu else "cuda",
        **_accelerate_variables(plan, attempt),
    }


def _accelerate_variables(plan: RunPlan, attempt: AttemptPaths) -> dict[str, str]:
    """Return what `accelerate launch` sets (accelerate/utils/launch.py), for an `Accelerator()`.

    Without these, accelerate ignores the other ranks on CPUs, and DeepSpeed on GPUs. None are set
    where the script's flag is transformers' own: `TrainingArguments` sets them from the JSON.
    """
    if plan.config.script_config_flag == TRANSFORMERS_FLAG:
        return {}
    if plan.hardware.accelerator is Accelerator.cpu:
        # With DeepSpeed on CPUs, `PartialState` makes each rank a world of its own.
        number_format = precision_of(plan.config.precision).format.value
        precision = number_format if number_format in MIXED_PRECISIONS else "no"
        return {"ACCELERATE_USE_CPU": "true", "ACCELERATE_MIXED_PRECISION": precision}
    sections = ((name, plan.deepspeed.get(name, {})) for name in MIXED_PRECISIONS)
    enabled = (name for name, section in sections if section.get("enabled"))
    return {
        "ACCELERATE_USE_DEEPSPEED": "true",
        "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(attempt.accelerate),
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": str(plan.batch.gradient_accumulation_steps),
        "ACCELERATE_MIXED_PRECISION": next(enabled, "no"),
    }


def user_code_folder(config: RunConfig, run: RunPaths) -> Path | None:
    """Return the folder that the run was launched from, if the run uses code of the user's.

    None if it does not: then any current folder will do.

    Raises:
        TrainctlError: The folder is gone (exit code 4).
    """
    if config.script is None and not any(function_keys(config)):
        return None
    where = Path(str(read_record(run)["folder"]))
    if not where.is_dir():
        raise MachineError(
            f"{where}, which this run was launched from, is not there",
            hint="its script and functions run in that folder; start a new run elsewhere",
        )
    return where


def unforwarded_variable_findings(plan: RunPlan, shell: Mapping[str, str]) -> list[Finding]:
    """Return warnings about variables of this shell that remote ranks may need and do not get."""
    launcher = plan.config.launcher
    taken = {*select_variables(shell, launcher.forward_environment), *launcher.environment}
    return [
        Finding(
            rule="TC193",
            key="launcher.forward_environment",
            message=f"{name} is set here, and ranks on other hosts do not get it",
            hint=f"add {name} to launcher.forward_environment, or set launcher.environment.{name}",
            severity=Severity.warning,
        )
        for name in select_variables(shell, SILENT_VARIABLES)
        if name not in taken
    ]


def public_variables(request: AttemptRequest) -> dict[str, str]:
    """Return the forwarded variables that are not secret, for a job that many people may read."""
    launcher = request.plan.config.launcher
    forwarded = select_variables(request.environment, launcher.forward_environment)
    plain = {
        name: value
        for name, value in forwarded.items()
        if is_plain_variable(name, launcher.plain_environment)
    }
    return plain | trusted_folder_variable()


def redact_references(request: AttemptRequest) -> AttemptRequest:
    """Return the request for a job whose own environment has what the configuration refers to."""
    unknown = dict.fromkeys(referenced_variables(request.plan.config), REDACTED)
    return replace(request, environment={**request.environment, **unknown})


def scheduled_rank_variables(request: AttemptRequest) -> dict[str, str]:
    """Return `rank_variables` for ranks to which a scheduler announces the end by SIGTERM.

    A user's program gets the signal itself.
    """
    config = request.plan.config
    saves = config.trains_itself and config.launcher.stop_grace_seconds > 0
    return rank_variables(request) | ({SIGTERM_SAVES_VARIABLE: "1"} if saves else {})


def rank_variables(
    request: AttemptRequest, network: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return the variables set for agent and ranks; later sources override, the user's own last.

    Args:
        network: The launcher's variables about the interfaces to use.

    Raises:
        TrainctlError: `launcher.environment` refers to a variable that is not set (exit code 4).
    """
    plan, shell, launcher = request.plan, request.environment, request.plan.config.launcher
    is_deterministic = plan.config.training.deterministic and plan.config.trains_itself
    variables = {
        "OMP_NUM_THREADS": str(request.threads),
        # A killed rank's last output must be in its log, and a crash must leave a stack.
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
        **trusted_folder_variable(),
        **program_variables(plan, request.attempt),
        **(settings.DETERMINISTIC_VARIABLES if is_deterministic else {}),
        **(network or {}),
    }
    variables |= select_variables(shell, launcher.forward_environment)
    if launcher.omp_num_threads is not None:
        variables["OMP_NUM_THREADS"] = str(launcher.omp_num_threads)
    # For references in a program's command line, which are resolved where it is started.
    variables |= {name: shell[name] for name in referenced_variables(plan.config) if name in shell}
    return variables | resolve_variables(launcher.environment, shell)
