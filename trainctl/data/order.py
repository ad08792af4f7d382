"""Sample order of a mixture: stage, source, epoch and index as functions of the sample counter.

Samples of a run are counted from 0, over all ranks and stages. The sample of a counter is a
function of the seed, the names and lengths of the sources, and the stages that have begun. It does
not depend on ranks, batches or earlier samples. So every layout and every resume sees the same
sequence, a run stores one number, and adding a stage changes nothing before it.
`docs/data-order.md` describes the algorithm.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from trainctl.data.permutation import Integers, key_of, permute
from trainctl.data.source_sampler import (
    SHARD_TOKENS,
    FixedLengthSegment,
    epoch_and_index,
    samples_of,
    source_key,
)
from trainctl.data.source_turns import Turns, quotas_of, turns_of

_DEALT = -2
"""Value hashed in place of a source's name for the permutation that deals a batch to
its ranks.
"""


@dataclass(frozen=True, slots=True)
class OrderedSource:
    """A source as the order sees it."""

    name: str
    """Name of the source. Its permutations depend on this, not on which other sources there
    are.
    """
    tokens: int
    """Tokens of the training text."""
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
class Samples:
    """Coordinates of samples: arrays with the shape of the counters."""

    stage: Integers
    """Number of the stage."""
    source: Integers
    """Number of the source: index into `Order.names`."""
    epoch: Integers
    """Epoch of the source, from 0."""
    index: Integers
    """Index of the sample in its source: its tokens begin at index x length of the stage."""


class Seen(NamedTuple):
    """One occurrence of a token in a run: sample counter, stage, and epoch of the source."""

    counter: int
    stage: int
    epoch: int


class Order:
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
        self._turns = [self._turns_of(stage) for stage in self.stages]
        self._courses = [
            _course(
                source_key(seed, source.name),
                source,
                number,
                self.stages,
                self._turns,
                shuffle,
                shard_tokens,
            )
            for number, source in enumerate(self.sources)
        ]

        self._numbers = [
            _numbers([course[stage] for course in self._courses])
            for stage in range(len(self.stages))
        ]

    def at(self, counters: npt.ArrayLike) -> Samples:
        """Return stage, source, epoch and index of each counter (from 0, any shape).

        It is fastest for thousands of counters at a time.
        """
        asked = np.asarray(counters, dtype=np.int64)
        flat = asked.reshape(-1)
        stages = np.searchsorted(self._firsts, flat, "right") - 1
        found = Samples(stages, *(np.empty_like(flat) for _ in range(3)))
        for number in np.unique(stages):
            chosen = np.flatnonzero(stages == number)
            turns, stage = self._turns[number], self.stages[number]
            period, slot = np.divmod(flat[chosen] - stage.first, turns.size)
            sources = turns.source[slot]
            draws = period * turns.quotas[sources] + turns.rank[slot]
            found.source[chosen] = sources
            before, tail, *numbers = (each[sources] for each in self._numbers[number])
            draws += before
            epoch, index = epoch_and_index(draws, numbers, self.shuffle)
            found.epoch[chosen], found.index[chosen] = epoch, index
            of_tail = draws < tail
            for source in np.unique(sources[of_tail]):
                mine = np.flatnonzero(of_tail & (sources == source))
                epoch, index = self._courses[source][number][0].at(draws[mine])
                found.epoch[chosen[mine]], found.index[chosen[mine]] = epoch, index
        return Samples(
            *(
                each.reshape(asked.shape)
                for each in (found.stage, found.source, found.epoch, found.index)
            )
        )

    def dealt(self, first: int, size: int) -> Integers:
        """Return the counters of a batch in the order in which it is dealt to the ranks.

        `first` is the batch's first counter, `size` its number of samples. Sources take turns
        regularly: in a 1:1 mixture every second sample has the same source, and a rank could get
        samples of one source only, so the batch is permuted. With one source the order stays: it is
        random, or the text's own.
        """
        number = int(np.searchsorted(self._firsts, first, "right")) - 1
        counters = np.arange(first, first + size, dtype=np.int64)
        if np.count_nonzero(self._turns[number].quotas) < 2:
            return counters
        return counters[permute(counters - first, size, key_of(self.seed, _DEALT, first))]

    def drawn(self, counter: int) -> dict[str, int]:
        """Return the number of samples of each source before a counter, over all sample lengths."""
        total = dict.fromkeys(self.names, 0)
        ends = [*(stage.first for stage in self.stages[1:]), counter]
        for stage, turns, end in zip(self.stages, self._turns, ends, strict=True):
            draws = max(0, min(end, counter) - stage.first)
            for number, name in enumerate(self.names):
                total[name] += turns.drawn(number, draws)
        return total

    def when(self, source: str, token: int, until: int) -> list[Seen]:
        """Return where a token occurs before counter `until`, by counter: the inverse of `at`.

        `token` is a position in the source's training text.
        """
        number = self.names.index(source)
        ends = [*(stage.first for stage in self.stages[1:]), until]
        found = []
        for index, (stage, end) in enumerate(zip(self.stages, ends, strict=True)):
            turns, (leg, before) = self._turns[index], self._courses[number][index]
            drawn = turns.drawn(number, max(0, min(end, until) - stage.first))
            found += [
                Seen(stage.first + turns.position(number, draw - before), index, epoch)
                for epoch, draw in leg.draws_of(token, before + drawn)
                if draw >= before
            ]
        return sorted(found)

    def left_out(self) -> dict[str, int]:
        """Return the tokens of each source that changes of length leave out of begun epochs."""
        lost = dict.fromkeys(self.names, 0)
        for name, course, number in zip(
            self.names, self._courses, range(len(self.names)), strict=True
        ):
            for index, (stage, turns) in enumerate(
                zip(self.stages[:-1], self._turns, strict=False)
            ):
                (leg, before), (following, _) = course[index], course[index + 1]
                if following is not leg:
                    size = self.stages[index + 1].first - stage.first
                    drawn = before + turns.drawn(number, size)
                    lost[name] += leg.left_out(drawn, following.length)
        return lost

    def _turns_of(self, stage: OrderedStage) -> Turns:
        weights = [Fraction(stage.weights.get(name, 0)) for name in self.names]
        for source, weight in zip(self.sources, weights, strict=True):
            if weight and not samples_of(source.tokens, stage.length):
                raise ValueError(
                    f"{source.name} has {source.tokens:,} tokens: less than one sample of "
                    f"{stage.length:,}"
                )
        return turns_of(quotas_of(weights))


def _numbers(legs: list[tuple[FixedLengthSegment, int]]) -> list[npt.NDArray[np.generic]]:
    """Return the arguments of `epoch_and_index` for one stage: arrays with one value per source.

    Two arrays come first: the draws of the leg before the stage, and the samples of the leg's tail.
    """
    columns = [(before, leg.tail, *leg.numbers) for leg, before in legs]
    types = (np.int64, np.int64, np.uint64, *[np.int64] * 5)
    return [
        np.array(column, dtype=kind)
        for column, kind in zip(zip(*columns, strict=True), types, strict=True)
    ]


def _course(
    key: int,
    source: OrderedSource,
    number: int,
    stages: Sequence[OrderedStage],
    turns: Sequence[Turns],
    shuffle: bool,
    shard_tokens: int,
) -> list[tuple[FixedLengthSegment, int]]:
    """Return, for each stage, a source's leg and the number of that leg's draws before the stage.

    A stage that does not draw from the source changes nothing, whatever its length.
    """
    drawing = [stage for stage, each in zip(stages, turns, strict=True) if each.quotas[number]]
    leg = FixedLengthSegment(
        key=key,
        tokens=source.tokens,
        length=(drawing or list(stages))[0].length,
        window=source.window,
        shard_tokens=shard_tokens,
        shuffle=shuffle,
    )
    course, drawn = [], 0
    ends = [stage.first for stage in stages[1:]]
    for index, (stage, each) in enumerate(zip(stages, turns, strict=True)):
        if each.quotas[number] and stage.length != leg.length:
            leg, drawn = leg.next_segment(drawn, stage.length), 0
        course.append((leg, drawn))
        if index < len(ends):
            drawn += each.drawn(number, ends[index] - stage.first)
    return course
