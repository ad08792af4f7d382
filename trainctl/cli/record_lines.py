"""Text of a record of a run, for `launch`, `runs logs` and `runs follow`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from trainctl.cli.console import to_printable
from trainctl.runs.event_descriptions import (
    describe_callback_end,
    describe_divergence,
    describe_failed_reward,
    describe_intervention,
    describe_mirror_problem,
    describe_recompilation,
    describe_straggler,
)
from trainctl.runs.records import number

Event = Mapping[str, Any]

_SHOWN = 120
"""Characters shown of a record of unknown form."""


def step_line(event: Event, *, stop_step: int | None, seconds_left: float | None) -> str:
    """Format one optimizer step, such as ``step 20/200 loss 2.8123 lr 9.1e-04 …``."""
    loss, rate, norm = (event.get(name) for name in ("loss", "learning_rate", "grad_norm"))
    speed, reward = event.get("tokens_per_second"), (event.get("objective") or {}).get("reward")
    return (
        f"step {event['step']}/{stop_step or '?'}"
        + (f" loss {number(loss):.4f}" if loss is not None else "")  # a program may leave it out
        + (f" reward {number(reward):.4f}" if reward is not None else "")
        + (f" lr {number(rate):.1e}" if rate is not None else "")
        + (f" grad_norm {number(norm):.2f}" if norm is not None else "")
        + (f" {number(speed):,.0f} tokens/s" if speed is not None else "")
        + (f" MFU {number(event['mfu']):.1%}" if event.get("mfu") is not None else "")
        + _own_values(event)
        + f" eta {clock(seconds_left)}"
    )


def _own_values(event: Event) -> str:
    """Format the values logged by a user's own program, such as ` accuracy 0.93`."""
    own = event.get("values", {}).items()
    return "".join(
        f" {to_printable(name)} {number(value):.4g}"
        for name, value in own
        if isinstance(value, int | float | str)
    )


def record_lines(event: Event, *, stop_step: int | None) -> list[str]:
    """Return the lines for any record that is read later, without a time left.

    A record of unknown form (edited by hand, or of another version) gives a line that says so.
    """
    try:
        if event["event"] != "step":
            return event_lines(event)
        line = step_line(event, stop_step=stop_step, seconds_left=None)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        return [
            f"a record that is not as this version writes it: {to_printable(str(event)[:_SHOWN])}"
        ]
    return [line.removesuffix(f" eta {clock(None)}")]


def clock(seconds: float | None) -> str:
    """Format seconds as ``01:02``, ``1:02:03`` or, when unknown, ``--:--``."""
    if seconds is None:
        return "--:--"
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute:02}:{second:02}"


def bad_text_lines(event: Event) -> list[str]:
    """Return what `data.on_bad_text` did, with the first example; empty without bad text."""
    bad = event.get("bad_text")
    if not bad:
        return []
    did = [
        f"{bad[name]:,} document{'s' if bad[name] > 1 else ''} {words}"
        for name, words in (("replaced", "repaired"), ("skipped", "left out"))
        if bad[name]
    ]
    return [f"bad text: {', '.join(did)}; the first: {to_printable(bad['examples'][0])}"]


def event_lines(event: Event) -> list[str]:
    """Return the lines for a record that is not a step; empty for records that are not shown."""
    lines = _LINES.get(event["event"])
    return lines(event) if lines is not None else []


def _start(event: Event) -> list[str]:
    origin = f"resumed from {event['resumed_from']}" if event["resumed_from"] else "start"
    size = f"{event['world_size']} processes, {event['num_parameters']:,} parameters"
    trained = event.get("num_trained", event["num_parameters"])
    if trained != event["num_parameters"]:
        size += f" ({trained:,} of them train)"
    if event.get("expert_products"):
        size += f", experts by {event['expert_products']}"
    text = f"{event['train_tokens']:,} + {event['held_out_tokens']:,} held-out tokens"
    lines = [f"checkpoint passed over: {problem}" for problem in event["passed_over"]]
    lines += [f"{origin}: {size}, {text}", *bad_text_lines(event)]
    if event.get("ema_begins"):
        lines.append("the average of the weights begins here: the checkpoint has none")
    return lines


def _reference(event: Event) -> list[str]:
    records = f"{event['train']:,} + {event['held_out']:,} held-out records"
    return [f"reference log-probabilities of {records}: {clock(event['seconds'])}"]


def _not_joined(event: Event) -> list[str]:
    return [
        f"warning: after {clock(event['seconds'])} no rank has joined a process group: each may "
        "train a model of its own (MASTER_ADDR, MASTER_PORT)"
    ]


def _corpus(event: Event) -> list[str]:
    return [to_printable(event["message"])]


def _evaluation(event: Event) -> list[str]:
    line = f"evaluation at step {event['step']}:"
    if "loss" in event:
        line += f" held-out loss {number(event['loss']):.4f}"
    line += _own_values(event)
    if "ema_loss" in event:
        line += f", of the average {number(event['ema_loss']):.4f}"
    if "sources" in event:
        line += f", of {_values_text(event['sources'])}"
    entropy = event.get("unigram_entropy")
    if entropy is not None:
        line += f" (tokens' unigram entropy {entropy:.4f})"
    if event.get("objective"):
        line += f" ({_values_text(event['objective'])})"
    return [line]


def _values_text(values: Mapping[str, Any]) -> str:
    return to_printable(", ".join(f"{name} {number(value):.4f}" for name, value in values.items()))


