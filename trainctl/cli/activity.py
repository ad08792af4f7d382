"""Activity of a run between its records: starting, tokenizing, compiling, evaluating, saving."""

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
"""Activity that follows a record, until the next record or heartbeat."""


class Activity:
    """Current activity of a run, from its records and the heartbeats of its first rank.

    Without a run (None), heartbeats are not read and only records count.
    """

    def __init__(self, run: RunPaths | None, attempt: int) -> None:
        self._run, self._attempt = run, attempt
        self._after = "starting"
        self._shown, self._since = "", time.monotonic()
        self._is_compiling = False

    def see(self, event: Mapping[str, Any]) -> None:
        """Update the activity by a record."""
        self._attempt = int(event.get("attempt", self._attempt))
        if event["event"] == "build":
            self._is_compiling = event["seconds"] is None
            self._after = f"compiling {event['operator']}" if self._is_compiling else "starting"
        elif event["event"] == "step":
            self._after, self._is_compiling = "", False
        else:
            self._after = _AFTER_RECORD.get(event["event"], self._after)

    def now(self) -> tuple[str, float]:
        """Return the activity other than steps, empty during steps, and its seconds so far."""
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
        """Return the heartbeat of the first rank or, before there is one, of the preparation."""
        if self._run is None:
            return None
        attempt = self._run.attempt(self._attempt)
        return read_beat(attempt.heartbeat(0)) or read_beat(attempt.preparation)
