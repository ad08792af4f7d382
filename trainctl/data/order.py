"""Sample order of a mixture: stage, source, epoch and index as functions of the sample counter.

Samples of a run are counted from 0, over all ranks and stages. The sample of a counter is a
function of the seed, the names and lengths of the sources, and the stages that have begun. It does
not depend on ranks, batches or earlier samples. So every layout and every resume sees the same
sequence, a run stores one number, and adding a stage changes nothing before it.
`docs/data-order.md` describes the algorithm.

Sources are interleaved so that every prefix is less than one draw off the shares. Weights become
whole numbers q of sum Q; a period has Q slots. Draw k of a source may take the slots from
``floor(k Q / q)`` to ``ceil((k + 1) Q / q) - 1``. These are the windows of a pfair task of rate
q / Q (Baruah, Cohen, Plaxton and Varvel, "Proportionate progress", 1996). The rates have the sum 1,
so a schedule that meets all windows exists, and on one processor earliest deadline first finds it
(Tijdeman, "The chairman assignment problem", 1980). Then ``floor(m q / Q) <= drawn <= ceil(m q /
Q)`` at every prefix m.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from itertools import pairwise
from math import floor, gcd, lcm
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from trainctl.data.source_sampler import (
    SHARD_TOKENS,
    FixedLengthSegment,
    Integers,
    derive_key,
    epoch_and_index,
    permute,
    source_key,
)
from trainctl.plans.mixture import samples_in

_RANK_ORDER = -2
"""Value hashed in place of a source's name for the permutation of a batch over the ranks."""


@dataclass(frozen=True, slots=True)
class OrderedSource:
    """A source as the order sees it."""

    name: str
    """Name of the source. Its permutations depend on this, not on which other sources there
    are.
    """
    tokens: int
    window: int | None = None
    """Number of shards that are shuffled together; None shuffles the whole text."""


@dataclass(frozen=True, slots=True)
class OrderedStage:
    """A stage of one mixture and one sample length."""

    first: int
    """Counter of the stage's first sample."""
    length: int
    """Tokens per sample."""
    weights: Mapping[str, Fraction]
    """Shares of the tokens by source, each above 0; they need not sum to 1."""


@dataclass(frozen=True, slots=True)
class SampleCoordinates:
    """Coordinates of samples: arrays with the shape of the counters."""

    stage: Integers
    source: Integers
    """Number of the source: index into `SampleOrder.names`."""
    epoch: Integers
    index: Integers
    """Index of the sample in its source: its tokens begin at index x length of the stage."""


class TokenOccurrence(NamedTuple):
    """One occurrence of a token in a run: sample counter, stage, and epoch of the source."""

    counter: int
    stage: int
    epoch: int


