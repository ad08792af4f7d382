"""Which documents go, and why: arithmetic over columns, without any text.

A document that a filter or its contamination removes keeps no other one from staying: only then are
duplicates decided. Of the same texts the first stays, by the precedence of sources. Of what is
nearly the same each document goes that is similar to an earlier one *that stays*: so whatever goes
has its likeness in what is trained on, and no chain of small differences removes what is like
nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trainctl.config.registry import load
from trainctl.data.quality.columns import Columns, ColumnWriter
from trainctl.data.quality.corpus import Measured, MeasuredPart
from trainctl.data.quality.hashing import I64, Bool, mix
from trainctl.data.quality.near import Pairs

CONTAMINATED, EXACT, NEAR = "contamination", "exact", "near"
EXAMPLES = 5
"""Documents that are kept by name for each source and reason."""


@dataclass(frozen=True, slots=True)
class Contamination:
    """When passages of held-out texts remove a document.

    Attributes:
        min_ngrams: Least n-grams that it has of them.
        max_documents: An n-gram that more documents of different texts have is boilerplate, and
            does not count; None counts all.
    """

    min_ngrams: int = 1
    max_documents: int | None = 10


@dataclass(frozen=True, slots=True)
class Rules:
    """What removes a document.

    Attributes:
        filters: The keys of each source's filters: `{source: {filter: keys}}`.
        contamination: None removes none by that.
        exact: Whether copies go; they do wherever what is nearly the same does.
        near: The Jaccard index from which documents are nearly the same; None keeps them.
    """

    filters: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    contamination: Contamination | None = None
    exact: bool = True
    near: float | None = None


@dataclass(frozen=True, slots=True)
class Tally:
    """What a reason removes of a source.

    Attributes:
        documents: That go for it and for none before it.
        characters: Theirs.
        applies: Documents that it applies to, those among them that went before it.
    """

    documents: int
    characters: int
    applies: int


@dataclass(frozen=True, slots=True)
class Example:
    """A document that went.

    Attributes:
        source: Its source.
        part: Its part.
        number: Its number in the part.
        value: The filter's number, the n-grams that it has of held-out texts, or its Jaccard index.
        like: The document that stays in its place: source, part and number.
        word: The first word of the first held-out passage (`contamination.passage`).
    """

    source: str
    part: str
    number: int
    value: float | None = None
    like: tuple[str, str, int] | None = None
    word: int | None = None


@dataclass(frozen=True, slots=True)
class Selection:
    """What stays of a corpus.

    Attributes:
        why: 0 for a document that stays; else 1 + the index of the first reason, [documents].
        reasons: Their names, in the order in which they are applied: `gopher_quality.min_words`.
        counts: `{source: {reason: Tally}}`, of reasons that apply to some document.
        examples: `{source: {reason: some of the documents that went for it}}`.
        common_ngrams: N-grams of held-out texts that were taken as boilerplate.
        parts: Source, part and first id of each part.
    """

    why: npt.NDArray[np.uint8]
    reasons: tuple[str, ...]
    counts: Mapping[str, Mapping[str, Tally]]
    examples: Mapping[str, Mapping[str, tuple[Example, ...]]]
    common_ngrams: int
    parts: tuple[tuple[str, str, int], ...]

    @property
    def stays(self) -> Bool:
        """Which documents are trained on, [documents]."""
        stays: Bool = self.why == 0
        return stays

    def write(self, folder: Path, key: str) -> None:
        """Keep it, under a key of what it depends on."""
        with ColumnWriter(folder, key) as writer:
            writer.append({"why": self.why})
            writer.finish(
                reasons=self.reasons,
                counts={
                    source: {reason: asdict(each) for reason, each in of.items()}
                    for source, of in self.counts.items()
                },
                examples={
                    source: {reason: [asdict(each) for each in some] for reason, some in of.items()}
                    for source, of in self.examples.items()
                },
                common_ngrams=self.common_ngrams,
                parts=self.parts,
            )

    @classmethod
    def load(cls, folder: Path) -> Selection:
        """What was written.

        Raises:
            TrainctlError: It is not there, or damaged (exit code 5).
        """
        columns = Columns.load(folder)
        facts = columns.manifest
        return cls(
            why=columns["why"],
            reasons=tuple(facts["reasons"]),
            counts={
                source: {reason: Tally(**each) for reason, each in of.items()}
                for source, of in facts["counts"].items()
            },
            examples={
                source: {reason: tuple(map(_example, some)) for reason, some in of.items()}
                for source, of in facts["examples"].items()
            },
            common_ngrams=facts["common_ngrams"],
            parts=tuple(map(tuple, facts["parts"])),
        )


def select(corpus: Measured, rules: Rules, same: I64, pairs: Pairs | None = None) -> Selection:
    """Decide which documents stay.

    Takes some 2 bytes of memory a document of the corpus, and 100 a duplicate.

    Args:
        corpus: The columns.
        rules: What removes a document; a filter that a source is not measured for is an error.
        same: What `exact.same_texts` gives.
        pairs: What `near.near_pairs` gives, at the threshold of the rules or a lower one.
    """
    judge = _Judge(corpus)
    for part in corpus.parts:
        for reason, value, goes in _filtered(part, rules.filters.get(part.source, {})):
            judge.remove(reason, part.ids[goes], value[goes])
    common = 0
    if rules.contamination is not None:
        common = _contaminated(judge, rules.contamination, same)
    stays = _first_copies(judge, same, rules.exact or rules.near is not None)
    if rules.near is not None and pairs is not None:
        _similar(judge, pairs.above(rules.near), same, stays)
    return judge.selection(common)


class _Judge:
    """Keeps which documents go, and accounts for it.

    Args:
        corpus: The columns.
    """

    def __init__(self, corpus: Measured) -> None:
        self.corpus = corpus
        self.why = np.zeros(corpus.documents, dtype=np.uint8)
        self._reasons: dict[str, int] = {}
        self._counts: dict[str, dict[str, Tally]] = {}
        self._examples: dict[str, dict[str, list[tuple[int, int, float | None, int | None]]]] = {}

    def remove(
        self,
        reason: str,
        ids: I64,
        values: npt.NDArray[Any] | None = None,
        likes: I64 | None = None,
    ) -> None:
        """Have documents go.

        Args:
            reason: Why.
            ids: The documents, ascending; some may have gone already.
            values: The number of each that the reason is about.
            likes: What stays in each one's place.
        """
        code = self._reasons.setdefault(reason, len(self._reasons) + 1)
        assert code < 256
        stays = self.why[ids] == 0
        edges = np.searchsorted(ids, self.corpus.firsts)
        for part, begin, end in zip(self.corpus.parts, edges[:-1], edges[1:], strict=True):
            if begin < end:
                places = np.arange(begin, end)[stays[begin:end]]
                rows = ids[places] - part.first
                characters = int(part.columns["characters"][rows].sum())
                self._add(part.source, reason, Tally(len(places), characters, int(end - begin)))
                self._show(part.source, reason, places, ids, values, likes)
        self.why[ids[stays]] = code

    def selection(self, common: int) -> Selection:
        """All of it."""
        return Selection(
            why=self.why,
            reasons=tuple(self._reasons),
            counts=self._counts,
            examples={
                source: {
                    reason: tuple(self._as_example(reason, *each[1:]) for each in some)
                    for reason, some in of.items()
                }
                for source, of in self._examples.items()
            },
            common_ngrams=common,
            parts=tuple((part.source, part.name, part.first) for part in self.corpus.parts),
        )

    def _add(self, source: str, reason: str, more: Tally) -> None:
        of = self._counts.setdefault(source, {})
        before = asdict(of.get(reason, Tally(0, 0, 0)))
        of[reason] = Tally(**{name: each + before[name] for name, each in asdict(more).items()})

    def _show(
        self,
        source: str,
        reason: str,
        places: I64,
        ids: I64,
        values: npt.NDArray[Any] | None,
        likes: I64 | None,
    ) -> None:
        """Keep a sample that does not depend on what else goes: the lowest of mixed ids."""
        if not len(places):
            return
        drawn = mix(ids[places].view(np.uint64))
        some = self._examples.setdefault(source, {}).setdefault(reason, [])
        for place in places[np.argsort(drawn)[:EXAMPLES]].tolist():
            number = int(ids[place])
            some.append(
                (
                    int(mix(np.uint64(number))),
                    number,
                    float(values[place]) if values is not None else None,
                    int(likes[place]) if likes is not None else None,
                )
            )
        some[:] = sorted(some)[:EXAMPLES]

    def _as_example(
        self, reason: str, document: int, value: float | None, like: int | None
    ) -> Example:
        part, number = self.corpus.where(document)
        other = self.corpus.where(like) if like is not None else None
        word = None
        if reason == CONTAMINATED:
            word = int(part.columns["contamination.word"][document - part.first])
        return Example(
            source=part.source,
            part=part.name,
            number=number,
            value=value,
            like=(other[0].source, other[0].name, other[1]) if other is not None else None,
            word=word,
        )


def _filtered(
    part: MeasuredPart, filters: Mapping[str, Any]
) -> Iterator[tuple[str, npt.NDArray[Any], Bool]]:
    """Each bound with the numbers, and the documents that are not within it."""
    for name, keys in filters.items():
        for bound in load("filter", name).bounds:
            limit = getattr(keys, bound.key)
            if limit is None:
                continue
            value = part.columns[f"{name}.{bound.statistic}"]
            edge = np.float32(limit)
            within = value >= edge if bound.is_least else value <= edge
            yield f"{name}.{bound.key}", value, ~within  # NaN is not within anything


def _contaminated(judge: _Judge, rule: Contamination, same: I64) -> int:
    """Remove what has held-out passages.

    Returns:
        How many n-grams were taken as boilerplate.
    """
    parts = judge.corpus.parts
    highest = max((int(part.columns["contamination"].max(initial=0)) for part in parts), default=0)
    frequency = np.zeros(highest + 1, dtype=np.int64)
    for part in parts:
        owner = _owners(part)
        copies = part.among(same[:, 0])[owner]
        frequency += np.bincount(part.columns["contamination"][~copies], minlength=highest + 1)
    counted = np.ones(highest + 1, dtype=np.bool_)
    if rule.max_documents is not None:
        counted = frequency <= rule.max_documents
    for part in parts:
        owner = _owners(part)[counted[part.columns["contamination"]]]
        hits = np.bincount(owner, minlength=part.columns.documents)
        goes = hits >= max(1, rule.min_ngrams)
        judge.remove(CONTAMINATED, part.ids[goes], hits[goes])
    return int((~counted).sum())


def _owners(part: MeasuredPart) -> I64:
    """The row that has each of a part's hits, [hits]."""
    ends = np.asarray(part.columns["contamination.ends"])
    return np.repeat(np.arange(len(ends)), np.diff(ends, prepend=0))


