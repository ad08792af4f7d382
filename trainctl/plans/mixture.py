"""Data sources and stages of a run, from its configuration alone; no text is read or counted.

A sample is `training.sequence_length` tokens of the whole text, and the position of a run is a
count of samples: with n samples in a pass, count c is place c % n of pass c // n. The order of a
pass is a function of the seed, the pass and n alone (`trainctl.data.order`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial

from trainctl.config.schema import (
    DataConfig,
    OnTooLong,
    ScheduleConfig,
    SourceConfig,
    StageConfig,
    TrainingConfig,
)
from trainctl.options.data import spec_of
from trainctl.options.schedule import schedule_position, steps_of_share
from trainctl.plans.types import Batch, Batches, BatchPhase, LayoutPlan, RunPlan

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


def keyed_sources(data: DataConfig) -> dict[str, DataConfig]:
    """Return `sources_of` by the keys of the sections, such as `data.sources.code`."""
    return {
        f"data.sources.{name}" if data.sources else "data": section
        for name, section in sources_of(data).items()
    }


def exact_fraction(weight: float) -> Fraction:
    """Return a weight as the decimal fraction it was written as: 0.7 is 7/10."""
    return Fraction(repr(weight))


def are_valid_weights(weights: Iterable[float]) -> bool:
    """Return True if the weights are fractions with the sum 1, or whole numbers in proportion."""
    parts = [exact_fraction(weight) for weight in weights]
    return sum(parts) == 1 or all(part.denominator == 1 for part in parts)


def shares_of_quotas(
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
        if (amount := token_quota(source, epoch_tokens[name])) is not None
    }
    weights = {
        name: exact_fraction(source.weight)
        for name, source in sources.items()
        if source.weight is not None
    }
    if not amounts:
        return weights
    if not weights:
        return amounts
    rest = max(Fraction(0), of - sum(amounts.values(), Fraction(0))) / sum(weights.values())
    return {**amounts, **{name: weight * rest for name, weight in weights.items()}}


def token_quota(source: SourceConfig, epoch_tokens: int) -> Fraction | None:
    """Return the tokens that a source is to contribute to the run; None if not configured."""
    if source.tokens is not None:
        return Fraction(source.tokens)
    return None if source.epochs is None else exact_fraction(source.epochs) * epoch_tokens


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


def stage_end_step(
    stage: StageConfig, schedule: ScheduleConfig, batches: Batches, total: int
) -> int:
    """Return the first step after a stage; its `until` is a fraction in the schedule's unit."""
    if stage.until_step is not None:
        return stage.until_step
    if stage.until_tokens is not None:
        return batches.steps_for(stage.until_tokens)
    if stage.until is None:
        return total
    return steps_of_share(stage.until, total, partial(schedule_position, schedule, batches))


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
        weights = (
            None if own is None else {name: exact_fraction(weight) for name, weight in own.items()}
        )
        made = DataStage(
            first_step=first_step,
            end_step=min(total, stage_end_step(stage, schedule, batches, total)),
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


_MIXED = "of the text, some is seen again in this pass and some is left out"


def samples_in(tokens: int, sequence_length: int) -> int:
    """Return the number of samples in a text of `tokens` tokens; the last sample needs one more
    token for its label.
    """
    return max(0, (tokens - 1) // sequence_length)


def changes_of_order(before: RunPlan, now: RunPlan, samples: int, tokens: int) -> Iterator[str]:
    """Yield the changes of the sample order, as sentences, when a run resumes with another plan.

    `before` is the plan that the run was trained with, and `now` the plan that it resumes with.
    `samples` is the number of samples drawn so far. `tokens` is the length of the training text.
    """
    old, new = before.batch.sequence_length, now.batch.sequence_length
    was, becomes = samples_in(tokens, old), samples_in(tokens, new)
    shuffled = before.config.data.shuffle, now.config.data.shuffle
    seeds = before.config.training.seed, now.config.training.seed
    if samples == 0 or not was or not becomes:
        return
    if old != new:
        yield (
            f"training.sequence_length={new} cuts the text into {becomes:,} samples, and {old} cut "
            f"it into {was:,}. The count goes on: the next sample was to be "
            f"{_pass_and_number(samples, was)}, and is {_pass_and_number(samples, becomes)}"
        )
        if any(shuffled):
            yield f"the new samples have an order of their own: {_MIXED}"
        else:
            here, there = samples % was * old, samples % becomes * new
            yield f"it begins at token {there:,} of the text, and was to begin at {here:,}"
        yield "held-out losses from here on are of other samples: they do not compare with earlier"
    elif before.config.data.packing is not now.config.data.packing:
        yield f"data.packing={now.config.data.packing.value} makes other samples: {_MIXED}"
        yield "held-out losses from here on are of other samples: they do not compare with earlier"
    elif changes_overlong_handling(before.config.data, now.config.data):
        kept = now.config.data.on_too_long.value
        yield f"data.on_too_long={kept} packs other conversations: {_MIXED}"
        yield "held-out losses from here on are of other samples: they do not compare with earlier"
    elif shuffled[0] != shuffled[1]:
        how = "at random" if shuffled[1] else "as the text has it"
        yield f"data.shuffle={str(shuffled[1]).lower()} takes what follows {how}: {_MIXED}"
    elif shuffled[1] and seeds[0] != seeds[1]:
        yield f"training.seed={seeds[1]} draws what follows in another order: {_MIXED}"


def changes_overlong_handling(before: DataConfig, now: DataConfig) -> bool:
    """Return True if overlong conversations change between being cut and being dropped."""
    rules = {before.on_too_long, now.on_too_long}
    has_chats = any(spec_of(each).encoder for each in sources_of(now).values())
    return has_chats and rules == {OnTooLong.cut, OnTooLong.drop}


def _pass_and_number(samples: int, in_a_pass: int) -> str:
    passes, place = divmod(samples, in_a_pass)
    return f"number {place + 1:,} of pass {passes + 1}"
