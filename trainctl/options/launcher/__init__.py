"""Specification of a launcher: what it can start, what it submits, and the functions that do it.

The functions are named as `module:function` and imported when they are called, so checking a
configuration imports nothing that starts processes. Functions of the shipped launchers are in
`trainctl.launchers`, whose module `interface` defines their argument and result types.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from trainctl.config.registry import Spec, spec_lookup
from trainctl.config.schema import LauncherConfig, RunConfig

FOR_SEVERAL_NODES = "slurm"
"""Launcher proposed for more nodes than the configured one can start."""

Keys = TypeVar("Keys", bound=LauncherConfig)


class KeyProblem(NamedTuple):
    """A problem with a key of a launcher: the key, a sentence, the nearest correct value."""

    key: str
    message: str
    hint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Launcher(Spec):
    """Specification of one launcher.

    `build` runs a `LaunchRequest` to its end, or submits it to a scheduler; it returns an
    `Outcome`.
    """

    render: str | Callable[..., Any]
    """Function that returns the commands and files of an `AttemptRequest` as a `RenderedLaunch`; it
    starts nothing.
    """
    check: str = ""
    """Function that checks the machines for a plan, a folder and a checkpoint's bytes, before a run
    is made in or below the folder. Empty if there is nothing to check.
    """
    check_config: str | Callable[..., Any] = ""
    """Function that checks a configuration and its hardware, without asking a machine."""
    several_nodes: bool = True
    """Whether it can start more than one node."""
    asks_hosts: bool = False
    """Whether `check` contacts other machines, which takes a while."""
    resolves_here: bool = True
    """Whether `${oc.env:NAME}` is resolved on the machine that starts the run."""
    queue: str = ""
    """Name of the scheduler to which a start submits the run; empty for none."""
    job_variable: str = ""
    """Environment variable of the scheduler's jobs. Where it is set, a start submits nothing."""
    tool: str = ""
    """Program that submits a run to the scheduler."""
    tool_hint: str = ""
    """Sentence about how to install the program, if it need not be on a login node."""
    tool_in_job: str = ""
    """Program that starts processes inside a job."""
    cancel: str = ""
    """Function that removes a `SchedulerJob` from its queue, or ends it."""
    node_command: str = ""
    """Function that returns the `AttemptCommand` of an `AttemptRequest` where a controller starts
    `trainctl.launchers.pod` on each node.
    """
    job_state: str = ""
    """Function that returns what the scheduler calls the state of a `SchedulerJob`."""
    job_log: str = ""
    """Function that returns the output of a `SchedulerJob` as text, where the scheduler keeps it.
    """
    after_job: str = ""
    """Function called with run, plan and exit code after a launch inside a job."""
    submit_sweep: str = ""
    """Function that submits a sweep as one job array and returns the job's id. Its arguments are
    the sweep's folder, a plan, the runs with their attempts, and the number that run at a time. All
    tasks request the same resources.
    """
    sweep_hint: str = ""
    """Advice for the user if the launcher cannot submit a sweep."""
    reach: Callable[[Any, int], Iterable[KeyProblem]] | None = None
    """Function that yields the problems that keep the section from starting a number of nodes."""
    bad_names: Callable[[Any], Iterable[KeyProblem]] | None = None
    """Function that yields the invalid names in the section."""

    def is_in_job(self, environment: Mapping[str, str]) -> bool:
        """Return True if a process with this environment is in a job of the scheduler."""
        return bool(self.job_variable) and self.job_variable in environment

    def hands_over(self, environment: Mapping[str, str]) -> bool:
        """Return True if a start with this environment only submits the run to a scheduler."""
        return bool(self.queue) and not self.is_in_job(environment)


spec_of = spec_lookup(LauncherConfig, Launcher)
"""Return the specification of the configured launcher."""


def section_of(config: RunConfig, keys: type[Keys]) -> Keys:
    """Return the launcher's section as the given class; only that launcher's own code calls it."""
    section = config.launcher
    assert isinstance(section, keys)
    return section


def launcher_for(section: LauncherConfig, nodes: int) -> dict[str, object]:
    """Return the setting of a launcher for a number of nodes; empty if the configured one can do
    it.
    """
    if nodes == 1 or spec_of(section).several_nodes:
        return {}
    return {"launcher.kind": FOR_SEVERAL_NODES}
