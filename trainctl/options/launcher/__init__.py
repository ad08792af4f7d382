"""What a launcher says of itself: what it can start, what it hands over, which functions do it.

The functions are named as `module:function` and loaded when they are called: whoever only checks a
configuration imports nothing that starts processes. Those of the shipped launchers are in
`trainctl.launch`, whose `order`, `rendered` and `outcome` have the types that they speak in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from trainctl.config.registry import Spec, load
from trainctl.config.schema import LauncherConfig, RunConfig

FOR_SEVERAL_NODES = "slurm"
"""What is proposed for more nodes than the configured launcher can start."""

Keys = TypeVar("Keys", bound=LauncherConfig)


class KeyProblem(NamedTuple):
    """What is wrong with a key of a launcher's: the key, a sentence, the nearest right value."""

    key: str
    message: str
    hint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Launcher(Spec):
    """What one kind of launcher can do.

    `build` starts a `Launch` and sees it to its end, or hands it to a scheduler: an `Outcome`.
    """

    render: str
    """Gives what would be started for a `Start`, a `Rendered`; starts nothing."""
    check: str = ""
    """Says, of a plan, a folder and a checkpoint's bytes, what is wrong with the machines, before a
    run is made in or below the folder. Empty where nothing can be asked."""
    check_config: str = ""
    """Says, of a configuration and its hardware, what the configuration alone tells of it."""
    several_nodes: bool = True
    """Whether it can start more nodes than one."""
    asks_hosts: bool = False
    """Whether `check` asks other machines, which takes a while."""
    resolves_here: bool = True
    """Whether `${oc.env:NAME}` stands for a variable of the machine of the start."""
    queue: str = ""
    """The scheduler that a start hands the run to, as it is called; empty for none."""
    job_variable: str = ""
    """A variable of its jobs. Where that is set, a start hands nothing over."""
    tool: str = ""
    """The scheduler's program, without which nothing can be handed over."""
    tool_in_job: str = ""
    """The one without which nothing can be started inside a job."""
    cancel: str = ""
    """Takes a `Job` out of its queue, or ends it."""
    after_job: str = ""
    """Called with run, plan and exit code after a launch inside a job."""
    submit_sweep: str = ""
    """Takes a sweep's folder, a plan, its runs with their attempts and how many run at a time:
    submits all as one array, whose tasks ask for the same; its job's id."""
    sweep_hint: str = ""
    """What is done in place of a sweep, where runs are handed over one by one only."""
    reach: Callable[[Any, int], Iterable[KeyProblem]] | None = None
    """Says, of the section and a number of nodes, what keeps it from starting so many."""
    bad_names: Callable[[Any], Iterable[KeyProblem]] | None = None
    """Gives the names in the section that are none."""

    def is_in_job(self, environment: Mapping[str, str]) -> bool:
        """Whether a process with these variables is in a job of its scheduler."""
        return bool(self.job_variable) and self.job_variable in environment

    def hands_over(self, environment: Mapping[str, str]) -> bool:
        """Whether a start from there only hands the run to a scheduler, and returns."""
        return bool(self.queue) and not self.is_in_job(environment)


def spec_of(section: LauncherConfig) -> Launcher:
    """Of the kind that a configuration has.

    Raises:
        TrainctlError: A package that brings it is not installed here.
    """
    spec = load("launcher", section.kind)
    assert isinstance(spec, Launcher)
    return spec


def section_of(config: RunConfig, keys: type[Keys]) -> Keys:
    """Return the launcher's section with the keys of its kind; only that kind's own code asks."""
    section = config.launcher
    assert isinstance(section, keys)
    return section


def launcher_for(section: LauncherConfig, nodes: int) -> dict[str, object]:
    """Return the key that names a launcher for so many nodes; nothing where the configured one will
    do."""
    if nodes == 1 or spec_of(section).several_nodes:
        return {}
    return {"launcher.kind": FOR_SEVERAL_NODES}
