"""Rules about batch sizes, the length of the run, and the schedule."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from trainctl.config.schema import ScheduleUnit
from trainctl.options.schedule import (
    WithDecay,
    WithFloor,
    WithInterval,
    WithMilestones,
    WithPatience,
    milestone_steps,
    spec_of,
)
from trainctl.plans.derive import (
    UNCOUNTED_STEPS,
    choices,
    derive_ramp,
    divisors,
    is_counted_in_epochs,
    is_ramp_entry,
    nearest_divisors,
    nearest_multiples,
    samples_of_epoch,
)
from trainctl.plans.schedule import decay_length, warmup_length
from trainctl.rules.plan.draft import Draft
from trainctl.rules.rule import WARNING, Problem, rule, warning_problem


@rule("TC020", "training.global_batch_size", example="recipe=tiny training.global_batch_size=20")
def batch_is_possible(draft: Draft) -> Iterator[Problem]:
    """global batch = micro-batch x accumulation steps x data-parallel ranks has a solution.

    The global batch is micro-batch times accumulation times data-parallel ranks, all whole numbers.
    A batch that is rounded in silence is another run, with another curve.

    Fix: Choose a batch that the message names; or leave micro-batch or accumulation out, and it is
    derived.
    """
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
    yield Problem(says, _with_the_same_batch(draft) + hint)


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


@rule(
    "TC026",
    "training.global_batch_tokens",
    example="recipe=tiny training.global_batch_tokens=20000",
)
def batch_tokens_are_whole_sequences(draft: Draft) -> Iterator[Problem]:
    """A global batch in tokens is a whole number of sequences per rank.

    A global batch in tokens becomes whole sequences, as many on each rank, and has to agree with
    the micro-batch and its accumulation where both are given.

    Fix: Choose a multiple of sequence length times ranks, which needs no rounding.
    """
    training, key = draft.config.training, "training.global_batch_tokens"
    tokens = training.global_batch_tokens
    if tokens is None:
        return
    if draft.mesh is not None and draft.batch is None:
        micro, accumulation = training.micro_batch_size, training.gradient_accumulation_steps
        yield Problem(
            f"{key}={tokens} is not what micro {micro} x accumulation {accumulation} x data "
            f"{draft.mesh.data} comes to",
            "leave training.gradient_accumulation_steps out: it is derived",
        )
    elif draft.batch is not None and draft.batch.tokens_per_step != tokens:
        batch = draft.batch
        change = batch.tokens_per_step / tokens - 1
        yield warning_problem(
            f"{key}={tokens} is rounded to {batch.tokens_per_step} ({change:+.1%}): "
            f"{batch.global_batch_size} sequences of {batch.sequence_length}, as many on each rank",
            choices([batch.tokens_per_step], key),
        )


@rule("TC021", "training.sequence_length", example="recipe=tiny training.sequence_length=4096")
def sequence_fits_the_model(draft: Draft) -> Iterator[Problem]:
    """The sequence length does not exceed the model's number of positions.

    Beyond max_position_embeddings a learned position table has no row, and rotary positions were
    never trained.

    Fix: Use a shorter sequence; or a longer model.max_position_embeddings where you train the
    positions (and model.rope_scaling for a model that is extended).
    """
    model, length = draft.config.model, draft.config.training.sequence_length
    if length > model.max_position_embeddings:
        yield Problem(
            f"training.sequence_length={length} is longer than "
            f"model.max_position_embeddings={model.max_position_embeddings}",
            f"training.sequence_length={model.max_position_embeddings} at most",
        )


@rule("TC022", "training.steps", example="recipe=tiny training.steps=null")
def run_has_a_length(draft: Draft) -> Iterator[Problem]:
    """The length of the run is given in steps, tokens or epochs.

    The schedule, the checkpoints and the time all follow from the length of the run, so there is no
    default for it.

    Fix: Set training.steps, training.tokens or training.epochs.
    """
    training = draft.config.training
    if (training.steps, training.tokens, training.epochs) == (None, None, None):
        yield Problem(
            "neither training.steps nor training.tokens nor training.epochs says how long the run "
            "is",
            "training.steps=1000, or training.tokens=2000000000"
            + ("" if draft.config.recipe else "; or begin with a recipe, such as recipe=tiny"),
        )


@rule(
    "TC067",
    "training.epochs",
    "training.epoch_tokens",
    example="recipe=tiny training.steps=null training.epochs=2 data.factory=own:texts",
    files={"own.py": "def texts(plan):\n    return ['Some text.'], []\n"},
)
def epoch_has_a_length(draft: Draft) -> Iterator[Problem]:
    """An epoch has a known number of tokens.

    How many steps an epoch has depends on the corpus. `launch` reads and counts it; a plan reads
    nothing, and the text of your own function is known to that alone.

    Fix: Set training.epoch_tokens=NUMBER, or training.tokens.
    """
    config, key = draft.config, "training.epoch_tokens"
    training = config.training
    if not is_counted_in_epochs(training):
        return
    counted = f"training.epochs={training.epochs:g}: how many steps that is depends on the corpus"
    if training.epoch_tokens is None and config.trains_itself and config.data.factory is None:
        yield warning_problem(
            f"{counted}, which has not been read here yet: {UNCOUNTED_STEPS} stand for it",
            f"trainctl launch reads and counts it, or {key}=NUMBER",
        )
    elif training.epoch_tokens is None:
        yield Problem(f"{counted}, which only your own code knows", f"{key}=NUMBER")
    elif samples_of_epoch(training) == 0:
        yield Problem(
            f"{key}={training.epoch_tokens} is less than one sample of "
            f"training.sequence_length={training.sequence_length}",
            "more text, or a shorter training.sequence_length",
            key=key,
        )


@rule(
    "TC023",
    "training.stop_after_steps",
    severity=WARNING,
    example="recipe=tiny training.stop_after_steps=200",
)
def stop_is_inside_the_run(draft: Draft) -> Iterator[Problem]:
    """training.stop_after_steps lies within the run.

    stop_after_steps stops a run early while its schedule stays that of the whole. Beyond the end it
    stops nothing.

    Fix: Leave it out, or lengthen training.steps.
    """
    stop, total = draft.config.training.stop_after_steps, draft.total_steps
    if stop is not None and total is not None and stop > total:
        yield Problem(
            f"training.stop_after_steps={stop} is beyond the end of the run at step {total}",
            "leave it out, or make training.steps larger",
        )


@rule("TC024", "schedule.*", severity=WARNING, example="recipe=tiny schedule.warmup_steps=200")
def warmup_fits_the_run(draft: Draft) -> Iterator[Problem]:
    """The warmup ends within the run.

    The learning rate rises over the whole run and never reaches optimizer.lr. Mostly a warmup that
    was written for a long run, in a short trial of it.

    Fix: Use a shorter warmup, or schedule.warmup_fraction, which follows the length of the run. For
    a trial of a long run keep its length and set training.stop_after_steps.
    """
    schedule, total = draft.config.schedule, draft.total_steps
    if not total or draft.batches is None:
        return
    warmup, _ = warmup_length(schedule, total, draft.batches)
    if warmup > total:
        name = "warmup_steps" if schedule.warmup_steps is not None else "warmup_tokens"
        most = total if name == "warmup_steps" else draft.batches.tokens_before(total)
        yield Problem(
            f"schedule.{name}={getattr(schedule, name)} is longer than the run of {total} steps: "
            "the learning rate never reaches its peak",
            f"schedule.{name}={most} at most, or leave it out: warmup_fraction applies",
            key=f"schedule.{name}",
        )


@rule(
    "TC066",
    "schedule.*",
    severity=WARNING,
    example="recipe=tiny schedule=wsd schedule.warmup_steps=10 schedule.decay_steps=159",
)
def decay_fits_the_run(draft: Draft) -> Iterator[Problem]:
    """The decay of the wsd schedule starts after the warmup.

    A decay that is longer than what warmup leaves is cut: the learning rate peaks late and falls at
    once.

    Fix: Use a shorter decay, or schedule.decay_fraction.
    """
    schedule, total = draft.config.schedule, draft.total_steps
    if not isinstance(schedule, WithDecay) or not total or draft.batches is None:
        return
    warmup, _ = warmup_length(schedule, total, draft.batches)
    decay, _ = decay_length(schedule, total, draft.batches)
    name = "decay_steps" if schedule.decay_steps is not None else "decay_tokens"
    if warmup < total < warmup + 1 + decay and getattr(schedule, name) is not None:
        yield Problem(
            f"schedule.{name}={getattr(schedule, name)} ({decay} steps) is more than the run of "
            f"{total} steps has left after {warmup} of warmup: the decay is shorter",
            "leave it out: decay_fraction applies",
            key=f"schedule.{name}",
        )


@rule(
    "TC065",
    "training.batch_ramp",
    example="recipe=tiny training.global_batch_size=16 'training.batch_ramp=[{until_steps: 5, "
    "global_batch_size: 12}]'",
)
def ramp_is_possible(draft: Draft) -> Iterator[Problem]:
    """Batch sizes of a ramp ascend, are whole micro-batches on every rank, and lie within the run.

    A ramp begins with a small batch and grows. Each of its batches is made of the same
    micro-batches on the same ranks, so it is a multiple of their product.

    Fix: Use multiples of micro-batch times data-parallel ranks, ascending, ending inside the run.
    """
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
            yield Problem(
                f"{name} has the keys {', '.join(entry) or '(none)'}",
                f"as in '{key}=[{{until_steps: 500, global_batch_size: {each}}}]', or with "
                "until_tokens in place of until_steps",
            )
        elif size <= 0 or size % each:
            product = f"micro {batch.micro_batch_size} x data {each // batch.micro_batch_size}"
            yield Problem(
                f"{name}: global_batch_size={size} is not a multiple of {product} = {each}",
                f"nearest legal: {choices(nearest_multiples(max(size, 1), each))}, "
                "or a smaller training.micro_batch_size",
            )
        elif size >= following:
            yield Problem(
                f"{name}: global_batch_size={size} is not smaller than the next, {following}",
                "a ramp grows up to training.global_batch_size",
            )
        elif derive_ramp(up_to_here, batch)[0] is None:
            yield Problem(
                f"{name} ends where the one before it does, or earlier",
                "each until_steps or until_tokens is a point of the run, and larger than the last",
            )
        else:
            continue
        return  # the following checks depend on it


@rule(
    "TC025",
    "schedule.floor_ratio",
    "schedule.step_every",
    "schedule.step_every_tokens",
    example="recipe=tiny schedule=exponential schedule.floor_ratio=0",
)
def schedule_is_defined(draft: Draft) -> Iterator[Problem]:
    """A schedule has every value that it requires.

    Some schedules need one number more: an exponential decay has to end above 0, a staircase has an
    interval.

    Fix: Set the value that the message names.
    """
    schedule, total = draft.config.schedule, draft.total_steps or 1000
    unit = draft.batch.tokens_per_step if draft.batch is not None else 1
    name, third = "step_every", max(1, total // 3)
    if schedule.unit is ScheduleUnit.tokens:
        name, third = "step_every_tokens", third * unit
    if isinstance(schedule, WithInterval) and getattr(schedule, name) is None:
        yield Problem(
            f"schedule.kind={schedule.kind} needs schedule.{name}"
            + (" with schedule.unit=tokens" if schedule.unit is ScheduleUnit.tokens else ""),
            choices([third], f"schedule.{name}"),
            key=f"schedule.{name}",
        )
    why_not_zero = spec_of(schedule).why_not_zero
    if why_not_zero and isinstance(schedule, WithFloor) and schedule.floor_ratio == 0:
        yield Problem(f"schedule.kind={schedule.kind} {why_not_zero}", "schedule.floor_ratio=0.01")


@rule(
    "TC062",
    "schedule.*",
    example="recipe=tiny schedule=milestones schedule.milestones=[50,100,200]",
)
def milestones_are_in_the_run(draft: Draft) -> Iterator[Problem]:
    """Milestones ascend and lie within the run.

    A drop behind the end of the run never comes, and drops out of order were mistyped.

    Fix: Give ascending milestones inside the run; milestone_fractions follow its length.
    """
    schedule, total = draft.config.schedule, draft.total_steps
    if not isinstance(schedule, WithMilestones):
        return
    name = "milestones" if schedule.milestones else "milestone_fractions"
    key, listed = f"schedule.{name}", list(getattr(schedule, name))
    most = 1 if name == "milestone_fractions" else None
    if not listed:
        message = f"schedule.kind={schedule.kind} has none to drop at"
        yield Problem(message, "schedule.milestones=[800,900]", key=key)
    elif listed != sorted(set(listed)) or listed[0] <= 0 or (most and listed[-1] >= most):
        bounds = "between 0 and 1" if most else "above 0"
        yield Problem(
            f"{key}={_listed(listed)}: each is {bounds}, and larger than the one before",
            f"{key}={_listed(sorted({x for x in listed if 0 < x < (most or x + 1)}) or [0.8])}",
            key=key,
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
            yield warning_problem(
                f"{key}: the run of {total} steps ends before {_listed(late)}",
                "leave them out, or give schedule.milestone_fractions",
                key=key,
            )


@rule(
    "TC063",
    "schedule.kind",
    "training.evaluation_samples",
    "training.evaluate_every_steps",
    example="recipe=tiny schedule=plateau training.evaluation_samples=0",
)
def plateau_is_measured(draft: Draft) -> Iterator[Problem]:
    """A schedule that waits for the held-out loss to stall has an evaluation.

    The plateau schedule lowers the rate when the held-out loss stalls. Nothing measures it here, so
    the rate would never fall.

    Fix: Set training.evaluate_every_steps and training.evaluation_samples, and hold text out.
    """
    config, follows = draft.config, f"schedule.kind={draft.config.schedule.kind} follows"
    if not isinstance(config.schedule, WithPatience):
        return
    total, training = draft.total_steps or 1000, config.training
    if not config.trains_itself:
        yield Problem(
            f"{follows} the held-out loss of trainctl's trainer, and a program of your own trains "
            "here",
            "another schedule",
        )
    elif not training.evaluation_samples:
        yield Problem(
            f"{follows} the held-out loss, and nothing is evaluated",
            "training.evaluation_samples=64",
            key="training.evaluation_samples",
        )
    elif training.evaluate_every_steps is None:
        yield Problem(
            f"{follows} the held-out loss, which is measured only at the end",
            f"training.evaluate_every_steps={max(1, total // 20)}",
            key="training.evaluate_every_steps",
        )


def _listed(values: list[float]) -> str:
    """Return a list of numbers as it is written on the command line."""
    return f"[{','.join(f'{value:g}' if value < 1 else str(value) for value in values)}]"
