"""Specification of a metrics logger, and what it receives: a run's metrics, step by step.

A logger runs in a process of its own (`trainctl.monitor.loggers`), apart from the ranks. However
slow, dead or full its target is, no step waits for it. The process may be killed at any instant.
The next process continues from the last `commit`, so points after that commit come again: if a
logger already has a step, the newer point replaces it.
"""

from __future__ import annotations

import html
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from trainctl.config.extras import install_command
from trainctl.config.registry import Spec, load_spec
from trainctl.config.schema import RunConfig
from trainctl.errors import ExitCode, Finding
from trainctl.models.local_path import local_path


@dataclass
class LoggerConfig:
    """Keys that all loggers share: none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """The metrics of a step, or of an evaluation after it."""

    number: int
    """Number among all points of the run, from 1. It only grows, while the step goes back at a
    rewind or a resume.
    """
    kind: str
    step: int
    """Optimizer step, from 1."""
    time: float
    """Time of recording, in Unix seconds."""
    values: Mapping[str, float]
    """Metrics by name, such as `train/loss`; may include NaN and infinities."""


Table = Sequence[Mapping[str, str]]
"""Rows of texts by column; all rows have the same columns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowedRun:
    """The run whose metrics are logged."""

    folder: Path
    """`RUN/NAME`, which exists, for a logger that writes files; new files in it get the modes of a
    run's files.
    """
    id: str
    """Id of the run: the same for all its attempts, different for each run."""
    name: str
    """Name of the run directory."""
    keys: Any
    """The logger's own keys, `logging.NAME`; None if it has none."""
    config: RunConfig
    """Configuration of the newest attempt; secrets are references in it."""
    about: Mapping[str, Any] = field(default_factory=dict)
    """Facts about the run, as plain JSON without secrets: `config` (the configuration), `plan`
    (mesh, batch and steps), `memory` (the prediction), `run` (its origin).
    """
    curve: Callable[[int], Iterator[Point]] = lambda points: iter(())
    """Function that returns the points of the run as they stood after a number of points
    (`Point.number`), in order, each step once. For a logger that has to write them again.
    """
    tables: Callable[[Point], Mapping[str, Table]] = lambda point: {}
    """Function that returns the texts that belong to a point, as tables by name; few points have
    any.
    """


def markdown(table: Table) -> str:
    """Return a table of texts in Markdown; line breaks within a cell are `<br>`."""
    cells = [[_cell(text) for text in row.values()] for row in table]
    head = [*table[0]] if table else []
    rows = [head, ["---"] * len(head), *cells]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _cell(text: str) -> str:
    escaped = html.escape(text, quote=False).replace("|", "\\|")
    return "<br>".join(escaped.splitlines())


class Sink(Protocol):
    """Target of the metrics, made by `build`. If a method raises, the sink is built again."""

    def write(self, points: Sequence[Point]) -> None:
        """Write points; the steps of each kind ascend from the last one written."""

    def go_back(self, step: int) -> None:
        """Expect points from this step on again; they replace the ones already written.

        The run went back to a checkpoint, by a rewind or a resume.
        """

    def commit(self) -> Mapping[str, Any]:
        """Make everything written durable: it does not come again.

        Returns:
            State that the next process needs to continue, as plain JSON: the size of a file, say.
        """

    def close(self) -> None:
        """Close files and connections; called after errors too."""


@runtime_checkable
class SinkWithEnd(Protocol):
    """A sink that wants to know when a run has ended."""

    def end(self, state: str) -> None:
        """Finish, because all points are written and committed and no more come for now.

        It is called again if more points have come since.

        Args:
            state: State of the newest attempt: `finished`, `failed`, `stopped`, or `running` if its
                end is not known.
        """


@dataclass(frozen=True, kw_only=True)
class Logger(Spec):
    """Specification of one metrics logger.

    `build` is called in the logger's process with the run (`FollowedRun`) and the state that the
    last `commit` returned. The state is None before the first commit: the logger then starts from
    nothing, whatever exists. `build` returns a `Sink`.
    """

    keys: type = LoggerConfig
    """Dataclass of the logger's own keys."""


def python_of(name: str, config: RunConfig) -> str:
    """Return the Python that runs a logger's process.

    This is the current one if it has the logger's modules, else `logging.python` if that is set.

    Raises:
        TrainctlError: There is no such logger.
    """
    own = config.logging.python
    if not own or not _missing_modules(load_spec("logger", name)):
        return sys.executable
    return str(local_path(own))


def missing_modules_finding(spec: Logger, python: str = sys.executable) -> Finding | None:
    """Return a finding for modules that the logger needs and that are missing; import none."""
    lacking = (
        _missing_modules(spec) if python == sys.executable else _missing_modules_in(python, spec)
    )
    if not lacking:
        return None
    if python != sys.executable:
        return Finding(
            rule="TC124",
            key="logging.python",
            message=f"the logger {spec.name} needs {', '.join(lacking)}, which {python} has not",
            hint=f"{python} -m pip install {' '.join(lacking)}, or leave {spec.name} out of "
            "logging.to",
            exit_code=ExitCode.environment,
        )
    return Finding(
        rule="TC124",
        key="logging.to",
        message=f"the logger {spec.name} needs {', '.join(lacking)}, which is not installed here",
        hint=f"{install_command(*lacking)}, or leave it out of logging.to; or name another "
        "environment's Python in logging.python",
        exit_code=ExitCode.environment,
    )


def _missing_modules(spec: Logger) -> list[str]:
    found = {module: find_spec(module) for module in spec.modules}
    # A plain folder in the working directory, such as W&B's own `wandb`, has no origin.
    return [module for module, each in found.items() if each is None or each.origin is None]


_LOOK = """
import importlib.util, sys
found = {name: importlib.util.find_spec(name) for name in sys.argv[1:]}
print(*[name for name, each in found.items() if each is None or each.origin is None])
sys.exit(sys.version_info < (3, 11))
"""
_LOOK_SECONDS = 30


def _missing_modules_in(python: str, spec: Logger) -> list[str]:
    """Return the modules that another Python lacks, including those that trainctl itself imports
    there.

    If that Python cannot be used at all, the list describes what is needed instead.
    """
    command = [python, "-P", "-c", _LOOK, "yaml", *spec.modules]
    try:
        look = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_LOOK_SECONDS, text=True
        )
    except (OSError, subprocess.TimeoutExpired):
        return ["a Python that can be started"]
    return ["Python 3.11 or newer"] if look.returncode else look.stdout.split()
