"""Differences between the training of a source and the configuration, in words."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

from trainctl.migration.checkpoints.source import Source
from trainctl.plans.schedule import Curve
from trainctl.plans.types import RunPlan

_TOLERANCE = 1e-6
"""Relative difference of two numbers that are the same: one may have been rounded to fp32."""


def differences(source: Source, plan: RunPlan, step: int, samples: int) -> list[str]:
    """Return the differences between a source's training and the plan, each with both values.

    Args:
        step: Optimizer steps done.
        samples: Samples trained on.
    """
    return [
        *_optimizer_differences(source, plan),
        *_rate_difference(source, plan, step),
        *_progress_differences(plan, step, samples),
    ]


def _optimizer_differences(source: Source, plan: RunPlan) -> Iterator[str]:
    section = plan.config.optimizer
    known = {field.name for field in fields(section)}
    for key, there in source.hyperparameters.items():
        if key not in known or key == "lr":
            continue
        here: float = getattr(section, key)
        if _differs(there, here):
            yield f"optimizer.{key}={here:g}, and the source trained with {there:g}"


def _rate_difference(source: Source, plan: RunPlan, step: int) -> Iterator[str]:
    there = source.progress.learning_rate
    if there is None:
        yield "the source's learning rate is unknown: the schedule of the configuration applies"
        return
    here = plan.peak_lr * Curve.of(plan).factor(step)
    if _differs(there, here):
        yield (
            f"the learning rate of step {step + 1:,} is {here:.6g} by this configuration's "
            f"schedule; the source was at {there:.6g}"
        )


def _progress_differences(plan: RunPlan, step: int, samples: int) -> Iterator[str]:
    planned = plan.batches.samples_before(step)
    if samples != planned:
        yield (
            f"the source has trained on {samples:,} samples in {step:,} steps; this "
            f"configuration's batches have {planned:,}"
        )
    if step >= plan.total_steps:
        yield (
            f"the source is at step {step:,}, and this configuration ends after "
            f"{plan.total_steps:,}: a larger training.steps trains on"
        )


def _differs(there: float, here: float) -> bool:
    return abs(there - here) > _TOLERANCE * max(abs(there), abs(here))
