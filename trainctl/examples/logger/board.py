"""Losses of the run as it stands, in a text file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainctl.config.schema.option import option
from trainctl.options.logger import FollowedRun, Logger, LoggerConfig, Point


@dataclass
class BoardKeys(LoggerConfig):
    """Keys of the logger."""

    digits: int = option(3, "Digits of a loss on the board.", minimum=1, maximum=17)


class BoardSink:
    """Board of a run; its losses are the state."""

    def __init__(self, run: FollowedRun, state: Mapping[str, Any] | None) -> None:
        self._path = run.folder / "board.txt"
        self._digits = run.keys.digits
        self._losses: dict[str, float] = dict(state or {})

    def write(self, points: Sequence[Point]) -> None:
        for point in points:
            if "train/loss" in point.values:
                self._losses[str(point.step)] = point.values["train/loss"]

    def go_back(self, step: int) -> None:
        self._losses = {at: loss for at, loss in self._losses.items() if int(at) < step}

    def commit(self) -> Mapping[str, Any]:
        lines = [f"{at} {loss:.{self._digits}f}\n" for at, loss in self._losses.items()]
        self._path.write_text("".join(lines))
        return self._losses

    def close(self) -> None:
        pass


SPEC = Logger(name="board", keys=BoardKeys, build=BoardSink)
