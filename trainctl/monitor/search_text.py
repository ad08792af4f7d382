"""Results of a layout search as text: speed and memory of each plan, then the reasons."""

from __future__ import annotations

from shlex import join

from trainctl.config.quantities import seconds_text
from trainctl.memory.constants import GIB
from trainctl.monitor.plan_text import layout_words
from trainctl.tuning.assess import plain_kernels_cost
from trainctl.tuning.search import FoundPlan, RejectedVariant, Search
from trainctl.tuning.speed import StepTime, overrides

_PARTS = {
    "compute": "compute",
    "recompute": "recomputation",
    "tensor": "tensor-parallel collectives",
    "sequence": "sequence-parallel exchanges",
    "experts": "tokens to experts and back",
    "context": "waiting for keys of context ranks",
    "gather": "gathering weights",
    "reduce": "reducing gradients",
    "transfer": "pipeline transfers",
    "bubble": "pipeline bubble",
    "optimizer": "the update",
    "offload": "copies to the host",
    "rollout": "answers generated",
}
_LEAST_SHARE = 0.005
"""Parts of a step below this share are not listed."""


def search_lines(result: Search, price: float | None = None, *, command: str = "") -> list[str]:
    """Return the plans that a search found, with their costs if the price of a device is given.

    `command` launches the first plan; with it the lines end.
    """
    first = result.found[0]
    batch = first.plan.batch
    lines = [
        f"{first.plan.config.model.name} on {result.hardware.name}, sequences of "
        f"{batch.sequence_length:,} tokens: {len(result.found)} of {result.timed:,} variants"
    ]
    if result.assumed:
        named = [f"{override} ({reason})" for override, reason in result.assumed.items()]
        lines.append(f"assumed, since nothing sets it: {', '.join(named)}")
    for number, found in enumerate(result.found, 1):
        title, *details = plan_summary(result, found, price)
        lines += ["", f"{number}. {title}", *(f"   {line}".rstrip() for line in details)]
    if command:
        lacks = "" if result.has_length else " (add its length: training.tokens=1T)"
        lines += ["", f"To start the first{lacks}:", command]
    return lines


def plan_summary(result: Search, found: FoundPlan, price: float | None = None) -> list[str]:
    """Return the layout of one plan of a search, then its speed, memory, cost and overrides."""
    first, lines = result.found[0], [layout_words(found.plan)]
    if result.rates_are_known:
        rate = found.tokens_per_second_per_device
        share = "" if found.utilisation is None else f", MFU {found.utilisation:.1%}"
        low, high = map(seconds_text, found.between(found.time.seconds))
        step = f"{seconds_text(found.time.seconds)} a step (between {low} and {high})"
        lines.append(f"{step}, {rate:,.0f} tokens/s a device{share}")
    memory = found.budget
    capacity = memory.device_capacity_bytes
    of = f" of {capacity / GIB:.1f}" if capacity else ""
    size = f"memory {memory.device_peak_bytes / GIB:.1f}{of} GiB a device"
    if memory.host.bytes_per_node:
        size += f", {memory.host.bytes_per_node / GIB:,.0f} GiB of host memory a machine"
    lines.append(size)
    if result.has_length and result.rates_are_known:
        low, high = (_duration_text(each) for each in found.between(found.seconds_to_train))
        lines.append(
            f"{_duration_text(found.seconds_to_train)} to train {found.tokens_to_train:,} tokens "
            f"(between {low} and {high})"
        )
    if price is not None and result.rates_are_known:
        cost = found.cost_per_billion_tokens(price)
        least, most = found.between(cost)
        whole = f", {cost * found.tokens_to_train / 1e9:,.2f} in all" if result.has_length else ""
        between = f"between {least:,.2f} and {most:,.2f}"
        lines.append(f"{cost:,.2f} for a billion tokens ({between}){whole}")
    lines.append(f"time: {_time_shares(found.time)}")
    if found is first and (loss := plain_kernels_cost(found.plan)):
        lines.append(f"kernels=plain: {loss} a device, as predicted")
    if found is not first:
        lines.append(f"beside 1: {_why_slower(found, first)}")
    if found.rejected is not None:
        lines.append(f"would be faster: {_next_faster(found.rejected, result.rates_are_known)}")
    return [*lines, join(found.overrides)]


def _time_shares(time: StepTime) -> str:
    """List the parts of a step's time by their share, the largest first."""
    parts = sorted(time.parts.items(), key=lambda part: -part[1])
    total = time.seconds or 1.0
    named = [f"{_PARTS[name]} {s / total:.0%}" for name, s in parts if s / total >= _LEAST_SHARE]
    return ", ".join(named)


def _why_slower(found: FoundPlan, first: FoundPlan) -> str:
    """Compare a plan's time per token with that of the first, by the parts that differ most."""
    slower, parts = found.time_compared_with(first)
    largest = sorted(parts.items(), key=lambda part: -abs(part[1]))[:3]
    named = [f"{change:+.0%} {_PARTS[name]}" for name, change in largest if abs(change) >= 0.01]
    return f"{slower:+.1%} time a token" + (f" ({', '.join(named)})" if named else "")


def _next_faster(rejected: RejectedVariant, with_share: bool = True) -> str:
    """Describe the next faster variant: the time saved per token, and why it was rejected."""
    what = " ".join(overrides(rejected.values)) or "the same"
    saved = f" ({rejected.saved:.1%} less time a token)" if with_share else ""
    return f"{what}{saved}, but {rejected.reason}"


def _duration_text(seconds: float) -> str:
    for unit, name in ((86_400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:,.1f} {name}"
    return seconds_text(seconds)
