"""Data sources and stages of a run, from its configuration alone; no text is read or counted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial

from trainctl.config.schema import (
    DataConfig,
    ScheduleConfig,
    SourceConfig,
    StageConfig,
    TrainingConfig,
)
from trainctl.options.schedule import position_of, steps_of_share
from trainctl.plan.types import Batch, Batches, BatchPhase, LayoutPlan, RunPlan

SINGLE_SOURCE = "data"
"""Name of the source of a run with a single source: its section is `data` itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataStage:
    """Range of steps with one mixture and one sequence length."""

    first_step: int
    """First step of the stage, from 0."""
    end_step: int
    """First step after the stage."""
    first_sample: int
    """Index of the stage's first sample, counted over all ranks and stages."""
    batches: Batches
    """Batch of every step of the run, as if the whole run had this sequence length."""
    weights: Mapping[str, Fraction] | None
    """The stage's own weights, by name of the source; None to use the weights of the sources."""

    @property
    def sequence_length(self) -> int:
        return self.batches.at(self.first_step).sequence_length

    @property
    def samples(self) -> int:
        return self.batches.samples_before(self.end_step) - self.batches.samples_before(
            self.first_step
        )

    @property
    def tokens(self) -> int:
        return self.samples * self.sequence_length

    def sample_of(self, step: int) -> int:
        """Return the index of the first sample of a step in this stage."""
        before = self.batches.samples_before(step) - self.batches.samples_before(self.first_step)
        return self.first_sample + before


def sources_of(data: DataConfig) -> dict[str, DataConfig]:
    """Return the sections of a run's sources by name; without `data.sources`, `data` itself."""
    return dict(data.sources) or {SINGLE_SOURCE: data}  # type: ignore[arg-type]


def exact(weight: float) -> Fraction:
    """Return a weight as the decimal fraction it was written as: 0.7 is 7/10."""
    return Fraction(repr(weight))


def are_valid_weights(weights: Iterable[float]) -> bool:
    """Return True if the weights are fractions with the sum 1, or whole numbers in proportion."""
    parts = [exact(weight) for weight in weights]
    return sum(parts) == 1 or all(part.denominator == 1 for part in parts)


def shares_of_amounts(
    sources: Mapping[str, SourceConfig], epoch_tokens: Mapping[str, int], of: int
) -> dict[str, Fraction]:
    """Return the share of each source that has a weight, tokens or epochs.

    Sources with a weight share the tokens of the run that tokens and epochs leave. If no source has
    a weight, tokens and epochs are only proportions. `epoch_tokens` is the number of tokens in one
    epoch of each source. `of` is the number of tokens that the shares divide.
    """
    amounts = {
        name: amount
        for name, source in sources.items()
        if (amount := amount_of(source, epoch_tokens[name])) is not None
    }
    weights = {
        name: exact(source.weight) for name, source in sources.items() if source.weight is not None
    }
    if not amounts:
        return weights
    if not weights:
        return amounts
    rest = max(Fraction(0), of - sum(amounts.values(), Fraction(0))) / sum(weights.values())
    return {**amounts, **{name: weight * rest for name, weight in weights.items()}}


def amount_of(source: SourceConfig, epoch_tokens: int) -> Fraction | None:
    """Return the tokens that a source is to contribute to the run; None if not configured."""
    if source.tokens is not None:
        return Fraction(source.tokens)
    return None if source.epochs is None else exact(source.epochs) * epoch_tokens


