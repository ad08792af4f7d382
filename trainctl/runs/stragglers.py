"""Ranks that delayed the others, from the records of a run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from trainctl.runs.records import Event, number


def still_slow(events: Iterable[Event], attempt: int) -> list[Event]:
    """Return the last `straggler` record of each rank of an attempt that is still slow, by rank."""
    last: dict[int, Event] = {}
    for event in events:
        if event["event"] == "straggler" and event["attempt"] == attempt:
            last[event["rank"]] = event
    return [event for _, event in sorted(last.items()) if event["slow"]]


def account(event: Mapping[str, Any]) -> str:
    """Describe a `straggler` record in a sentence."""
    who = f"rank {event['rank']} (node {event['node']}, {event['host']})"
    if not event["slow"]:
        return f"{who} has caught up by step {event['step']:,}"
    return (
        f"{who} takes {number(event['factor']):.2f} times as long as its peers up to step "
        f"{event['step']:,}, and all wait for it; most of it in {event['part']}: "
        f"{event['seconds']:.3g} s a step instead of {event['usual_seconds']:.3g} s"
    )
