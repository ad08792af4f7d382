"""`trainctl estimate-memory` of several configurations: a table, or a chart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trainctl.cli.arguments import split_target
from trainctl.cli.console import print_table, put, say
from trainctl.cli.plan_view import plan_subject
from trainctl.cli.planning import Planned, compose_target, plan
from trainctl.config.compose import Composed
from trainctl.config.sweep import expand_sweep
from trainctl.errors import TrainctlError
from trainctl.memory.activations import block_activations, compute_bytes
from trainctl.plan.shapes import count_parameters

ANY_STEPS = 1_000_000
"""More steps than any warmup or decay given in steps."""

NO_LENGTH = "TC022"

FITS = {True: "fits", False: "does not fit", None: "too close to tell"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One configuration of a comparison."""

    name: str
    values: Mapping[str, str]
    """Values of the swept keys."""
    planned: Planned | None = None
    """Plan and budget; None if the configuration is not legal."""
    errors: tuple[str, ...] = ()
    """Messages of the errors that make the configuration illegal."""

    def to_json(self) -> dict[str, Any]:
        """Return the swept values with the budget and the errors."""
        budget = self.planned.assessment.budget if self.planned else None
        found = {"budget": budget.to_json()} if budget else {}
        return {
            "values": dict(self.values),
            **found,
            "errors": list(self.errors),
        }


def compare_memory(
    overrides: Sequence[str], config_dir: Path | None, *, exact: bool, calibrated: bool
) -> list[Compared]:
    """Plan every combination of the values that the overrides list (`zero_stage=1,2,3`).

    A recipe or a run may come before them.

    Raises:
        TrainctlError: There is only one configuration, and it cannot be planned.
    """
    target, rest = split_target(list(overrides))
    points = expand_sweep(rest)
    compared = []
    for point in points:
        name = ", ".join(f"{key}={value}" for key, value in point.values.items())
        try:
            composed = _with_placeholder_steps(compose_target(target, point.overrides, config_dir))
            planned = plan(composed, exact=exact, calibrated=calibrated)
        except TrainctlError as found:
            error = _without_length_error(found)
            if len(points) == 1:
                raise error from None
            messages = tuple(finding.message for finding in error.findings) or (str(error),)
            compared.append(Compared(name=name, values=point.values, errors=messages))
            continue
        errors = tuple(finding.message for finding in planned.unforceable_errors)
        compared.append(Compared(name=name, values=point.values, planned=planned, errors=errors))
    return compared


def _with_placeholder_steps(composed: Composed) -> Composed:
    """Return the configuration with a number of steps if no step or token sets its length.

    Memory does not depend on the length.
    """
    config, training = composed.config, composed.config.training
    if training.steps is not None or training.tokens is not None:
        return composed
    training = replace(training, steps=ANY_STEPS, epochs=None, epoch_tokens=None)
    return replace(composed, config=replace(config, training=training))


def _without_length_error(error: TrainctlError) -> TrainctlError:
    """Return the error without the finding that the run has no length."""
    found = [finding for finding in error.findings if finding.rule != NO_LENGTH]
    return TrainctlError.from_findings(found) if found else error


def show_comparison(compared: Sequence[Compared]) -> None:
    """Print the model, and for each configuration its values, peak, phase, host memory and
    verdict.
    """
    plans = [item.planned.assessment.plan for item in compared if item.planned]
    for subject in dict.fromkeys(plan_subject(each) for each in plans if each):
        put(subject)
    rows = []
    for item in compared:
        budget = item.planned.assessment.budget if item.planned else None
        if budget is None:
            rows.append((item.name, "–", "", "", "; ".join(item.errors)))
            continue
        peak, host = budget.device_peak_bytes / 2**30, budget.host.bytes_per_node / 2**30
        rows.append(
            (item.name, f"{peak:,.2f}", budget.peak_phase, f"{host:,.2f}", FITS[budget.fits])
        )
    print_table(("configuration", "peak, GiB", "at", "host, GiB", ""), rows, right=(1, 3))


def save_chart(compared: Sequence[Compared], path: Path) -> None:
    """Write a chart of the configurations that have a budget.

    Raises:
        TrainctlError: No configuration has a budget, too many have, or the file cannot be written.
    """
    from trainctl.monitor.report.memory_chart import MOST_CONFIGURATIONS, save_memory_chart

    budgets = {
        item.name or item.planned.composed.config.model.name: item.planned.assessment.budget
        for item in compared
        if item.planned is not None and item.planned.assessment.budget is not None
    }
    if not budgets:
        raise TrainctlError(
            f"nothing to draw: {'; '.join(error for item in compared for error in item.errors)}"
        )
    if len(budgets) > MOST_CONFIGURATIONS:
        raise TrainctlError(
            f"{len(budgets)} configurations are too many for one chart",
            hint=f"at most {MOST_CONFIGURATIONS}",
        )
    save_memory_chart({name: budget for name, budget in budgets.items() if budget}, path)
    say(f"wrote {path}", style="good")


def trace_report(planned: Planned) -> dict[str, dict[str, int]]:
    """Return traced parameters and activation bytes beside the closed form; empty if untraced."""
    traced, made = planned.traced, planned.assessment.plan
    if traced is None or made is None:
        return {}
    config = made.config
    if not config.model.has_closed_form:
        return {
            "parameters": {"traced": traced.anatomy.total},
            "block_bytes_per_token": {"traced": traced.block.saved},
        }
    closed = block_activations(
        config.model,
        sequence_length=config.training.sequence_length,
        element=compute_bytes(made),
        autocast=config.precision.autocast,
    )
    return {
        "parameters": {
            "traced": traced.anatomy.total,
            "closed_form": count_parameters(config.model).total,
        },
        "block_bytes_per_token": {"traced": traced.block.saved, "closed_form": closed.saved},
    }


def trace_lines(report: Mapping[str, Mapping[str, int]]) -> list[str]:
    """Return the report as lines of text."""
    names = {
        "parameters": "parameters",
        "block_bytes_per_token": "bytes per token that a block keeps",
    }
    return [
        f"traced: {sizes['traced']:,} {names[key]} ({_size_difference(sizes)})"
        for key, sizes in report.items()
    ]


def _size_difference(sizes: Mapping[str, int]) -> str:
    traced, closed = sizes["traced"], sizes.get("closed_form")
    if closed is None:
        return "it has no closed form"
    if traced == closed:
        return "as by the closed form"
    return f"the closed form: {closed:,}, {closed / traced - 1:+.2%}"
