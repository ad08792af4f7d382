"""Checks of a step before its update, and of a resumed run's first losses.

Every number is already the sum over all ranks, so all ranks come to the same verdict.
docs/stability.md defines the means and counts after any sequence of steps, rewinds and resumes.

A resume goes back to a checkpoint, so the steps after it have often been done already. The loss of
the first step depends on the restored weights and data position; the loss of the second depends on
the optimizer states as well.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from trainctl.config.schema import OnBadLoss, StabilityConfig
from trainctl.engines.process import Process
from trainctl.errors import ExitCode, TrainctlError
from trainctl.options.adapter import low_rank
from trainctl.options.data import SampleKind
from trainctl.options.objective import objective_of
from trainctl.plans.settings import replay_tolerance
from trainctl.plans.types import RunPlan
from trainctl.runs.directory import read_plan
from trainctl.runs.layout import RunPaths
from trainctl.runs.records import number, steps_from_end


class BadStepKind(StrEnum):
    """Reason why a step is bad."""

    loss_not_finite = "loss_not_finite"
    norm_not_finite = "norm_not_finite"
    loss_spike = "loss_spike"
    norm_spike = "norm_spike"
    loss_limit = "loss_limit"
    norm_limit = "norm_limit"

    @property
    def is_finite(self) -> bool:
        return self not in (BadStepKind.loss_not_finite, BadStepKind.norm_not_finite)

    @property
    def quantity(self) -> str:
        """Quantity that is bad, in words."""
        return "loss" if self.value.startswith("loss") else "gradient norm"


@dataclass(frozen=True, slots=True)
class BadStep:
    """Verdict that a step should not be made."""

    kind: BadStepKind
    value: float
    """Loss or gradient norm of the step."""
    limit: float | None
    """Limit that the value exceeds; None if the value is not finite."""

    def of_step(self, step: int) -> str:
        """Return a clause such as ``the loss of step 7 is 21.5, above 8.2``."""
        above = "" if self.limit is None else f", above {self.limit:.4g}"
        return f"the {self.kind.quantity} of step {step} is {self.value:.6g}{above}"


@dataclass(slots=True)
class RunningMean:
    """Mean of the first `window` values, then an exponential moving average.

    The weight of a value then falls by 1 - 1 / `window` with each later value.
    """

    window: int
    mean: float = 0.0
    count: int = 0

    def add(self, value: float) -> None:
        self.count += 1
        self.mean += (value - self.mean) / min(self.count, self.window)


class StepGuard:
    """Judge of each step before its update, and counter of interventions.

    Args:
        config: Policy and limits.
        norm_may_overflow: Whether to leave a gradient norm that is not finite to the fp16 loss
            scale.
    """

    def __init__(self, config: StabilityConfig, *, norm_may_overflow: bool = False) -> None:
        self._config = config
        self._norm_may_overflow = norm_may_overflow
        self._loss = RunningMean(config.spike_window)
        self._norm = RunningMean(config.spike_window)
        self._in_a_row = 0
        self._bad_step = 0

    @property
    def interventions(self) -> int:
        """Number of interventions in a row."""
        return self._in_a_row

    def judge(self, loss: float, norm: float | None) -> BadStep | None:
        """Return what is wrong with a step; None if nothing is.

        Args:
            loss: Mean over the global batch, in nats.
            norm: Gradient norm; None if it is not known before the update.
        """
        if not math.isfinite(loss):
            return BadStep(BadStepKind.loss_not_finite, loss, None)
        if norm is not None and not math.isfinite(norm):
            return (
                None
                if self._norm_may_overflow
                else BadStep(BadStepKind.norm_not_finite, norm, None)
            )
        config = self._config
        spikes = (
            (BadStepKind.loss_limit, loss, config.loss_limit),
            (BadStepKind.loss_spike, loss, self._limit(self._loss, config.spike_factor)),
            (BadStepKind.norm_limit, norm, config.norm_limit),
            (BadStepKind.norm_spike, norm, self._limit(self._norm, config.norm_spike_factor)),
        )
        for kind, value, limit in spikes:
            if value is not None and limit is not None and value > limit:
                return BadStep(kind, value, limit)
        return None

    def policy(self, trouble: BadStep) -> OnBadLoss:
        """Return the policy to apply now: `stop` after too many interventions in a row.

        `warn` also becomes `stop` if the value is not finite.
        """
        policy = self._config.on_bad_loss
        if policy is OnBadLoss.warn:
            return policy if trouble.kind.is_finite else OnBadLoss.stop
        return policy if self._in_a_row < self._config.max_interventions else OnBadLoss.stop

    def intervene(self, step: int) -> None:
        """Count an intervention at step number `step`, from 1."""
        self._in_a_row += 1
        self._bad_step = max(self._bad_step, step)

    def accept(self, step: int, loss: float, norm: float | None) -> None:
        """Record a step whose update was made, spike or not.

        Interventions are no longer in a row once the last bad step is passed.
        """
        self._loss.add(loss)
        if norm is not None and math.isfinite(norm):
            self._norm.add(norm)
        if step >= self._bad_step:
            self._in_a_row = self._bad_step = 0

    def state(self) -> dict[str, Any]:
        """Return the state for the checkpoint."""
        return {
            "loss": [self._loss.mean, self._loss.count],
            "norm": [self._norm.mean, self._norm.count],
            "in_a_row": self._in_a_row,
            "bad_step": self._bad_step,
        }

    def restore(self, state: Mapping[str, Any], *, rewound: bool = False) -> None:
        """Restore the state of a checkpoint, empty if the checkpoint has none.

        Args:
            rewound: Whether the running process rewinds. The interventions in a row then stay
                counted, or they would never end.
        """
        for mean, name in ((self._loss, "loss"), (self._norm, "norm")):
            mean.mean, mean.count = state.get(name, (0.0, 0))
        if not rewound:
            self._in_a_row = int(state.get("in_a_row", 0))
            self._bad_step = int(state.get("bad_step", 0))

    def _limit(self, mean: RunningMean, factor: float | None) -> float | None:
        if factor is None or mean.count < self._config.spike_after_steps:
            return None
        return factor * mean.mean


@dataclass(frozen=True, slots=True)
class RecordedLoss:
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

    expected: dict[int, RecordedLoss]

    @classmethod
    def of(cls, run: RunPaths, plan: RunPlan, process: Process, step: int) -> Replay:
        """Return the recorded losses of the first two steps after `step`; on all ranks together."""
        expected: dict[int, RecordedLoss] = {}
        # A loss of sampled answers is near 0, whatever they are.
        is_sampled = objective_of(plan.config.objective).takes is SampleKind.prompts
        if process.is_first and plan.config.checkpoint.compare_replay and not is_sampled:
            expected = _recorded_losses(run, plan, step)
        return cls(process.broadcast_from_first(expected))

    def check(self, step: int, loss: float, first_sample: int) -> RecordedLoss | None:
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


def _recorded_losses(run: RunPaths, plan: RunPlan, step: int) -> dict[int, RecordedLoss]:
    curve = steps_from_end(run.events, (step + 1, step + 2))
    found: dict[int, RecordedLoss] = {}
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
        found[later] = RecordedLoss(
            loss=number(record["loss"]),
            tolerance=max(replay_tolerance(each.config.precision) for each in (before, plan)),
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

    Only models from directories, modules of the user's and adapters have dropout.
    """
    adapter, model = low_rank(now.config.adapter), now.config.model
    drops = model.is_directory or model.is_module or (adapter is not None and adapter.dropout > 0)
    return drops and (before.mesh, before.batch) != (now.mesh, now.batch)
