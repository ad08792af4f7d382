"""Events of a run besides its steps: each is a mark on the curves and a line of the table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from trainctl.runs.event_descriptions import (
    describe_callback_end,
    describe_divergence,
    describe_failed_reward,
    describe_mirror_problem,
    describe_recompilation,
    describe_straggler,
)
from trainctl.runs.failures import describe_failure
from trainctl.runs.records import Event, number

MAX_MARKS = {"checkpoint": 250, "weights": 100, "reward_failed": 100}
MAX_OTHER_MARKS = 500
"""Most marks of a kind that are shown, the newest ones; the others are counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """One event."""

    kind: str
    """Kind of its record: failure, restart, intervention, checkpoint, ..."""
    step: int
    """Step at which it is drawn: its own, or the last one before it."""
    attempt: int
    time: float
    """Unix seconds."""
    text: str
    """Sentence about the event."""
    cause: str = ""
    """Cause in a few words; may be empty."""

    def to_json(self) -> dict[str, Any]:
        """Return the mark as plain JSON, for the page and for `--json`."""
        return asdict(self)


def mark_of(event: Event, last_step: int) -> Mark | None:
    """Return the mark of a record; None if its kind has no marks, or it is malformed.

    Args:
        last_step: Step of the last `step` record before it; 0 before the first.
    """
    tell = _MARK_MAKERS.get(event["event"])
    if tell is None:
        return None
    try:
        text, cause = tell(event)
        step, time = int(event.get("step", last_step)), float(event.get("time", 0.0))
    except (KeyError, TypeError, ValueError, AttributeError):
        return None  # a plan of another version, or edited: show the other marks
    if not text:
        return None
    kind = event["event"]
    return Mark(
        kind=kind, step=step, attempt=event["attempt"], time=time, text=text, cause=str(cause or "")
    )


def newest_marks(marks: list[Mark]) -> tuple[list[Mark], dict[str, int]]:
    """Return the newest marks of each kind, in order, and the number left out of each kind."""
    room: dict[str, int] = {}
    left_out: dict[str, int] = {}
    kept = []
    for mark in reversed(marks):
        left = room.setdefault(mark.kind, MAX_MARKS.get(mark.kind, MAX_OTHER_MARKS))
        if left:
            room[mark.kind] = left - 1
            kept.append(mark)
        else:
            left_out[mark.kind] = left_out.get(mark.kind, 0) + 1
    return kept[::-1], left_out


def _launch(event: Event) -> tuple[str, str]:
    return f"attempt {event['attempt']} started: {event['ranks']} ranks from {event['host']}", ""


def _start(event: Event) -> tuple[str, str]:
    if not event.get("resumed_from"):
        return f"training began with {event['world_size']} ranks", ""
    return f"went on from {event['resumed_from']} with {event['world_size']} ranks", ""


def _restart(event: Event) -> tuple[str, str]:
    text = f"restart {event['number']} of {event['of']} from step {event['step']:,}"
    return text, event.get("cause", "")


def _failure(event: Event) -> tuple[str, str]:
    return describe_failure(event), event.get("cause", "")


def _intervention(event: Event) -> tuple[str, str]:
    quantity = "loss" if event["kind"].startswith("loss") else "gradient norm"
    limit = "" if event.get("limit") is None else f" above {number(event['limit']):.4g}"
    first, end = event["samples"]
    back = f" to step {event['to_step']:,}" if "to_step" in event else ""
    where = f" on rank {', '.join(map(str, event['ranks']))}" if event.get("ranks") else ""
    text = f"{event['policy'].replace('_', ' ')}{back}: samples {first:,} to {end:,} passed over"
    if event["policy"] in ("warn", "stop"):
        text = f"{event['policy']}: samples {first:,} to {end:,}"
    return text, f"{quantity} {number(event['value']):.4g}{limit}{where}"


def _plateau(event: Event) -> tuple[str, str]:
    text = f"the learning rate drops to {event['factor']:.3g} of its peak"
    since = event["evaluations_since"]
    return text, f"{since} evaluations without one below {number(event['best']):.4f}"


def _straggler(event: Event) -> tuple[str, str]:
    return describe_straggler(event), f"slow {event['part']}" if event["slow"] else ""


def _divergence(event: Event) -> tuple[str, str]:
    return describe_divergence(event), "the loss diverges" if event["diverged"] else ""


def _saved(event: Event) -> tuple[str, str]:
    took = f" in {event['seconds']:.3g} s" if event.get("seconds") is not None else ""
    stall = event.get("stall_seconds")
    held = f", training waited {stall:.3g} s" if stall is not None else ""
    return f"saved {event['path']}{took}{held}", ""


def _end(event: Event) -> tuple[str, str]:
    reasons = {
        "complete": "all steps are done",
        "stop_after_steps": "training.stop_after_steps",
        "stop_requested": "asked to stop",
        "no_improvement": "the held-out loss no longer fell",
        "callback": describe_callback_end(event),
    }
    return f"training ended at step {event['step']:,}", reasons.get(event["reason"], "")


def _stopping(event: Event) -> tuple[str, str]:
    return "saves and ends", event["reason"]


def _preempted(event: Event) -> tuple[str, str]:
    return f"node {event['node']} ({event['host']}) is to be taken away", "preempted"


def _logger(event: Event) -> tuple[str, str]:
    if not event["problem"]:
        return f"logger {event['name']} sends again", ""
    return f"logger {event['name']} cannot send", event["problem"]


def _recompilation(event: Event) -> tuple[str, str]:
    return describe_recompilation(event), event["reason"] or ""


def _reward_failed(event: Event) -> tuple[str, str]:
    return describe_failed_reward(event), event["reason"]


def _mirror(event: Event) -> tuple[str, str]:
    return describe_mirror_problem(event), event["problem"]


_MARK_MAKERS: Mapping[str, Any] = {
    "launch": _launch,
    "start": _start,
    "restart": _restart,
    "failure": _failure,
    "intervention": _intervention,
    "plateau": _plateau,
    "straggler": _straggler,
    "divergence": _divergence,
    "recompilation": _recompilation,
    "checkpoint": _saved,
    "weights": _saved,
    "end": _end,
    "stopping": _stopping,
    "preempted": _preempted,
    "logger": _logger,
    "mirror": _mirror,
    "reward_failed": _reward_failed,
}
