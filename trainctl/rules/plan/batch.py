"""Rules about batch sizes, the length of the run, and the schedule."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from trainctl.config.schema import ScheduleUnit
from trainctl.errors import Finding
from trainctl.options.schedule import (
    WithDecay,
    WithFloor,
    WithInterval,
    WithMilestones,
    WithPatience,
    milestone_steps,
    spec_of,
)
from trainctl.plan.derive import (
    UNCOUNTED_STEPS,
    derive_ramp,
    is_counted_in_epochs,
    is_ramp_entry,
    samples_of_epoch,
)
from trainctl.plan.nearest import divisors, nearest_divisors
from trainctl.plan.schedule import decay_length, warmup_length
from trainctl.rules.plan.draft import Draft, choices, error, nearest_multiples, warning


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
    yield error("training.global_batch_size", says, _with_the_same_batch(draft) + hint)


def _with_the_same_batch(draft: Draft) -> str:
    """Return a hint at settings with the same batch on these ranks or fewer; empty if not needed.

    Training does not depend on the ranks as long as the global batch stays the same.
    """
    training, mesh = draft.config.training, draft.mesh
    asked = training.global_batch_size
    assert asked is not None and mesh is not None
    micro, accumulation = training.micro_batch_size, training.gradient_accumulation_steps
    if asked % mesh.data:
        ranks = max(size for size in divisors(asked) if size <= mesh.data)
        others = mesh.world_size // mesh.data
        devices = f"{ranks * others} device{'s' if ranks * others > 1 else ''}"
        return f"the same batch on {devices} (data {ranks}); else on these, "
    each = asked // mesh.data
    if micro is None:
        near = nearest_divisors(each, accumulation or 1)[0]
        same = f"training.gradient_accumulation_steps={near}, with micro {each // near}"
    elif accumulation is not None and each % micro == 0:
        return ""
    else:
        near = nearest_divisors(each, micro)[0]
        if accumulation is None:
            same = f"training.micro_batch_size={near}, with accumulation {each // near}"
        else:
            same = f"training.micro_batch_size={near} "
            same += f"training.gradient_accumulation_steps={each // near}"
    return f"the same batch: {same}; else "


def batch_tokens_are_whole_sequences(draft: Draft) -> Iterator[Finding]:
    """A global batch in tokens stands alone, and says so where it has to be rounded."""
    training, key = draft.config.training, "training.global_batch_tokens"
    tokens = training.global_batch_tokens
    if tokens is None:
        return
    if draft.mesh is not None and draft.batch is None:
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
    """Steps, a token budget or passes over the data."""
    training = draft.config.training
    if (training.steps, training.tokens, training.epochs) == (None, None, None):
        yield error(
            "training.steps",
            "neither training.steps nor training.tokens nor training.epochs says how long the run "
            "is",
            "training.steps=1000, or training.tokens=2000000000",
        )


def epoch_has_a_length(draft: Draft) -> Iterator[Finding]:
    """Passes over the data become steps once its length is known; a plan reads no corpus."""
    config, key = draft.config, "training.epoch_tokens"
    training = config.training
    if not is_counted_in_epochs(training):
        return
    counted = f"training.epochs={training.epochs:g}: how many steps that is depends on the corpus"
    if training.epoch_tokens is None and config.trains_itself and config.data.factory is None:
        yield warning(
            "training.epochs",
            f"{counted}, which has not been read here yet: {UNCOUNTED_STEPS} stand for it",
            f"trainctl launch reads and counts it, or {key}=NUMBER",
        )
    elif training.epoch_tokens is None:
        yield error(
            "training.epochs", f"{counted}, which only your own code knows", f"{key}=NUMBER"
        )
    elif samples_of_epoch(training) == 0:
        yield error(
            key,
            f"{key}={training.epoch_tokens} is less than one sample of "
            f"training.sequence_length={training.sequence_length}",
            "more text, or a shorter training.sequence_length",
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
    schedule, total = draft.config.schedule, draft.total_steps
    if not total or draft.batches is None:
        return
    warmup, _ = warmup_length(schedule, total, draft.batches)
    if warmup > total:
        name = "warmup_steps" if schedule.warmup_steps is not None else "warmup_tokens"
        most = total if name == "warmup_steps" else draft.batches.tokens_before(total)
        yield warning(
            f"schedule.{name}",
            f"schedule.{name}={getattr(schedule, name)} is longer than the run of {total} steps: "
            "the learning rate never reaches its peak",
            f"schedule.{name}={most} at most, or leave it out: warmup_fraction applies",
        )


def decay_fits_the_run(draft: Draft) -> Iterator[Finding]:
    """The decay of wsd, when its length is given, lies behind the warmup."""
    schedule, total = draft.config.schedule, draft.total_steps
    if not isinstance(schedule, WithDecay) or not total or draft.batches is None:
        return
    warmup, _ = warmup_length(schedule, total, draft.batches)
    decay, _ = decay_length(schedule, total, draft.batches)
    name = "decay_steps" if schedule.decay_steps is not None else "decay_tokens"
    if warmup < total < warmup + 1 + decay and getattr(schedule, name) is not None:
        yield warning(
            f"schedule.{name}",
            f"schedule.{name}={getattr(schedule, name)} ({decay} steps) is more than the run of "
            f"{total} steps has left after {warmup} of warmup: the decay is shorter",
            "leave it out: decay_fraction applies",
        )


def ramp_is_possible(draft: Draft) -> Iterator[Finding]:
    """Each batch of the ramp is made of whole micro-batches, larger than the last, and trained."""
    training, batch, key = draft.config.training, draft.batch, "training.batch_ramp"
    if not training.batch_ramp or batch is None:
        return
    each = batch.global_batch_size // batch.gradient_accumulation_steps
    for index, entry in enumerate(training.batch_ramp):
        name, size = f"{key}[{index}]", entry.get("global_batch_size", 0)
        following = [*training.batch_ramp[index + 1 :], {}][0].get("global_batch_size")
        following = batch.global_batch_size if following is None else following
        up_to_here = replace(training, batch_ramp=training.batch_ramp[: index + 1])
        if not is_ramp_entry(entry):
            yield error(
                key,
                f"{name} has the keys {', '.join(entry) or '(none)'}",
                f"as in '{key}=[{{until_steps: 500, global_batch_size: {each}}}]', or with "
                "until_tokens in place of until_steps",
            )
        elif size <= 0 or size % each:
            product = f"micro {batch.micro_batch_size} x data {each // batch.micro_batch_size}"
            yield error(
                key,
                f"{name}: global_batch_size={size} is not a multiple of {product} = {each}",
                f"nearest legal: {choices(nearest_multiples(max(size, 1), each))}, "
                "or a smaller training.micro_batch_size",
            )
        elif size >= following:
            yield error(
                key,
                f"{name}: global_batch_size={size} is not smaller than the next, {following}",
                "a ramp grows up to training.global_batch_size",
            )
        elif derive_ramp(up_to_here, batch)[0] is None:
            yield error(
                key,
                f"{name} ends where the one before it does, or earlier",
                "each until_steps or until_tokens is a point of the run, and larger than the last",
            )
        else:
            continue
        return  # the following checks depend on it


def schedule_is_defined(draft: Draft) -> Iterator[Finding]:
    """What a schedule cannot do without."""
    schedule, total = draft.config.schedule, draft.total_steps or 1000
    unit = draft.batch.tokens_per_step if draft.batch is not None else 1
    name, third = "step_every", max(1, total // 3)
    if schedule.unit is ScheduleUnit.tokens:
        name, third = "step_every_tokens", third * unit
    if isinstance(schedule, WithInterval) and getattr(schedule, name) is None:
        yield error(
            f"schedule.{name}",
            f"schedule.kind={schedule.kind} needs schedule.{name}"
            + (" with schedule.unit=tokens" if schedule.unit is ScheduleUnit.tokens else ""),
            choices([third], f"schedule.{name}"),
        )
    why_not_zero = spec_of(schedule).why_not_zero
    if why_not_zero and isinstance(schedule, WithFloor) and schedule.floor_ratio == 0:
        yield error(
            "schedule.floor_ratio",
            f"schedule.kind={schedule.kind} {why_not_zero}",
            "schedule.floor_ratio=0.01",
        )


def milestones_are_in_the_run(draft: Draft) -> Iterator[Finding]:
    """Each drop comes after the one before it, and within the run."""
    schedule, total = draft.config.schedule, draft.total_steps
    if not isinstance(schedule, WithMilestones):
        return
    name = "milestones" if schedule.milestones else "milestone_fractions"
    key, listed = f"schedule.{name}", list(getattr(schedule, name))
    most = 1 if name == "milestone_fractions" else None
    if not listed:
        message = f"schedule.kind={schedule.kind} has none to drop at"
        yield error(key, message, "schedule.milestones=[800,900]")
    elif listed != sorted(set(listed)) or listed[0] <= 0 or (most and listed[-1] >= most):
        bounds = "between 0 and 1" if most else "above 0"
        yield error(
            key,
            f"{key}={_listed(listed)}: each is {bounds}, and larger than the one before",
            f"{key}={_listed(sorted({x for x in listed if 0 < x < (most or x + 1)}) or [0.8])}",
        )
    elif total and draft.batches is not None:
        late = [
            shown
            for shown, step in zip(
                listed, milestone_steps(schedule, total, draft.batches), strict=True
            )
            if step >= total
        ]
        if late:
            yield warning(
                key,
                f"{key}: the run of {total} steps ends before {_listed(late)}",
                "leave them out, or give schedule.milestone_fractions",
            )


def plateau_is_measured(draft: Draft) -> Iterator[Finding]:
    """What waits for the held-out loss to stall needs one, again and again."""
    config, follows = draft.config, f"schedule.kind={draft.config.schedule.kind} follows"
    if not isinstance(config.schedule, WithPatience):
        return
    total, training = draft.total_steps or 1000, config.training
    if not config.trains_itself:
        yield error(
            "schedule.kind",
            f"{follows} the held-out loss of trainctl's trainer, and a program of your own trains "
            "here",
            "another schedule",
        )
    elif not training.evaluation_samples:
        yield error(
            "training.evaluation_samples",
            f"{follows} the held-out loss, and nothing is evaluated",
            "training.evaluation_samples=64",
        )
    elif training.evaluate_every_steps is None:
        yield error(
            "training.evaluate_every_steps",
            f"{follows} the held-out loss, which is measured only at the end",
            f"training.evaluate_every_steps={max(1, total // 20)}",
        )


def _listed(values: list[float]) -> str:
    """Return a list of numbers as it is written on the command line."""
    return f"[{','.join(f'{value:g}' if value < 1 else str(value) for value in values)}]"
