"""What a metrics logger says of itself, and what it is given: a run's metrics, step by step.

It runs in a process of its own (`trainctl.loggers`), away from the ranks: however slow, dead or
full what it writes to is, no step waits for it. That process may be killed at any instant. The next
one goes on from the last `commit`, so points that came after it come again: a logger takes a step
that it has already as the one that counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from trainctl.config.registry import Spec
from trainctl.config.schema import RunConfig
from trainctl.errors import ExitCode, Finding


@dataclass
class LoggerConfig:
    """The keys that all loggers share: none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """The metrics of a step, or of an evaluation after it.

    Attributes:
        number: Its place among all points of the run, from 1. It only grows, where the step falls
            back with a rewind or a resume.
        kind: `train` or `evaluation`.
        step: The optimizer step, from 1.
        time: Unix seconds at which it was recorded.
        values: The metrics by name, such as `train/loss`; NaN and infinities among them.
    """

    number: int
    kind: str
    step: int
    time: float
    values: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Followed:
    """The run whose metrics are sent.

    Attributes:
        folder: `RUN/NAME`, which is there, for a logger that writes files; whatever it makes in it
            has the modes of a run's files.
        id: The run's id: the same for all its attempts, another one for each run.
        name: The run directory's name.
        keys: The logger's own keys, `logging.NAME`; None if it has none.
        config: The configuration of its newest attempt; secrets are references in it.
    """

    folder: Path
    id: str
    name: str
    keys: Any
    config: RunConfig


class Sink(Protocol):
    """Where the metrics go: what `build` gives. Any method may raise; it is then built anew."""

    def write(self, points: Sequence[Point]) -> None:
        """Take points; the steps of each kind ascend from the last that it has."""

    def go_back(self, step: int) -> None:
        """Points from this step on come again, and count in place of those that were written: the
        run went back to a checkpoint, by a rewind or a resume."""

    def commit(self) -> Mapping[str, Any]:
        """Make what was written lasting: it does not come again.

        Returns:
            What the next one needs to go on, as plain JSON: the size of a file, say.
        """

    def close(self) -> None:
        """Let go of files and connections; called after errors too."""


@dataclass(frozen=True, kw_only=True)
class Logger(Spec):
    """What one metrics logger needs.

    `build` is called in the logger's process with the run (`Followed`) and what the last `commit`
    gave, None before the first: it then begins with nothing, whatever is there. It gives a `Sink`.

    Attributes:
        keys: The dataclass of its own keys.
        modules: What it imports beside Python's own: looked for before a launch.
    """

    keys: type = LoggerConfig
    modules: tuple[str, ...] = ()


def missing(spec: Logger) -> Finding | None:
    """What it imports and is not installed here; looks for packages and imports none."""
    lacking = [module for module in spec.modules if find_spec(module) is None]
    if not lacking:
        return None
    what = f"trainctl[{spec.extra}]" if spec.extra else " ".join(lacking)
    return Finding(
        rule="TC124",
        key="logging.to",
        message=f"the logger {spec.name} needs {', '.join(lacking)}, which is not installed here",
        hint=f"pip install '{what}', or leave it out of logging.to",
        exit_code=ExitCode.environment,
    )
