"""Changes of the sample order after a resume that cuts or orders the samples differently.

A sample is `training.sequence_length` tokens of the whole text, and the position of a run is a
count of samples: with n samples in a pass, count c is place c % n of pass c // n. The order of a
pass is a function of the seed, the pass and n alone (`trainctl.data.order`).
"""

from __future__ import annotations

from collections.abc import Iterator

from trainctl.config.schema import DataConfig, OnTooLong
from trainctl.options.data import spec_of
from trainctl.plan.mixture import sources_of
from trainctl.plan.types import RunPlan

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
            f"{_place(samples, was)}, and is {_place(samples, becomes)}"
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


def _place(samples: int, in_a_pass: int) -> str:
    passes, place = divmod(samples, in_a_pass)
    return f"number {place + 1:,} of pass {passes + 1}"