class SampleOrder:
    """Sample order of a run.

    Args:
        sources: In any order, including sources that no stage draws from.
        stages: Sorted by first counter, the first from 0.
        shuffle: False reads each source in the order of its text.
        shard_tokens: Tokens of a shard: a multiple of every length where a source has a window.

    Raises:
        ValueError: A stage draws from a source that has no sample of its length.
    """

    def __init__(
        self,
        seed: int,
        sources: Sequence[OrderedSource],
        stages: Sequence[OrderedStage],
        *,
        shuffle: bool = True,
        shard_tokens: int = SHARD_TOKENS,
    ) -> None:
        self.seed, self.shuffle = seed, shuffle
        self.stages = tuple(stages)
        # Sorted by name, so that ties between sources do not depend on the order of listing.
        self.sources = tuple(sorted(sources, key=lambda source: source.name))
        self.names = tuple(source.name for source in self.sources)
        self._firsts = np.array([stage.first for stage in self.stages], dtype=np.int64)
        self._schedules = [self._schedule_of_stage(stage) for stage in self.stages]
        self._segments = [
            _segments_by_stage(
                source_key(seed, source.name),
                source,
                number,
                self.stages,
                self._schedules,
                shuffle,
                shard_tokens,
            )
            for number, source in enumerate(self.sources)
        ]
        self._segment_arrays = [
            _segment_arrays([stage_segments[stage] for stage_segments in self._segments])
            for stage in range(len(self.stages))
        ]

    def at(self, counters: npt.ArrayLike) -> SampleCoordinates:
        """Return stage, source, epoch and index of each counter (from 0, any shape).

        It is fastest for thousands of counters at a time.
        """
        given = np.asarray(counters, dtype=np.int64)
        flat = given.reshape(-1)
        stages = np.searchsorted(self._firsts, flat, "right") - 1
        found = SampleCoordinates(stages, *(np.empty_like(flat) for _ in range(3)))
        for number in np.unique(stages):
            chosen = np.flatnonzero(stages == number)
            schedule, stage = self._schedules[number], self.stages[number]
            period, slot = np.divmod(flat[chosen] - stage.first, schedule.size)
            sources = schedule.source[slot]
            draws = period * schedule.quotas[sources] + schedule.rank[slot]
            found.source[chosen] = sources
            before, tail, *numbers = (each[sources] for each in self._segment_arrays[number])
            draws += before
            epoch, index = epoch_and_index(draws, numbers, self.shuffle)
            found.epoch[chosen], found.index[chosen] = epoch, index
            of_tail = draws < tail
            for source in np.unique(sources[of_tail]):
                mine = np.flatnonzero(of_tail & (sources == source))
                epoch, index = self._segments[source][number][0].at(draws[mine])
                found.epoch[chosen[mine]], found.index[chosen[mine]] = epoch, index
        columns = (found.stage, found.source, found.epoch, found.index)
        return SampleCoordinates(*(column.reshape(given.shape) for column in columns))

    def order_over_ranks(self, first: int, size: int) -> Integers:
        """Return the counters of a batch in the order in which ranks take them.

        `first` is the batch's first counter, `size` its number of samples. Sources alternate
        regularly: in a 1:1 mixture every second sample has the same source, and a rank could get
        samples of one source only. So the batch is permuted, unless it has a single source.
        """
        number = int(np.searchsorted(self._firsts, first, "right")) - 1
        counters = np.arange(first, first + size, dtype=np.int64)
        if np.count_nonzero(self._schedules[number].quotas) < 2:
            return counters
        return counters[permute(counters - first, size, derive_key(self.seed, _RANK_ORDER, first))]

    def draws_before(self, counter: int) -> dict[str, int]:
        """Return the number of samples of each source before a counter, over all sample lengths."""
        total = dict.fromkeys(self.names, 0)
        ends = [*(stage.first for stage in self.stages[1:]), counter]
        for stage, schedule, end in zip(self.stages, self._schedules, ends, strict=True):
            draws = max(0, min(end, counter) - stage.first)
            for number, name in enumerate(self.names):
                total[name] += schedule.draws_before(number, draws)
        return total

    def occurrences(self, source: str, token: int, until: int) -> list[TokenOccurrence]:
        """Return where a token occurs before counter `until`, by counter: the inverse of `at`.

        `token` is a position in the source's training text.
        """
        number = self.names.index(source)
        ends = [*(stage.first for stage in self.stages[1:]), until]
        found = []
        for index, (stage, end) in enumerate(zip(self.stages, ends, strict=True)):
            schedule, (segment, before) = self._schedules[index], self._segments[number][index]
            drawn = schedule.draws_before(number, max(0, min(end, until) - stage.first))
            found += [
                TokenOccurrence(
                    stage.first + schedule.position(number, draw - before), index, epoch
                )
                for epoch, draw in segment.draws_of(token, before + drawn)
                if draw >= before
            ]
        return sorted(found)

    def skipped_tokens(self) -> dict[str, int]:
        """Return the tokens of each source that changes of length leave out of begun epochs."""
        lost = dict.fromkeys(self.names, 0)
        for number, name in enumerate(self.names):
            pairs = enumerate(pairwise(self._segments[number]))
            for index, ((segment, before), (following, _)) in pairs:
                if following is not segment:
                    size = self.stages[index + 1].first - self.stages[index].first
                    drawn = before + self._schedules[index].draws_before(number, size)
                    lost[name] += segment.skipped_tokens(drawn, following.length)
        return lost

    def _schedule_of_stage(self, stage: OrderedStage) -> SourceSchedule:
        weights = [Fraction(stage.weights.get(name, 0)) for name in self.names]
        for source, weight in zip(self.sources, weights, strict=True):
            if weight and not samples_in(source.tokens, stage.length):
                raise ValueError(
                    f"{source.name} has {source.tokens:,} tokens: less than one sample of "
                    f"{stage.length:,}"
                )
        return schedule_of(quotas_from_weights(weights))


