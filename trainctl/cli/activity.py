"""What a run is at between its records: starting, tokenizing, compiling, evaluating, saving."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from trainctl.runs.heartbeats import Beat, Phase, read_beat
from trainctl.runs.layout import RunPaths

_AFTER_RECORD = {
    "waiting": "waiting for nodes",
    "start": "first step",
    "end": "ending",
    "restart": "starting again",
}
"""What follows a record, until the next or a sign of life says more."""


class Activity:
    """Follows a run by its records and by what its first rank says that it does.

    Args:
        run: The run, whose signs of life are looked at where they can be read; None knows the
            records only.
        attempt: The running one.
    """

    def __init__(self, run: RunPaths | None, attempt: int) -> None:
        self._run, self._attempt = run, attempt
        self._after = "starting"
        self._shown, self._since = "", time.monotonic()
        self._is_compiling = False

    def see(self, event: Mapping[str, Any]) -> None:
        """Take notice of a record."""
        self._attempt = int(event.get("attempt", self._attempt))
        if event["event"] == "build":
            self._is_compiling = event["seconds"] is None
            self._after = f"compiling {event['operator']}" if self._is_compiling else "starting"
        elif event["event"] == "step":
            self._after, self._is_compiling = "", False
        else:
            self._after = _AFTER_RECORD.get(event["event"], self._after)

    def now(self) -> tuple[str, float]:
        """What goes on besides steps, and for how many seconds; an empty text between them."""
        text = self._text()
        if text != self._shown:
            self._shown, self._since = text, time.monotonic()
        return text, time.monotonic() - self._since

    def _text(self) -> str:
        beat = self._beat()
        if beat is None or self._is_compiling:
            return self._after
        if beat.phase in (Phase.evaluate, Phase.save):
            return {Phase.evaluate: "evaluating", Phase.save: "saving a checkpoint"}[beat.phase]
        if beat.phase is Phase.end:
            return beat.doing or "ending"
        if beat.phase is Phase.start and self._after in ("starting", "starting again"):
            return beat.doing or "loading torch and DeepSpeed"
        return self._after

    def _beat(self) -> Beat | None:
        """The newest sign of life of the attempt's preparation or its first rank."""
        if self._run is None:
            return None
        attempt = self._run.attempt(self._attempt)
        return read_beat(attempt.heartbeat(0)) or read_beat(attempt.preparation)
