"""Check whether a run may continue with another data plan: drawn samples must not change."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

from trainctl.data.order import Order, OrderedStage


def changes_of_past(before: Order, now: Order, until: int) -> Iterator[str]:
    """Yield a sentence for each change between two orders that affects samples drawn so far.

    Without a change, both orders give the same stage, source, epoch and index for every counter
    below `until`. Later samples may change: other stages, other sources, another end of a stage
    that has not been reached.

    Args:
        before: The order that the run was trained with.
        now: The order that it is to continue with.
        until: Number of samples drawn so far.
    """
    if until == 0:
        return
    if (before.seed, before.shuffle) != (now.seed, now.shuffle):
        yield "the seed, or data.shuffle, is another: all that was drawn had another order"
        return
    was = [stage for stage in before.stages if stage.first < until]
    becomes = [stage for stage in now.stages if stage.first < until]
    for number, (old, new) in enumerate(zip(was, becomes, strict=False)):
        for what, a, b in (
            ("begins at sample", old.first, new.first),
            ("has samples of", old.length, new.length),
            ("has the weights", _weights(old), _weights(new)),
        ):
            if a != b:
                yield f"stage {number + 1}, which has begun, {what} {b}, and it was {a}"
    if len(was) != len(becomes):
        yield (
            f"{len(becomes)} stages would have begun by sample {until:,}, and {len(was)} have: a "
            "stage can only be added for what is still to come"
        )
    drawn = {name for stage in was for name in stage.weights}
    sources = {source.name: source for source in now.sources}
    for old_source in before.sources:
        if old_source.name in drawn and sources.get(old_source.name) != old_source:
            yield (
                f"{old_source.name} was drawn from, and is now another text, or shuffled by other "
                "shards"
            )


def _weights(stage: OrderedStage) -> str:
    total = sum(stage.weights.values(), Fraction(0))
    shares = sorted((name, weight / total) for name, weight in stage.weights.items() if weight)
    return ", ".join(f"{name} {share}" for name, share in shares)
