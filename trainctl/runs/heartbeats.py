"""Signs of life: each rank writes what it is doing, and its node's agent looks at when.

Times are of the machine's monotonic clock, which all of its processes share and nobody sets. A
file is read only on the machine that its rank runs on.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from trainctl.config.reading import read_json
from trainctl.runs.access import ensure_folder

_LINE_BYTES = 128
"""A beat overwrites the one before it, so all have the same length."""


_DOING = 40
"""Characters of `doing`, which leave room for the rest of the line."""


class Phase(StrEnum):
    """What a rank is doing."""

    start = "start"
    step = "step"
    evaluate = "evaluate"
    save = "save"
    end = "end"

    @property
    def is_slow(self) -> bool:
        """Whether it may be silent for long: its length grows with the model, not with a step."""
        return self in (Phase.start, Phase.save, Phase.end)


@dataclass(frozen=True, slots=True)
class Beat:
    """A sign of life."""

    monotonic: float
    """Seconds of this machine's monotonic clock."""
    phase: Phase
    """What the rank turned to."""
    step: int
    """Optimizer steps that it had done."""
    doing: str = ""
    """What it does, in words for whoever watches; empty where the phase says it all."""


class Heartbeat:
    """Writes a rank's beats: one `pwrite` of a line, with no sync, cheap enough for every step.

    Args:
        path: The rank's file; made anew, in a folder that is made if missing.
    """

    def __init__(self, path: Path) -> None:
        ensure_folder(path.parent)
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        self._step = 0
        self.beat(Phase.start)

    def beat(self, phase: Phase, step: int | None = None, doing: str = "") -> None:
        """Say what this rank turns to now.

        A disk that is full costs the beat and no more: the file has its blocks after the first.

        Args:
            step: Optimizer steps done; None leaves it as it was.
            doing: In a few plain words.
        """
        self._step = self._step if step is None else step
        record = {"monotonic": time.monotonic(), "phase": phase.value, "step": self._step}
        record |= {"doing": doing[:_DOING]} if doing else {}
        line = json.dumps(record).ljust(_LINE_BYTES - 1) + "\n"
        try:
            os.pwrite(self._descriptor, line.encode(), 0)
        except OSError as error:
            print(f"cannot write a heartbeat: {error}", flush=True)


def read_beat(path: Path) -> Beat | None:
    """Return the last beat; None before the first, or in the middle of one."""
    try:
        record = read_json(path)
        doing = str(record["doing"]) if "doing" in record else ""
        return Beat(float(record["monotonic"]), Phase(record["phase"]), int(record["step"]), doing)
    except (OSError, ValueError, TypeError, KeyError):
        return None