def _first_copies(judge: _Judge, same: I64, removes: bool) -> dict[int, int]:
    """Remove copies, but for the first of each text that has not gone already.

    Returns:
        For the first of each text that several have, the one that stays, -1 if none does; only
        those for which it is another one.
    """
    groups = np.concatenate((np.unique(same[:, 1]), same[:, 1]))
    members = np.concatenate((np.unique(same[:, 1]), same[:, 0]))
    order = np.lexsort((members, groups))
    groups, members = groups[order], members[order]
    here = judge.why[members] == 0
    first, begin = np.unique(groups[here], return_index=True)
    stays = members[here][begin]
    if removes:
        likes = stays[np.searchsorted(first, groups[here])] if len(first) else groups[here]
        goes = likes != members[here]
        ids, likes = members[here][goes], likes[goes]
        order = np.argsort(ids)
        judge.remove(EXACT, ids[order], likes=likes[order])
    result = dict.fromkeys(np.setdiff1d(groups, first).tolist(), -1)
    moved = first != stays
    return result | dict(zip(first[moved].tolist(), stays[moved].tolist(), strict=True))


def _similar(judge: _Judge, pairs: Pairs, same: I64, stays: Mapping[int, int]) -> None:
    """Remove what is similar to an earlier document that stays."""
    ids = pairs.ids
    if stays:
        ids = ids.copy()
        for first, other in stays.items():
            ids[pairs.ids == first] = other
    there = (ids >= 0).all(1) & (judge.why[ids] == 0).all(1)
    ids, index = np.sort(ids[there], axis=1), pairs.jaccard[there]
    order = np.lexsort((ids[:, 0], ids[:, 1]))
    gone: dict[int, tuple[int, float]] = {}
    for (low, high), value in zip(ids[order].tolist(), index[order].tolist(), strict=True):
        if high not in gone and low not in gone:  # all pairs in which `low` is the later are done
            gone[high] = (low, value)
    removed = np.array(list(gone), dtype=np.int64)
    judge.remove(
        NEAR,
        removed,
        np.array([value for _, value in gone.values()]),
        np.array([low for low, _ in gone.values()], dtype=np.int64),
    )


def _example(data: dict[str, Any]) -> Example:
    like = data["like"]
    return Example(**{**data, "like": tuple(like) if like is not None else None})
