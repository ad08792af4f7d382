"""Check that a resumed run is the same run: its first losses must equal the recorded ones.

A resume goes back to a checkpoint, so the steps after it have often been done already. The loss of
the first step depends on the restored weights and data position; the loss of the second depends on
the optimizer states as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trainctl.config.schema import DataType
from trainctl.engines.process import Process
from trainctl.errors import ExitCode, TrainctlError
from trainctl.options.adapter import low_rank
from trainctl.options.precision import precision_of
from trainctl.plan.types import RunPlan
from trainctl.runs.directory import read_plan
from trainctl.runs.layout import RunPaths
from trainctl.runs.records import number, steps_from_end

FP32_TOLERANCE = 1e-5
"""Relative; another layout adds in another order, and another device rounds differently."""

LOW_PRECISION_TOLERANCE = 1e-3
"""Relative, if one of the two attempts computed in less than fp32."""


@dataclass(frozen=True, slots=True)
class Expected:
    """Recorded loss of a step."""

    loss: float
    """Loss of the step, in nats."""
    tolerance: float
    """Relative difference that the layouts and formats of the two attempts explain."""
    attempt: int
    """Number of the attempt that did the step."""
    first_sample: int
    """Counter of the step's first sample."""


@dataclass(frozen=True, slots=True)
class Replay:
    """Recorded losses to compare with, by step."""

    expected: dict[int, Expected]

    @classmethod
    def of(cls, run: RunPaths, plan: RunPlan, process: Process, step: int) -> Replay:
        """Return the recorded losses of the first two steps after `step`; on all ranks together."""
        expected: dict[int, Expected] = {}
        if process.is_first and plan.config.checkpoint.compare_replay:
            expected = _recorded_losses(run, plan, step)
        return cls(process.broadcast_from_first(expected))

    def check(self, step: int, loss: float, first_sample: int) -> Expected | None:
        """Compare the loss of a step with the recorded one.

        After a batch was skipped, or the run rewound, a step has other samples than before.

        Args:
            step: Number of the step, from 1.
            loss: In nats.
            first_sample: Counter of the step's first sample.

        Returns:
            The recorded loss; None if the step was not done before, or with other samples.

        Raises:
            TrainctlError: The losses differ: the state or the data are not the same as before.
        """
        expected = self.expected.get(step)
        if expected is None or expected.first_sample != first_sample:
            return None
        if abs(loss - expected.loss) <= expected.tolerance * abs(expected.loss):
            return expected
        raise TrainctlError(
            f"after the resume the loss of step {step} is {loss!r}, but attempt "
            f"{expected.attempt} had {expected.loss!r} (allowed: {expected.tolerance:g} relative)",
            hint="something that was restored is not what was saved, or a package computes "
            "otherwise now; go on all the same with checkpoint.compare_replay=false",
            exit_code=ExitCode.training_failed,
        )


def _recorded_losses(run: RunPaths, plan: RunPlan, step: int) -> dict[int, Expected]:
    curve = steps_from_end(run.events, (step + 1, step + 2))
    found: dict[int, Expected] = {}
    for later, depends_on in ((step + 1, _loss_at_once), (step + 2, _loss_after_an_update)):
        if later not in curve:
            break
        record = curve[later]
        if record.get("intervention"):  # the step was counted, but without an update
            break
        file = run.attempt(record["attempt"]).plan
        if not file.is_file():
            break
        before = read_plan(file)
        if depends_on(before) != depends_on(plan) or _differs_in_random_draws(before, plan):
            break
        if later > step + 1 and (before.config.offload.zenflow or plan.config.offload.zenflow):
            break  # ZenFlow resumes with other columns and without their moments
        found[later] = Expected(
            loss=number(record["loss"]),
            tolerance=_tolerance(before, plan),
            attempt=int(record["attempt"]),
            first_sample=int(record["samples"][0]),
        )
    return found


def _loss_at_once(plan: RunPlan) -> Any:
    """Return what the first loss depends on besides the weights, the layout and the format.

    The model is left out: it stays the same in a run, and if it changed unnoticed, the comparison
    shows it.
    """
    config = plan.config
    return (
        (config.training.seed, config.data.shuffle, config.data.mask_documents),
        (config.data.packing, config.data.fim_rate, config.data.fim_spm_rate),
        (config.data.on_too_long, config.objective, config.adapter),
        (config.data.sources, config.data.stages),
        (plan.batch.global_batch_size, plan.batch.sequence_length),
        [(phase.first_step, phase.batch.global_batch_size) for phase in plan.ramp],
    )


def _loss_after_an_update(plan: RunPlan) -> Any:
    """Return what the second loss depends on besides the state, the layout and the format."""
    config = plan.config
    return (
        _loss_at_once(plan),
        (config.optimizer, config.schedule, config.gradients, config.stability),
        (plan.total_steps, plan.warmup_steps),
    )


def _differs_in_random_draws(before: RunPlan, now: RunPlan) -> bool:
    """Return True if dropout masks may differ: each rank draws its own, for its part of the batch.

    Only models from directories and adapters have dropout.
    """
    adapter = low_rank(now.config.adapter)
    drops = now.config.model.is_directory or (adapter is not None and adapter.dropout > 0)
    return drops and (before.mesh, before.batch) != (now.mesh, now.batch)


def _tolerance(*plans: RunPlan) -> float:
    exact = all(precision_of(plan.config.precision).format is DataType.fp32 for plan in plans)
    return FP32_TOLERANCE if exact else LOW_PRECISION_TOLERANCE