def batch_of_length(batch: Batch, length: int) -> Batch | None:
    """Return a batch with the same tokens per step in samples of another length.

    A micro-batch keeps its tokens or has fewer. Returns None if the sizes are not whole numbers.
    """
    if length == batch.sequence_length:
        return batch
    samples, rest = divmod(batch.tokens_per_step, length)
    micro_tokens = batch.micro_batch_size * batch.sequence_length
    ranks = batch.global_batch_size // (batch.micro_batch_size * batch.gradient_accumulation_steps)
    if rest or samples % ranks:
        return None
    each = samples // ranks
    micro = next((m for m in range(micro_tokens // length, 0, -1) if each % m == 0), None)
    if micro is None:
        return None
    return replace(
        batch,
        global_batch_size=samples,
        micro_batch_size=micro,
        gradient_accumulation_steps=each // micro,
        sequence_length=length,
    )


def batches_of_length(batches: Batches, length: int) -> Batches | None:
    """Return the batch of every step at another length; None if one of them is not possible."""
    phases = []
    for phase in batches.phases:
        batch = batch_of_length(phase.batch, length)
        if batch is None:
            return None
        phases.append(BatchPhase(first_step=phase.first_step, batch=batch))
    return Batches(tuple(phases))


def end_of(stage: StageConfig, schedule: ScheduleConfig, batches: Batches, total: int) -> int:
    """Return the first step after a stage; its `until` is a fraction in the schedule's unit."""
    if stage.until_step is not None:
        return stage.until_step
    if stage.until_tokens is not None:
        return batches.steps_for(stage.until_tokens)
    if stage.until is None:
        return total
    return steps_of_share(stage.until, total, partial(position_of, schedule, batches))


def stages_of(
    data: DataConfig,
    training: TrainingConfig,
    schedule: ScheduleConfig,
    batches: Batches,
    total: int,
) -> tuple[DataStage, ...]:
    """Return the data stages of a run that passed the rules; a single one without `data.stages`."""
    found: list[DataStage] = []
    first_step = first_sample = 0
    for stage in data.stages or [StageConfig()]:
        of_length = batches_of_length(batches, stage.sequence_length or training.sequence_length)
        assert of_length is not None
        own = stage.weights
        weights = None if own is None else {name: exact(weight) for name, weight in own.items()}
        made = DataStage(
            first_step=first_step,
            end_step=min(total, end_of(stage, schedule, batches, total)),
            first_sample=first_sample,
            batches=of_length,
            weights=weights,
        )
        found.append(made)
        first_step, first_sample = made.end_step, first_sample + made.samples
    return tuple(found)


def stages_of_plan(plan: RunPlan) -> tuple[DataStage, ...]:
    """Return the data stages of a plan; a single one without `data.stages`."""
    config = plan.config
    return stages_of(config.data, config.training, config.schedule, plan.batches, plan.total_steps)


def largest_batches(sketch: LayoutPlan) -> tuple[Batch, ...]:
    """Return the largest batch of each sequence length in a run, the config's own length first.

    Stages whose length divides into no whole batch are left out: a rule refuses them.
    """
    lengths = {stage.sequence_length or 0 for stage in sketch.config.data.stages}
    others = sorted(lengths - {0, sketch.batch.sequence_length})
    found = (batch_of_length(sketch.batch, length) for length in others)
    return (sketch.batch, *(batch for batch in found if batch is not None))


@dataclass(frozen=True, slots=True)
class StagedBatches:
    """Batch of a step, by the data stage that the run's position is in.

    A position is a step and the index of the next sample. If batches were skipped, the index is
    ahead of the step. The index alone decides the stage, so the samples of a stage do not depend on
    skipped batches.
    """

    stages: tuple[DataStage, ...]
    """All data stages of the run, in order."""

    def at(self, step: int, samples: int) -> tuple[int, Batch]:
        """Return the index of the first sample of the batch after `step` steps, and the batch.

        `samples` is the index of the next sample. A batch has samples of one length: a batch that
        would reach into a stage of another length begins with that stage instead. This moves the
        index forward only after skipped batches.
        """
        number = max(n for n, stage in enumerate(self.stages) if stage.first_sample <= samples)
        stage = self.stages[number]
        batch = stage.batches.at(step)
        for later in self.stages[number + 1 :]:
            if later.first_sample >= samples + batch.global_batch_size:
                break
            if later.sequence_length != stage.sequence_length:
                return later.first_sample, later.batches.at(step)
        return samples, batch
