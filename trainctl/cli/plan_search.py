"""`trainctl plan`: the fastest ways to train a model on given machines."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from shlex import join, quote
from typing import Annotated, Any

import typer

from trainctl.cli.arguments import ConfigDir, Json, Overrides, Plot
from trainctl.cli.console import (
    findings_to_json,
    print_data,
    print_json,
    print_message,
    show_findings,
)
from trainctl.cli.plan_view import layout_words
from trainctl.config.compose import ComposedConfig, compose
from trainctl.config.editor import link_recipe
from trainctl.config.overrides import ALIASES
from trainctl.errors import TrainctlError
from trainctl.hardware import Hardware, resolve_hardware
from trainctl.launchers.planning import name_sources, read_factory
from trainctl.memory.constants import GIB
from trainctl.tuning.compute import device_rates
from trainctl.tuning.recipes import check_recipe_file, plan_recipe
from trainctl.tuning.search import FoundPlan, RejectedVariant, Search, search
from trainctl.tuning.speed import StepTime, overrides

Top = Annotated[int, typer.Option(metavar="N", min=1, max=50, help="Plans to show.")]
Write = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Save the first as a recipe.", show_default=False),
]
Price = Annotated[
    float | None,
    typer.Option(metavar="AMOUNT", min=0, help="Of a device for an hour.", show_default=False),
]


_PARTS = {
    "compute": "compute",
    "recompute": "recomputation",
    "tensor": "tensor-parallel collectives",
    "sequence": "sequence-parallel exchanges",
    "gather": "gathering weights",
    "reduce": "reducing gradients",
    "transfer": "pipeline transfers",
    "bubble": "pipeline bubble",
    "optimizer": "the update",
    "offload": "copies to the host",
}
_LEAST_SHARE = 0.005
"""Parts of a step below this share are not listed."""


@dataclass(frozen=True, slots=True)
class _ShownFacts:
    """Facts that decide which figures of a plan are shown."""

    rates_are_known: bool
    """Whether the hardware's speed is known; otherwise only the order of plans is meaningful."""
    has_length: bool
    """Whether the configuration sets the length of the training."""


def plan(
    overrides: Overrides = None,
    config_dir: ConfigDir = None,
    top: Top = 5,
    write: Write = None,
    plot: Plot = None,
    price: Price = None,
    as_json: Json = False,
) -> None:
    """Search the fastest layouts, batches and recomputation that are legal and fit.

    Groups and keys that are given stay as they are: zero_stage=3 plans with ZeRO 3 only. Exits
    with 3 if nothing fits.

    Example: trainctl plan model=llama-70b hardware=8x8xh100-80g training.sequence_length=8192
    training.global_batch_tokens=4M
    """
    composed, unread = read_factory(compose(overrides or (), config_dir=config_dir))
    if unread:
        raise TrainctlError.from_findings(name_sources(composed, unread))
    training = composed.config.training
    is_open = training.steps is None and training.tokens is None
    if write is not None:
        if is_open and training.epochs is None:
            raise TrainctlError(
                "a recipe says how long it trains, and nothing does",
                hint="training.tokens=1T, or training.steps=1000",
            )
        check_recipe_file(write, config_dir)
    hardware = resolve_hardware(composed.config.hardware)
    result = search(composed.config, hardware, fixed=_user_set_keys(composed), top=top)
    show_findings(composed.findings)
    if not result.found:
        raise TrainctlError.from_findings(name_sources(composed, result.findings))
    show = _ShownFacts(
        rates_are_known=device_rates(hardware, composed.config.precision).is_known,
        has_length=not is_open,
    )
    if not show.rates_are_known:
        print_message(
            f"note: the rates of {hardware.name} are not known, and those of an A100 are taken: "
            "only the order means something",
            style="warning",
        )
    if as_json:
        print_json(_to_json(result, hardware, price, show))
    else:
        for line in _result_lines(result, hardware, price, show):
            print_data(line)
    if plot is not None:
        from trainctl.monitor.report.figure import save_plan_chart

        save_plan_chart(result, hardware, plot, is_absolute=show.rates_are_known)
        print_message(f"wrote {plot}", style="good")
    if write is not None:
        text = plan_recipe(composed, result.found[0], _recipe_comment(result.found[0], show))
        write.write_text(link_recipe(write, config_dir) + text + "\n", encoding="utf-8")
        print_message(f"saved {write}; start it with: {_launch_command(write, config_dir)}")


def _user_set_keys(composed: ComposedConfig) -> frozenset[str]:
    """Return the groups and keys that the user has set, including those that are not searched."""
    names = {override.partition("=")[0] for override in composed.overrides}
    return frozenset(ALIASES.get(name, name) for name in names)


def _result_lines(
    result: Search, hardware: Hardware, price: float | None, show: _ShownFacts
) -> list[str]:
    """Return the plans as text: speed and memory first, then the reasons."""
    first = result.found[0]
    batch = first.plan.batch
    lines = [
        f"{first.plan.config.model.name} on {hardware.name}, sequences of "
        f"{batch.sequence_length:,} tokens: {len(result.found)} of {result.timed:,} variants"
    ]
    for number, found in enumerate(result.found, 1):
        lines += [
            "",
            f"{number}. {layout_words(found.plan)}",
            *_plan_details(found, first, price, show),
        ]
    return lines


