"""Search for a text in the training data, with the steps that have seen it. No torch."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice, pairwise

from trainctl.data.corpus import Corpus
from trainctl.data.mixture import sample_order
from trainctl.data.order import SampleOrder
from trainctl.data.packing import load_bins, packed_token_count
from trainctl.data.sample_contents import training_text
from trainctl.data.tokenizer import Tokenizer
from trainctl.options.objective.grpo import answers_per_prompt
from trainctl.plans.mixture import sources_of
from trainctl.plans.types import RunPlan
from trainctl.runs.records import Event, OnUnits, ignore_progress

AROUND = 60
"""Characters shown before and after a match."""


@dataclass(frozen=True, slots=True)
class Sighting:
    """A sample of the run that contained the text."""

    step: int
    sample: int
    epoch: int


@dataclass(frozen=True, slots=True)
class Match:
    """A document that contains the text."""

    source: str
    """Name of the source; `plan.mixture.SINGLE_SOURCE` if the run has one source."""
    document: int
    """Number of the document in the source's training text, from 0."""
    file: str | None
    line: int | None
    """Line or row of the file, from 1; None if the file is one document."""
    token: int
    """First token of the text, counted from the document's first token."""
    text: str
    """The match with `AROUND` characters on each side."""
    times: int
    seen: tuple[Sighting, ...]
    """Samples that contained the first occurrence, from the run's records so far."""


def find_text(
    plan: RunPlan,
    corpora: Mapping[str, Corpus],
    tokenizer: Tokenizer,
    wanted: str,
    events: Iterable[Event],
    *,
    ignore_case: bool = False,
    progress: OnUnits = ignore_progress,
) -> Iterator[Match]:
    """Yield the documents that contain a text, by source, in the order of the training text.

    The search decodes tokens, so it finds what the model is shown, even if the files are gone. If
    the tokenizer changes a text (its case or white space), search for the changed text. `wanted`
    must not be empty. `events` are the run's records, which have the samples of each step.
    """
    names = sources_of(plan.config.data)
    lengths = {name: corpora[name].train.tokens for name in names}
    whole, before = sum(lengths.values()), 0
    sought = wanted.lower() if ignore_case else wanted
    history = _History(plan, corpora, events)
    for name in names:
        text = training_text(plan, corpora[name], name)
        for number, (start, end) in enumerate(pairwise([0, *map(int, text.ends)])):
            progress(before + end, whole)
            ids = text.tokens[start:end].tolist()
            found = tokenizer.decode(ids)
            place = (found.lower() if ignore_case else found).find(sought)
            if place < 0:
                continue
            token = _token_at(tokenizer, ids, place)
            file, line = text.place_of(number)
            yield Match(
                source=name,
                document=number,
                file=file,
                line=line,
                token=token,
                text=found[max(0, place - AROUND) : place + len(wanted) + AROUND],
                times=(found.lower() if ignore_case else found).count(sought),
                seen=tuple(history.sightings(name, start + token)),
            )
        before += lengths[name]


def take_first(found: Iterable[Match], most: int) -> tuple[list[Match], bool]:
    """Return the first `most` matches (0 for all), and whether there are more."""
    if not most:
        return list(found), False
    some = list(islice(found, most + 1))
    return some[:most], len(some) > most


def _token_at(tokenizer: Tokenizer, ids: list[int], place: int) -> int:
    """Return the token that a character of the decoded text belongs to, by bisection."""
    low, high = 0, len(ids) - 1
    while low < high:
        middle = (low + high) // 2
        if len(tokenizer.decode(ids[: middle + 1])) > place:
            high = middle
        else:
            low = middle + 1
    return low


class _History:
    """Index of the samples that each step of a run has seen, from the run's records."""

    def __init__(
        self, plan: RunPlan, corpora: Mapping[str, Corpus], events: Iterable[Event]
    ) -> None:
        self._steps, self._firsts, self._ends = array("q"), array("q"), array("q")
        self._answers = answers_per_prompt(plan.config.objective)
        for event in events:
            if event["event"] == "step" and event.get("samples"):
                first, end = event["samples"]  # of answers, where the order counts prompts
                self._add(event["step"], first // self._answers, end // self._answers)
        self._order: SampleOrder | None = None
        self._plan, self._corpora = plan, corpora
        if self._steps:
            names = sources_of(plan.config.data)
            tokens = {name: packed_token_count(plan.config, corpora[name]) for name in names}
            self._order = sample_order(plan, tokens)

    def _add(self, step: int, first: int, end: int) -> None:
        """Record a step's samples. A repeated step replaces its earlier record and later ones."""
        while self._steps and self._steps[-1] >= step:
            for column in (self._steps, self._firsts, self._ends):
                column.pop()
        self._steps.append(step)
        self._firsts.append(first)
        self._ends.append(end)

    def sightings(self, source: str, token: int) -> Iterator[Sighting]:
        """Yield the samples that contained a token of a source's training text."""
        if self._order is None:
            return
        corpus = self._corpora[source]
        bins = load_bins(self._plan.config, corpus, corpus.train)
        if bins is not None:  # the order counts in bins
            place = bins.bin_of(token)
            if place is None:
                return
            token = place * self._plan.batch.sequence_length
        for seen in self._order.occurrences(source, token, max(self._ends)):
            number = bisect_right(self._firsts, seen.counter) - 1
            if number >= 0 and seen.counter < self._ends[number]:  # otherwise skipped by a rewind
                counter = seen.counter * self._answers
                yield Sighting(self._steps[number], counter, seen.epoch)
