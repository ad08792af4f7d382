"""Environment variables of agents and ranks."""

from __future__ import annotations

from collections.abc import Mapping

from trainctl.config.environment_references import references
from trainctl.config.registry import trusted_folder_variable
from trainctl.config.secrets import resolve_variables
from trainctl.errors import Finding, Severity
from trainctl.launch import program
from trainctl.plan import deterministic
from trainctl.plan.types import RunPlan
from trainctl.runs.layout import AttemptPaths
from trainctl.runs.provenance import select

TELLING = (
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


def not_forwarded(plan: RunPlan, shell: Mapping[str, str]) -> list[Finding]:
    """Return warnings about variables of this shell that remote ranks may need and do not get."""
    launcher = plan.config.launcher
    taken = {*select(shell, launcher.forward_environment), *launcher.environment}
    return [
        Finding(
            rule="TC193",
            key="launcher.forward_environment",
            message=f"{name} is set here, and ranks on other hosts do not get it",
            hint=f"add {name} to launcher.forward_environment, or set launcher.environment.{name}",
            severity=Severity.warning,
        )
        for name in select(shell, TELLING)
        if name not in taken
    ]


def rank_variables(
    plan: RunPlan,
    attempt: AttemptPaths,
    shell: Mapping[str, str],
    *,
    threads: int,
    network: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Return the variables set for agent and ranks; later sources override, the user's own last.

    Args:
        attempt: Attempt whose files a user's program is told of.
        shell: The user's environment, which `launcher.forward_environment` selects from.
        threads: OpenMP threads of a rank, unless the user sets them.
        network: The launcher's variables about the interfaces to use.

    Raises:
        TrainctlError: `launcher.environment` refers to a variable that is not set (exit code 4).
    """
    launcher = plan.config.launcher
    is_deterministic = plan.config.training.deterministic and plan.config.trains_itself
    variables = {
        "OMP_NUM_THREADS": str(threads),
        # A killed rank's last output must be in its log, and a crash must leave a stack.
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
        **trusted_folder_variable(),
        **program.environment(plan, attempt),
        **(deterministic.VARIABLES if is_deterministic else {}),
        **(network or {}),
    }
    variables |= select(shell, launcher.forward_environment)
    if launcher.omp_num_threads is not None:
        variables["OMP_NUM_THREADS"] = str(launcher.omp_num_threads)
    # For references in a program's command line, which are resolved where it is started.
    variables |= {name: shell[name] for name in references(plan.config) if name in shell}
    return variables | resolve_variables(launcher.environment, shell)
