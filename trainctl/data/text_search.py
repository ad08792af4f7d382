"""Search for documents: those with a text, with the steps that have seen it, and those that were
dropped from a corpus. No torch.
"""

from __future__ import annotations

import json
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

from trainctl.config.schema import RunConfig
from trainctl.data.corpus import Corpus
from trainctl.data.document_selection import DROPPED
from trainctl.data.mixture import sample_order
from trainctl.data.order import SampleOrder
from trainctl.data.packing import load_bins, packed_token_count
from trainctl.data.prepare import prepared_corpora
from trainctl.data.quality.selection import (
    CONTAMINATED,
    EXACT,
    NEAR,
    SUBSTRING,
    Example,
    example_from_json,
    words_from,
)
from trainctl.data.sample_contents import training_text
from trainctl.data.store import lines_before, read_documents
from trainctl.data.tasks import Task
from trainctl.data.tokenizer import Tokenizer, load_tokenizer
from trainctl.errors import RunStateError, TrainctlError
from trainctl.options.data import read_section, spec_of
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


def read_dropped(corpus: Path) -> dict[str, Any] | None:
    """Return the record of dropped documents of a corpus; None if it was built without rules."""
    file = corpus / DROPPED
    try:
        plain: dict[str, Any] = json.loads(file.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise RunStateError(
            f"{file} cannot be read: {error}",
            hint=f"remove {corpus}, and prepare it again: no text is read for that",
        ) from None
    return plain


def dropped_by_source(config: RunConfig) -> Iterator[dict[str, Any]]:
    """Yield the record of dropped documents of each source that was selected from.

    Raises:
        TrainctlError: No filter, deduplication or decontamination is set, or a text cannot be read.
    """
    if not config.data.has_quality_rules or config.data.factory is not None:
        raise TrainctlError(
            "nothing is asked of the documents: all of them are trained on",
            hint="data.dedup, data.filters and data.decontaminate leave some out",
        )
    tokenizer = load_tokenizer(config.tokenizer)
    for corpus in prepared_corpora(config, tokenizer).values():
        found = read_dropped(Path(corpus.folder))
        if found is not None:  # a single document is left as it is
            yield found


def without_examples(dropped: Mapping[str, Any]) -> dict[str, Any]:
    """Return the record of a source's dropped documents without their texts."""
    keys = ("source", "documents", "stay", "reasons", "common_ngrams")
    return {key: dropped[key] for key in keys}


def examples_of(dropped: Mapping[str, Any]) -> Iterator[DroppedDocument]:
    """Yield the examples of a source. Each file is read once.

    Raises:
        TrainctlError: A file does not exist any more, or has changed.
    """
    examples = {
        reason: [example_from_json(each) for each in some]
        for reason, some in dropped["examples"].items()
    }
    texts = _example_texts(dropped, [each for some in examples.values() for each in some])
    return describe_examples(examples, lambda *document: texts[document])


def _example_texts(
    dropped: Mapping[str, Any], examples: list[Example]
) -> dict[tuple[str, str, int], tuple[str, str]]:
    """Return location and text of every document that the examples name."""
    wanted = {(each.source, each.part, each.number) for each in examples}
    wanted |= {each.like for each in examples if each.like is not None}
    found = {}
    for source, part, plain in dropped["parts"]:
        task, section = Task.from_plain(plain), read_section(dropped["sections"][source])
        numbers = {number for name, own, number in wanted if (name, own) == (source, part)}
        for number, (origin, text) in enumerate(read_documents(task, section)):
            if number in numbers:
                piece, line = task.pieces[origin.piece], origin.line
                if line and piece.start and spec_of(section).counts_lines:
                    line += lines_before(piece)
                where = f"{piece.file}:{line}" if line else str(piece.file)
                found[source, part, number] = where, text
    return found


_CHARACTERS = 200
"""Maximum number of characters of an excerpt."""

Texts = Callable[[str, str, int], tuple[str, str]]
"""Returns location and text of a document, given its source, part and number."""


@dataclass(frozen=True, slots=True)
class DroppedDocument:
    """A dropped document with its reason in words."""

    source: str
    reason: str
    document: str
    why: str
    """The reason in words, with the number that decided."""
    excerpt: str
    """Start of its text, or the held-out passage in it."""
    like: str = ""
    """Location of the document that stays in its place; empty if there is none."""
    other: str = ""


def describe_examples(
    examples: Mapping[str, Iterable[Example]], texts: Texts
) -> Iterator[DroppedDocument]:
    """Yield the examples of a selection in words, by reason."""
    for reason, some in examples.items():
        for each in some:
            where, text = texts(each.source, each.part, each.number)
            like, other = texts(*each.like) if each.like is not None else ("", "")
            yield DroppedDocument(
                source=each.source,
                reason=reason,
                document=where,
                why=_removal_in_words(reason, each, like),
                excerpt=words_from(text, each.word) if each.word is not None else _shorten(text),
                like=like,
                other=_shorten(other),
            )


def _removal_in_words(reason: str, example: Example, like: str) -> str:
    value = example.value if example.value is not None else 0.0
    if reason == EXACT:
        return f"the same text as {like}"
    if reason == NEAR:
        return f"nearly the same as {like}: Jaccard index {value:.2f}"
    if reason == SUBSTRING:
        return f"{value:.0%} of its words are in passages of documents before it"
    if reason == CONTAMINATED:
        return f"{value:.0f} n-grams of held-out texts"
    what = f"{value:g}" if example.value is not None else "what is no finite number"
    return f"{reason.partition('.')[0]}: {what} is beyond {reason.partition('.')[2]}"


def _shorten(text: str) -> str:
    short = " ".join(text[: 2 * _CHARACTERS].split())[:_CHARACTERS]
    return short if len(short) >= len(text) else f"{short}…"
