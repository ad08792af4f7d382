"""Rules about how much is trained at a time and for how long."""

from __future__ import annotations

from collections.abc import Iterator

from trainctl.config.schema import ScheduleKind
from trainctl.errors import Finding
from trainctl.plan.rules.draft import Draft, choices, error, nearest_multiples, warning


def batch_is_possible(draft: Draft) -> Iterator[Finding]:
    """global = micro x accumulation x data has a solution in whole numbers."""
    training = draft.config.training
    asked = training.global_batch_size
    if draft.mesh is None or draft.batch is not None or asked is None:
        return
    data = draft.mesh.data
    micro, accumulation = training.micro_batch_size, training.gradient_accumulation_steps
    if micro is None and accumulation is not None:
        each, free = accumulation * data, "micro"
        product = f"accumulation {accumulation} x data {data}"
    else:
        micro = micro or 1
        each, free = micro * data, "accumulation"
        product = f"micro {micro} x data {data}"
    legal = " or ".join(f"{g} ({free} {g // each})" for g in nearest_multiples(asked, each))
    says = f"train_batch_size={asked} is not a multiple of {product} = {each}"
    hint = f"nearest legal: {legal}"
    if training.micro_batch_size is not None and accumulation is not None:
        total = each * accumulation
        product = f"micro {micro} x accumulation {accumulation} x data {data}"
        says = f"train_batch_size={asked} but {product} = {total}"
        if asked % each == 0:
            hint = (
                f"training.gradient_accumulation_steps={asked // each}, "
                f"or training.global_batch_size={total}"
            )
    yield error("training.global_batch_size", says, hint)


def batch_tokens_are_whole_sequences(draft: Draft) -> Iterator[Finding]:
    """A global batch in tokens stands alone, and says so where it has to be rounded."""
    training, key = draft.config.training, "training.global_batch_tokens"
    tokens = training.global_batch_tokens
    if tokens is None:
        return
    if training.global_batch_size is not None:
        yield error(
            key,
            f"{key}={tokens} and training.global_batch_size={training.global_batch_size} both say "
            "how large a step is",
            f"training.global_batch_size=null, or {key}=null: those are "
            f"{training.global_batch_size * training.sequence_length} tokens",
        )
    elif draft.mesh is not None and draft.batch is None:
        micro, accumulation = training.micro_batch_size, training.gradient_accumulation_steps
        yield error(
            key,
            f"{key}={tokens} is not what micro {micro} x accumulation {accumulation} x data "
            f"{draft.mesh.data} comes to",
            "leave training.gradient_accumulation_steps out: it is derived",
        )
    elif draft.batch is not None and draft.batch.tokens_per_step != tokens:
        batch = draft.batch
        change = batch.tokens_per_step / tokens - 1
        yield warning(
            key,
            f"{key}={tokens} is rounded to {batch.tokens_per_step} ({change:+.1%}): "
            f"{batch.global_batch_size} sequences of {batch.sequence_length}, as many on each rank",
            choices([batch.tokens_per_step], key),
        )


def sequence_fits_the_model(draft: Draft) -> Iterator[Finding]:
    """No position is beyond what the model is defined for."""
    model, length = draft.config.model, draft.config.training.sequence_length
    if length > model.max_position_embeddings:
        yield error(
            "training.sequence_length",
            f"training.sequence_length={length} is longer than "
            f"model.max_position_embeddings={model.max_position_embeddings}",
            f"training.sequence_length={model.max_position_embeddings} at most",
        )


def run_has_a_length(draft: Draft) -> Iterator[Finding]:
    """Steps or a token budget."""
    training = draft.config.training
    if training.steps is None and training.tokens is None:
        yield error(
            "training.steps",
            "neither training.steps nor training.tokens says how long the run is",
            "training.steps=1000, or training.tokens=2000000000",
        )


def stop_is_inside_the_run(draft: Draft) -> Iterator[Finding]:
    """Stopping after the end is no stop."""
    stop, total = draft.config.training.stop_after_steps, draft.total_steps
    if stop is not None and total is not None and stop > total:
        yield warning(
            "training.stop_after_steps",
            f"training.stop_after_steps={stop} is beyond the end of the run at step {total}",
            "leave it out, or make training.steps larger",
        )


def warmup_fits_the_run(draft: Draft) -> Iterator[Finding]:
    """The warmup ends within the run, unless it is a short trial of a longer one."""
    warmup, total = draft.config.schedule.warmup_steps, draft.total_steps
    if warmup is not None and total and warmup > total:
        yield warning(
            "schedule.warmup_steps",
            f"schedule.warmup_steps={warmup} is longer than the run of {total} steps: "
            "the learning rate never reaches its peak",
            f"schedule.warmup_steps={total} at most, or leave it out: warmup_fraction applies",
        )


def schedule_is_defined(draft: Draft) -> Iterator[Finding]:
    """What a schedule cannot do without."""
    schedule = draft.config.schedule
    if schedule.kind in (ScheduleKind.step, ScheduleKind.cyclic) and schedule.step_every is None:
        total = draft.total_steps or 1000
        yield error(
            "schedule.step_every",
            f"schedule.kind={schedule.kind.value} needs schedule.step_every",
            choices([max(1, total // 3)], "schedule.step_every"),
        )
    if schedule.kind is ScheduleKind.exponential and schedule.floor_ratio == 0:
        yield error(
            "schedule.floor_ratio",
            "schedule.kind=exponential decays to the floor and never reaches 0",
            "schedule.floor_ratio=0.01",
        )