def _segment_arrays(
    segments: list[tuple[FixedLengthSegment, int]],
) -> list[npt.NDArray[np.generic]]:
    """Return the arguments of `epoch_and_index` for one stage: arrays with one value per source.

    Two arrays come first: the draws of the segment before the stage, and the samples of its tail.
    """
    columns = [(before, segment.tail, *segment.numbers) for segment, before in segments]
    types = (np.int64, np.int64, np.uint64, *[np.int64] * 5)
    return [
        np.array(column, dtype=kind)
        for column, kind in zip(zip(*columns, strict=True), types, strict=True)
    ]


def _segments_by_stage(
    key: int,
    source: OrderedSource,
    number: int,
    stages: Sequence[OrderedStage],
    schedules: Sequence[SourceSchedule],
    shuffle: bool,
    shard_tokens: int,
) -> list[tuple[FixedLengthSegment, int]]:
    """Return, for each stage, a source's segment and how many of its draws precede the stage.

    A stage that does not draw from the source changes nothing, whatever its length.
    """
    drawing = [stage for stage, each in zip(stages, schedules, strict=True) if each.quotas[number]]
    segment = FixedLengthSegment(
        key=key,
        tokens=source.tokens,
        length=(drawing or list(stages))[0].length,
        window=source.window,
        shard_tokens=shard_tokens,
        shuffle=shuffle,
    )
    stage_segments, drawn = [], 0
    ends = [stage.first for stage in stages[1:]]
    for index, (stage, each) in enumerate(zip(stages, schedules, strict=True)):
        if each.quotas[number] and stage.length != segment.length:
            segment, drawn = segment.next_segment(drawn, stage.length), 0
        stage_segments.append((segment, drawn))
        if index < len(ends):
            drawn += each.draws_before(number, ends[index] - stage.first)
    return stage_segments


MOST_SLOTS = 10**6
"""Maximum slots of a period: weights that need more are rounded to this many parts."""


@dataclass(frozen=True, eq=False, slots=True)
class SourceSchedule:
    """One period of a mixture's schedule, which is repeated."""

    quotas: Integers
    """Draws of each source per period."""
    source: Integers
    rank: Integers
    """Number of earlier draws of each slot's source in the period."""
    slots: tuple[Integers, ...]

    @property
    def size(self) -> int:
        return len(self.source)

    def draws_before(self, source: int, draws: int) -> int:
        """Return the number of a source's draws among the first `draws` of all sources."""
        periods, rest = divmod(draws, self.size)
        inside = int(np.searchsorted(self.slots[source], rest))
        return periods * int(self.quotas[source]) + inside

    def position(self, source: int, draw: int) -> int:
        """Return the position of a source's draw (from 0) among all draws: the inverse of
        `draws_before`.
        """
        periods, rank = divmod(draw, int(self.quotas[source]))
        return periods * self.size + int(self.slots[source][rank])


