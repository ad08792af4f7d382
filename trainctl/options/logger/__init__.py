"""What a metrics logger says of itself, and what it is given: a run's metrics, step by step.

It runs in a process of its own (`trainctl.monitor.loggers`), away from ranks: however slow, dead or
full what it writes to is, no step waits for it. That process may be killed at any instant. The next
one goes on from the last `commit`, so points that came after it come again: a logger takes a step
that it has already as the one that counts.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from trainctl.config.registry import Spec, load
from trainctl.config.schema import RunConfig
from trainctl.errors import ExitCode, Finding


@dataclass
class LoggerConfig:
    """The keys that all loggers share: none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """The metrics of a step, or of an evaluation after it."""

    number: int
    """Its place among all points of the run, from 1. It only grows, where the step falls back with
    a rewind or a resume."""
    kind: str
    step: int
    """The optimizer step, from 1."""
    time: float
    """Unix seconds at which it was recorded."""
    values: Mapping[str, float]
    """The metrics by name, such as `train/loss`; NaN and infinities among them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Followed:
    """The run whose metrics are sent."""

    folder: Path
    """`RUN/NAME`, which is there, for a logger that writes files; whatever it makes in it has the
    modes of a run's files."""
    id: str
    """The run's id: the same for all its attempts, another one for each run."""
    name: str
    """The run directory's name."""
    keys: Any
    """The logger's own keys, `logging.NAME`; None if it has none."""
    config: RunConfig
    """The configuration of its newest attempt; secrets are references in it."""
    about: Mapping[str, Any] = field(default_factory=dict)
    """What else is known of it, as plain JSON: `config`, that configuration, `plan`, its mesh,
    batch and steps, `memory`, what is predicted, `run`, where it comes from. Without secrets."""
    curve: Callable[[int], Iterator[Point]] = lambda points: iter(())
    """The points of the run as it stood after so many points (`Point.number`), in order, each step
    once: for what has to be written anew."""


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


class Closing(Protocol):
    """A sink that is told more than it has to be."""

    def end(self, state: str) -> None:
        """All that there is was written and committed, and no more comes for now; called again
        when more has come since.

        Args:
            state: How the newest attempt stands: `finished`, `failed`, `stopped`, or that it is
                not known to have ended: `running`.
        """


@dataclass(frozen=True, kw_only=True)
class Logger(Spec):
    """What one metrics logger needs.

    `build` is called in the logger's process with the run (`Followed`) and what the last `commit`
    gave, None before the first: it then begins with nothing, whatever is there. It gives a `Sink`.
    """

    keys: type = LoggerConfig
    """The dataclass of its own keys."""
    modules: tuple[str, ...] = ()
    """What it imports beside Python's own: looked for before a launch."""


def python_of(name: str, config: RunConfig) -> str:
    """Return the Python that a logger's process runs in: this one where it has what the logger
    imports, else that of `logging.python`, if there is one.

    Raises:
        TrainctlError: There is no such logger.
    """
    own = config.logging.python
    if not own or not _lacking(load("logger", name)):
        return sys.executable
    return str(Path(own).expanduser())


def missing(spec: Logger, python: str = sys.executable) -> Finding | None:
    """What it imports and is not installed; looks for packages and imports none.

    Args:
        python: The Python that it would run in.
    """
    lacking = _lacking(spec) if python == sys.executable else _lacking_in(python, spec)
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
    what = f"trainctl[{spec.extra}]" if spec.extra else " ".join(lacking)
    return Finding(
        rule="TC124",
        key="logging.to",
        message=f"the logger {spec.name} needs {', '.join(lacking)}, which is not installed here",
        hint=f"pip install '{what}', or leave it out of logging.to; or name another environment's "
        "Python in logging.python",
        exit_code=ExitCode.environment,
    )


def _lacking(spec: Logger) -> list[str]:
    found = {module: find_spec(module) for module in spec.modules}
    # A folder beside the user, such as the `wandb` that it makes itself, has no origin.
    return [module for module, each in found.items() if each is None or each.origin is None]


_LOOK = """
import importlib.util, sys
found = {name: importlib.util.find_spec(name) for name in sys.argv[1:]}
print(*[name for name, each in found.items() if each is None or each.origin is None])
sys.exit(sys.version_info < (3, 11))
"""
_LOOK_SECONDS = 30


def _lacking_in(python: str, spec: Logger) -> list[str]:
    """Return the same of another Python, which trainctl's own code has to run in too."""
    command = [python, "-P", "-c", _LOOK, "yaml", *spec.modules]
    try:
        look = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_LOOK_SECONDS, text=True
        )
    except (OSError, subprocess.TimeoutExpired):
        return ["a Python that can be started"]
    return ["Python 3.11 or newer"] if look.returncode else look.stdout.split()