def _plan_details(
    found: FoundPlan, first: FoundPlan, price: float | None, show: _ShownFacts
) -> list[str]:
    lines = []
    if show.rates_are_known:
        rate = found.tokens_per_second_per_device
        share = "" if found.utilisation is None else f", MFU {found.utilisation:.1%}"
        lines.append(
            f"   {_step_text(found.time.seconds)} a step, {rate:,.0f} tokens/s a device{share}"
        )
    memory = found.budget
    capacity = memory.device_capacity_bytes
    of = f" of {capacity / GIB:.1f}" if capacity else ""
    size = f"   memory {memory.device_peak_bytes / GIB:.1f}{of} GiB a device"
    if memory.host.bytes_per_node:
        size += f", {memory.host.bytes_per_node / GIB:,.0f} GiB of host memory a machine"
    lines.append(size)
    if show.has_length and show.rates_are_known:
        lines.append(
            f"   {_duration_text(found.seconds_to_train)} to train {found.tokens_to_train:,} tokens"
        )
    if price is not None and show.rates_are_known:
        cost = found.cost_per_billion_tokens(price)
        whole = f", {cost * found.tokens_to_train / 1e9:,.2f} in all" if show.has_length else ""
        lines.append(f"   {cost:,.2f} for a billion tokens{whole}")
    lines.append(f"   time: {_time_shares(found.time)}")
    if found is not first:
        lines.append(f"   beside 1: {_why_slower(found, first)}")
    if found.rejected is not None:
        lines.append(f"   would be faster: {_next_faster(found.rejected, show.rates_are_known)}")
    return [*lines, f"   {join(found.overrides)}".rstrip()]


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


def _to_json(
    result: Search, hardware: Hardware, price: float | None, show: _ShownFacts
) -> dict[str, Any]:
    return {
        "schema": 1,
        "hardware": hardware.name,
        "rates_are_known": show.rates_are_known,
        "variants": result.timed,
        "plans": [_plan_json(found, result.found[0], price, show) for found in result.found],
    }


def _plan_json(
    found: FoundPlan, first: FoundPlan, price: float | None, show: _ShownFacts
) -> dict[str, Any]:
    """Return one plan as JSON; fields that depend on unknown rates are null."""
    mesh, batch, memory = found.plan.mesh, found.plan.batch, found.budget
    rejected = found.rejected
    speed: dict[str, Any] = {
        "seconds_per_step": found.time.seconds,
        "seconds_by_part": dict(found.time.parts),
        "tokens_per_second_per_device": found.tokens_per_second_per_device,
        "model_flops_utilisation": found.utilisation,
        "seconds_to_train": found.seconds_to_train if show.has_length else None,
        "cost_per_billion_tokens": None if price is None else found.cost_per_billion_tokens(price),
    }
    if not show.rates_are_known:
        speed = dict.fromkeys(speed)
    return {
        "overrides": list(found.overrides),
        "mesh": {axis: getattr(mesh, axis) for axis in ("data", "tensor", "pipeline", "sequence")},
        "zero_stage": found.plan.config.zero_stage.stage,
        "global_batch_size": batch.global_batch_size,
        "micro_batch_size": batch.micro_batch_size,
        "gradient_accumulation_steps": batch.gradient_accumulation_steps,
        **speed,
        "relative_time": first.tokens_per_second / found.tokens_per_second,
        "device_peak_bytes": memory.device_peak_bytes,
        "device_peak_high_bytes": memory.device_peak_high_bytes,
        "host_bytes_per_node": memory.host.bytes_per_node,
        "next_faster": None
        if rejected is None
        else {
            "overrides": list(overrides(rejected.values)),
            "time_saved_per_token": rejected.saved if show.rates_are_known else None,
            "reason": rejected.reason,
        },
        "findings": findings_to_json(found.findings),
    }


def _duration_text(seconds: float) -> str:
    for unit, name in ((86_400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:,.1f} {name}"
    return _step_text(seconds)


def _step_text(seconds: float) -> str:
    return f"{seconds:,.2f} s" if seconds >= 1 else f"{seconds * 1000:.3g} ms"


def _recipe_comment(found: FoundPlan, show: _ShownFacts) -> list[str]:
    lines = [f"{found.plan.config.model.name} on {found.plan.hardware.name}, by trainctl plan."]
    if show.rates_are_known:
        rate = found.tokens_per_second_per_device
        lines.append(
            f"Predicted: {_step_text(found.time.seconds)} a step, {rate:,.0f} tokens/s a device."
        )
    return lines


def _launch_command(path: Path, config_dir: Path | None) -> str:
    folder = path.absolute().parent
    if folder == Path.cwd() / "recipes":
        return f"trainctl launch recipe={quote(path.stem)}"
    if config_dir is not None or any((folder / name).is_dir() for name in ("conf", "recipes")):
        return f"trainctl launch recipe={quote(path.stem)} (from a folder of recipes/)"
    return f"trainctl launch --config-dir {quote(str(path.parent))} recipe={quote(path.stem)}"