@cache
def schedule_of(quotas: tuple[int, ...]) -> SourceSchedule:
    """Return the period of quotas without a common divisor. Takes about 1 s for 10^6 slots.

    Of draws that are due at the same slot the source with the lower number is first.
    """
    total = sum(quotas)
    source, rank = np.empty(total, dtype=np.int64), np.empty(total, dtype=np.int64)
    waiting = [(0, index, 0) for index, quota in enumerate(quotas) if quota]
    due: list[tuple[int, int, int]] = []
    for slot in range(total):
        while waiting and waiting[0][0] <= slot:
            _, index, draw = heapq.heappop(waiting)
            heapq.heappush(due, (-(-(draw + 1) * total // quotas[index]), index, draw))
        _, index, draw = heapq.heappop(due)
        source[slot], rank[slot] = index, draw
        if draw + 1 < quotas[index]:
            released = (draw + 1) * total // quotas[index]
            heapq.heappush(waiting, (released, index, draw + 1))
    slots = tuple(np.flatnonzero(source == index) for index in range(len(quotas)))
    return SourceSchedule(np.array(quotas, dtype=np.int64), source, rank, slots)


def quotas_from_weights(weights: Sequence[Fraction]) -> tuple[int, ...]:
    """Return weights as whole numbers without a common divisor, in exactly their proportions.

    If that needs more than `MOST_SLOTS` slots, proportions are rounded to `MOST_SLOTS` parts by
    largest remainders. A weight above 0 always gets at least one slot.
    """
    total = sum(weights, Fraction(0))
    shares = [weight / total for weight in weights]
    slots = lcm(*(share.denominator for share in shares))
    if slots > MOST_SLOTS:
        return _round_shares(shares)
    return tuple(int(share * slots) for share in shares)


def _round_shares(shares: list[Fraction]) -> tuple[int, ...]:
    wanted = [share * MOST_SLOTS for share in shares]
    quotas = [max(floor(each), int(each > 0)) for each in wanted]
    by_remainder = sorted(range(len(shares)), key=lambda i: (quotas[i] - wanted[i], i))
    missing = MOST_SLOTS - sum(quotas)
    for index in by_remainder[: max(0, missing)]:
        quotas[index] += 1
    quotas[quotas.index(max(quotas))] += min(0, missing)
    divisor = gcd(*quotas)
    return tuple(quota // divisor for quota in quotas)


def incompatible_changes(before: SampleOrder, now: SampleOrder, until: int) -> Iterator[str]:
    """Yield a sentence for each change between two orders that affects samples drawn so far.

    Without a change, both orders give the same stage, source, epoch and index for every counter
    below `until`. Later samples may change: other stages, other sources, another end of a stage
    that has not been reached.

    Args:
        until: Number of samples drawn so far.
    """
    if until == 0:
        return
    if (before.seed, before.shuffle) != (now.seed, now.shuffle):
        yield "the seed, or data.shuffle, is another: all that was drawn had another order"
        return
    old_stages = [stage for stage in before.stages if stage.first < until]
    new_stages = [stage for stage in now.stages if stage.first < until]
    for number, (old, new) in enumerate(zip(old_stages, new_stages, strict=False)):
        for what, a, b in (
            ("begins at sample", old.first, new.first),
            ("has samples of", old.length, new.length),
            ("has the weights", _stage_weights(old), _stage_weights(new)),
        ):
            if a != b:
                yield f"stage {number + 1}, which has begun, {what} {b}, and it was {a}"
    if len(old_stages) != len(new_stages):
        yield (
            f"{len(new_stages)} stages would have begun by sample {until:,}, and "
            f"{len(old_stages)} have: a stage can only be added for what is still to come"
        )
    drawn = {name for stage in old_stages for name in stage.weights}
    sources = {source.name: source for source in now.sources}
    for old_source in before.sources:
        if old_source.name in drawn and sources.get(old_source.name) != old_source:
            yield (
                f"{old_source.name} was drawn from, and is now another text, or shuffled by other "
                "shards"
            )


def _stage_weights(stage: OrderedStage) -> str:
    total = sum(stage.weights.values(), Fraction(0))
    shares = sorted((name, weight / total) for name, weight in stage.weights.items() if weight)
    return ", ".join(f"{name} {share}" for name, share in shares)
