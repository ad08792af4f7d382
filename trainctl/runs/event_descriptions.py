"""Descriptions of records for people: interventions, bad losses and gradients, slow ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from trainctl.runs.records import Event, number

_REFERENCES = {
    "first": "the loss of the first step",
    "vocabulary": "the loss of a model that knows nothing, ln(vocabulary)",
    "best": "the lowest mean of ten steps",
    "start": "the mean of the run's first ten steps",
}


def describe_intervention(event: Mapping[str, Any]) -> str:
    """Describe an `intervention` record, as in
    ``step 7: loss 21.5 above 8.2 on rank 1 (samples 96 to 104): skip_batch``.
    """
    quantity = "loss" if event["kind"].startswith("loss") else "gradient norm"
    limit = "" if event["limit"] is None else f" above {number(event['limit']):.4g}"
    ranks = ", ".join(map(str, event["ranks"]))
    where = f" on rank {ranks}" if ranks else ""
    back = f" to step {event['to_step']}" if "to_step" in event else ""
    if "lr_factor" in event:
        back += f", learning rate x {event['lr_factor']:.3g} from there"
    first, end = event["samples"]
    found = event.get("not_finite")
    why = f"; {describe_not_finite(found)}" if found else ""
    if event.get("document"):
        why += f"; {describe_document(event['document'])}"
    return (
        f"step {event['step']}: {quantity} {number(event['value']):.6g}{limit}{where} "
        f"(samples {first} to {end}): {event['policy']}{back}{why}"
    )


def describe_document(found: Mapping[str, Any]) -> str:
    """Describe the `document` of an `intervention`, which all bad batches in a row share."""
    line = f" line {found['line']}" if found["line"] else ""
    place = f" ({found['file']}{line})" if found["file"] else ""
    return (
        f"all {found['batches']} bad batches in a row have parts of one document, number "
        f"{found['document']} of the training text{place}"
    )


def describe_not_finite(found: Mapping[str, Any]) -> str:
    """Describe the `not_finite` of an `intervention`: the tensors that hold a NaN or infinity."""
    names = ", ".join(found["names"][:3])
    left = found["count"] - min(3, len(found["names"]))
    more = f" and {left} more" if left > 0 else ""
    ranks = ", ".join(map(str, found["ranks"][:8]))
    where = f" on rank {ranks}{', ...' if len(found['ranks']) > 8 else ''}" if ranks else ""
    match found["in"]:
        case "weight":
            return (
                f"not finite is the weight {names}{more}{where}: it was so before this step, by an "
                "earlier update or by what the run began with"
            )
        case "activation":
            return f"the first value that is not finite is the output of {names}{where}"
        case "gradient" if names:
            return (
                f"not finite is the gradient of {names}{more}{where} (the last layers first, where "
                "the backward pass begins)"
            )
    return "weights are finite, and so is all that the modules put out when it is made again"


def describe_divergence(event: Mapping[str, Any]) -> str:
    """Describe a `divergence` record: the losses, the limit, and where to look first."""
    step, limit = f"{event['step']:,}", f"{number(event['limit']):.4g}"
    if not event["diverged"]:
        return f"the loss has come down: the ten steps up to {step} are below {limit}"
    reference = _REFERENCES[event["reference"]]
    return (
        f"the loss diverges: the ten steps up to {step} are all above {limit}, "
        f"{number(event['times']):g} times {reference}, and {number(event['loss']):.4g} in the "
        "mean. Nothing was done about it. Look at the learning rate "
        f"({number(event['learning_rate']):.3g} there), its warmup, the gradient clipping, "
        "and the data of these steps: `trainctl explain divergence`"
    )


def still_diverged(events: Iterable[Event], attempt: int) -> Event | None:
    """Return the last `divergence` record of an attempt; None if its loss has come down since."""
    found = [each for each in events if (each["event"], each["attempt"]) == ("divergence", attempt)]
    return found[-1] if found and found[-1]["diverged"] else None


def still_slow(events: Iterable[Event], attempt: int) -> list[Event]:
    """Return the last `straggler` record of all that is still slow in an attempt, by rank.

    A rank has records for its steps and for its checkpoints; records of all ranks come last.
    """
    last: dict[tuple[float, str], Event] = {}
    for event in events:
        if event["event"] == "straggler" and event["attempt"] == attempt:
            part = event.get("part")
            kind = part if part in _ALL_RANKS else "step"
            last[math.inf if event["rank"] is None else event["rank"], kind] = event
    return [event for _, event in sorted(last.items(), key=lambda item: item[0]) if event["slow"]]


_PARTS = {
    "data": "data (its loader)",
    "forward": "forward",
    "backward": "backward",
    "optimizer": "the optimizer",
}
_ALL_RANKS = {
    "communication": "the collectives of a step take {now} instead of {usual} {by}, and no rank "
    "alone is slow: a link or the network is",
    "checkpoint": "all ranks take {now} for their files of a checkpoint instead of {usual} {by}: "
    "the storage is slow",
}
"""Sentences about all ranks, by the part."""


def describe_straggler(event: Mapping[str, Any]) -> str:
    """Describe a `straggler` record in a sentence."""
    step, part = f"{event['step']:,}", event.get("part")
    if event["rank"] is None and not event["slow"]:
        return f"{part} of all ranks is as fast as before by step {step}"
    who = f"rank {event['rank']} (node {event['node']}, {event['host']})"
    if not event["slow"]:
        return f"{who} has caught up by step {step}"
    now, usual = f"{event['seconds']:.3g} s", f"{event['usual_seconds']:.3g} s"
    if event["rank"] is None:
        return _ALL_RANKS[part or ""].format(now=now, usual=usual, by=f"up to step {step}")
    slower = f"{who} takes {number(event['factor']):.2f} times as long as its peers"
    if part == "checkpoint":
        return (
            f"{slower} for its files of checkpoints up to step {step}: {now} instead of {usual}; "
            "its disk, or its way to the storage, is slow"
        )
    return (
        f"{slower} up to step {step}, and all wait for it; most of it in "
        f"{_PARTS.get(part or '', part)}: {now} a step instead of {usual}"
    )


def describe_recompilation(event: Mapping[str, Any]) -> str:
    """Describe a `recompilation` record in a sentence, without its reason."""
    number_of_ranks, graphs = len(event["ranks"]), event["graphs"]
    who = f"rank {event['ranks'][0]}" if number_of_ranks == 1 else f"{number_of_ranks} ranks"
    when = "" if event["part"] == "step" else ", after the step itself"
    batch = f" for micro-batches of {_shape(event['shape'])}" if event["shape"] else ""
    if event["shape_before"]:
        batch += f" instead of {_shape(event['shape_before'])}"
    if event["gave_up"]:
        return (
            f"torch has compiled blocks for as many shapes as it may on {who}{when}, and runs "
            f"further ones uncompiled{batch}"
        )
    many = f"{graphs} graphs" if graphs > 1 else "a graph"
    times = f"; {event['times']} steps of this attempt did" if event["times"] > 1 else ""
    return f"{who} compiled {many} anew{when}{batch}, {event['seconds']:.3g} s{times}"


def _shape(sizes: list[int]) -> str:
    return " x ".join(map(str, sizes))


def last_recompilation(events: Iterable[Event], attempt: int) -> Event | None:
    """Return the newest `recompilation` record of an attempt, one that gave up if there is one."""
    found = [e for e in events if (e["event"], e["attempt"]) == ("recompilation", attempt)]
    return max(found, key=lambda event: (event["gave_up"], event["times"]), default=None)


def describe_failed_reward(event: Mapping[str, Any]) -> str:
    """Describe a `reward_failed` record, without its reason."""
    of = f"{event['count']:,} of {event['answers']:,} answers"
    return f"the reward {event['reward']} failed for {of}"


def describe_mirror_problem(event: Mapping[str, Any]) -> str:
    """Describe a `mirror` record in a sentence."""
    if not event["problem"]:
        return "the mirror gets checkpoints again"
    return f"checkpoints do not reach the mirror, and stay on this disk: {event['problem']}"


def describe_callback_end(event: Mapping[str, Any]) -> str:
    """Return which callback ended a run, and why, from the record of the end."""
    name, why = event.get("callback"), event.get("why")
    who = f"the callback {name}" if name else "a callback"
    return f"{who}: {why}" if why else who
