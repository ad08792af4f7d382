"""Heartbeats: each rank writes its phase and the time, and its node's agent reads them.

Times are of the machine's monotonic clock, which all of its processes share and nobody can set. A
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
"""Length of every beat, since a beat overwrites the one before it."""


_DOING = 40
"""Longest `doing` in characters: leaves room for the rest of the line."""


class Phase(StrEnum):
    """Phase of a rank's work."""

    start = "start"
    step = "step"
    evaluate = "evaluate"
    save = "save"
    end = "end"

    @property
    def is_slow(self) -> bool:
        """Whether a rank may be silent for long: it takes longer with the model's size."""
        return self in (Phase.start, Phase.save, Phase.end)


@dataclass(frozen=True, slots=True)
class Beat:
    """One heartbeat."""

    monotonic: float
    """Seconds of this machine's monotonic clock."""
    phase: Phase
    """Phase that the rank has entered."""
    step: int
    """Optimizer steps done."""
    doing: str = ""
    """Activity in plain words; empty where the phase is enough."""


class Heartbeat:
    """Writer of a rank's beats: one `pwrite` of a line, no sync, cheap enough for every step.

    Args:
        path: The rank's file; truncated, or made with its folder.
    """

    def __init__(self, path: Path) -> None:
        ensure_folder(path.parent)
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        self._step = 0
        self.beat(Phase.start)

    def beat(self, phase: Phase, step: int | None = None, doing: str = "") -> None:
        """Write a beat for the phase that this rank enters.

        A full disk loses at most this beat: the file has its blocks after the first one.

        Args:
            step: Optimizer steps done; None keeps the last number.
            doing: Activity in a few plain words.
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
    """Return the last beat; None before the first, or while one is being written."""
    try:
        record = read_json(path)
        doing = str(record["doing"]) if "doing" in record else ""
        return Beat(float(record["monotonic"]), Phase(record["phase"]), int(record["step"]), doing)
    except (OSError, ValueError, TypeError, KeyError):
        return None