def _tasks(event: Event) -> list[str]:
    each = (f"{row['task']} {row['metric']} {row['value']:.4f}" for row in event["results"])
    return [f"tasks at step {event['step']}: {to_printable(', '.join(each))}"]


def _checkpoint(event: Event) -> list[str]:
    return [f"{event['event']} at step {event['step']}: {event['path']}"]


def _plateau(event: Event) -> list[str]:
    return [
        f"step {event['step']}: in {event['evaluations_since']} evaluations the held-out loss was "
        f"not below {number(event['best']):.4f}: the learning rate drops to "
        f"{event['factor']:.3g} of its peak"
    ]


def _end(event: Event) -> list[str]:
    if event["reason"] == "callback":
        return [f"ended at step {event['step']} by {describe_callback_end(event)}"]
    if event["reason"] != "no_improvement":
        return []
    by = f"more than {event['min_delta']:g} " if event.get("min_delta") else ""
    return [
        f"ended early: in {event['evaluations_since']} evaluations the held-out loss was never "
        f"{by}below {number(event['best']):.4f}, that of step {event['best_step']}"
    ]


def _memory(event: Event) -> list[str]:
    """Return the measured and planned peak; before the end only if it exceeds the plan's bound."""
    planned = event["planned"]
    if planned is None:  # a model without a closed form or a trace
        return []
    measured, high = event["measured"]["device_peak_bytes"], planned["device_peak_high_bytes"]
    if not event["at_end"] and measured <= high:
        return []
    peak, low, middle, most = (
        f"{size / 2**30:.2f}"
        for size in (measured, planned["device_peak_low_bytes"], planned["device_peak_bytes"], high)
    )
    return [f"peak memory of a device: {peak} GiB; planned {middle} (between {low} and {most})"]


def _profile(event: Event) -> list[str]:
    return [f"profile of the steps up to {event['step']}: {event['path']}"]


def _build(event: Event) -> list[str]:
    if event["seconds"] is not None:
        return [f"compiled {event['operator']} in {event['seconds']:.0f} s"]
    return [
        f"DeepSpeed compiles {event['operator']} on {event['host']}: it takes minutes, and is kept "
        "for later runs"
    ]


def _restart(event: Event) -> list[str]:
    return [
        f"failed: {event['cause']}",
        f"restart {event['number']} of {event['of']} from step {event['step']:,}, "
        f"nodes: {event['nodes']}",
    ]


def _benchmark(event: Event) -> list[str]:
    slow = [
        f"slow: rank {speed['rank']} on {speed['host']}, {speed['tflops']:.3g} TFLOP/s"
        for speed in event["slow"]
    ]
    speed = event["all_reduce_gb_per_second"]
    return [f"benchmark: all-reduce of all ranks {speed:.3g} GB/s", *slow]


def _divergence(event: Event) -> list[str]:
    return [f"{'warning: ' if event['diverged'] else ''}{describe_divergence(event)}"]


def _straggler(event: Event) -> list[str]:
    return [f"{'slow: ' if event['slow'] else ''}{describe_straggler(event)}"]


def _recompilation(event: Event) -> list[str]:
    why = f": {to_printable(event['reason'])}" if event["reason"] else ""
    return [f"step {event['step']:,}: {describe_recompilation(event)}{why}"]


def _reward_failed(event: Event) -> list[str]:
    reason = to_printable(event["reason"])
    return [f"step {event['step']}: {describe_failed_reward(event)}: {reason}"]


def _stopping(event: Event) -> list[str]:
    limit = event["within_seconds"]
    within = "" if limit is None else f", within {limit:g} s"
    estimates = f" ({event['estimates']})" if event.get("estimates") else ""
    return [
        f"{event['reason']}{estimates}: saves after this step and ends{within}; another signal "
        "ends it at once"
    ]


def _waiting(event: Event) -> list[str]:
    missing = ", ".join(event["missing"]) or "their preflight"
    return [f"waiting for nodes: {event['there']} of {event['of']} answer, not {missing}"]


def _logger(event: Event) -> list[str]:
    if not event["problem"]:
        return [f"logger {event['name']}: sends again"]
    return [
        f"logger {event['name']}: {to_printable(event['problem'])}; the run does not wait for it: "
        "`trainctl runs sync` sends what is missing"
    ]


def _mirror(event: Event) -> list[str]:
    return [to_printable(describe_mirror_problem(event))]


def _sample(event: Event) -> list[str]:
    return ["sampled text:", *(f"  {to_printable(line)}" for line in event["text"].splitlines())]


def _intervention(event: Event) -> list[str]:
    return [describe_intervention(event)]


_LINES: dict[str, Callable[[Event], list[str]]] = {
    "start": _start,
    "reference": _reference,
    "not_joined": _not_joined,
    "corpus": _corpus,
    "evaluation": _evaluation,
    "tasks": _tasks,
    "checkpoint": _checkpoint,
    "weights": _checkpoint,
    "intervention": _intervention,
    "plateau": _plateau,
    "end": _end,
    "memory": _memory,
    "profile": _profile,
    "build": _build,
    "restart": _restart,
    "benchmark": _benchmark,
    "divergence": _divergence,
    "recompilation": _recompilation,
    "reward_failed": _reward_failed,
    "straggler": _straggler,
    "stopping": _stopping,
    "waiting": _waiting,
    "logger": _logger,
    "mirror": _mirror,
    "sample": _sample,
}
"""Function that formats a record, by the record's kind."""
