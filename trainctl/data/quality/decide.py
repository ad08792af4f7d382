"""Selection of a corpus's documents: measure, find duplicates, decide, and store the result.

The decision is arithmetic on columns, without any text. Filters and decontamination come first, so
that a document they remove does not count as the original of a duplicate. Of identical texts the
first stays, by the precedence of sources. A near duplicate goes only if it is similar to an earlier
document *that stays*. So everything removed has its counterpart in the training data, and a chain
of small differences removes nothing that is unlike all others. The same holds for passages of
earlier documents.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from hashlib import sha256
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trainctl.config.codec import to_plain
from trainctl.config.registry import load_spec
from trainctl.data.executors import INLINE, Executor
from trainctl.data.quality.batches import I64, Bool, Entry
from trainctl.data.quality.columns import (
    MeasuredCorpus,
    MeasuredPart,
    PartToMeasure,
    finished_key,
    key_of_corpus,
    remove_leftovers,
)
from trainctl.data.quality.measurement import WantedColumns, measure_all, words_covered
from trainctl.data.quality.near_duplicates import Pairs, Passages, find_duplicates
from trainctl.data.quality.selection import (
    CONTAMINATED,
    EXACT,
    EXAMPLES,
    NEAR,
    SUBSTRING,
    Contamination,
    Example,
    Rules,
    Selection,
    Tally,
    write_held_out,
)
from trainctl.data.quality.shuffle import MEMORY
from trainctl.data.source_sampler import splitmix64


def decide_removals(
    corpus: MeasuredCorpus,
    rules: Rules,
    identical: I64,
    pairs: Pairs | None = None,
    passages: Passages | None = None,
    protected: Bool | None = None,
) -> Selection:
    """Decide which documents stay.

    This takes about 4 bytes of memory per document of the corpus, and 100 per duplicate.

    Args:
        rules: Every source must be measured for its filters.
        identical: From `duplicates.find_identical_texts`.
        pairs: From `duplicates.near_pairs`, at the threshold of the rules or a lower one.
        protected: Mask of held-out documents, [documents]. They always stay and precede others.
            None has none.
    """
    removals = _Removals(corpus, protected)
    for part in corpus.parts:
        for reason, value, goes in _filter_removals(part, rules.filters.get(part.source, {})):
            removals.remove(reason, part.ids[goes], value[goes])
    common = 0
    if rules.contamination is not None:
        common = _remove_contaminated(removals, rules.contamination, identical)
    stays = _remove_copies(removals, identical, rules.exact or rules.near is not None)
    if rules.near is not None and pairs is not None:
        _remove_near_duplicates(removals, pairs.above(rules.near), identical, stays)
    if rules.substring is not None and passages is not None:
        _remove_repeated_passages(removals, passages, rules.substring, stays)
    return removals.selection(common)


class _Removals:
    """Record of which documents go, with the reasons, counts and examples."""

    def __init__(self, corpus: MeasuredCorpus, protected: Bool | None = None) -> None:
        self.corpus = corpus
        self.protected = (
            protected if protected is not None else np.zeros(corpus.documents, dtype=np.bool_)
        )
        self.why = np.zeros(corpus.documents, dtype=np.uint8)
        self._reasons: dict[str, int] = {}
        self._counts: dict[str, dict[str, Tally]] = {}
        self._examples: dict[str, dict[str, list[tuple[int, int, float | None, int | None]]]] = {}

    def ranks(self, ids: I64) -> I64:
        """Return ranks: of two duplicates the document with the higher rank goes. Fixed ones are
        first.
        """
        return np.where(self.protected[ids], ids, ids + len(self.protected))

    def remove(
        self,
        reason: str,
        ids: I64,
        values: npt.NDArray[Any] | None = None,
        originals: I64 | None = None,
    ) -> None:
        """Remove documents for a reason.

        Args:
            ids: Ids, ascending. Documents that are already removed only count in `Tally.applies`;
                protected ones stay.
            originals: The document that stays in place of each.
        """
        goes = ~self.protected[ids]
        if not goes.all():
            ids = ids[goes]
            values = values[goes] if values is not None else None
            originals = originals[goes] if originals is not None else None
        code = self._reasons.setdefault(reason, len(self._reasons) + 1)
        assert code < 256
        stays = self.why[ids] == 0
        edges = np.searchsorted(ids, self.corpus.firsts)
        for part, begin, end in zip(self.corpus.parts, edges[:-1], edges[1:], strict=True):
            if begin < end:
                places = np.arange(begin, end)[stays[begin:end]]
                rows = ids[places] - part.first
                characters = int(part.columns["characters"][rows].sum())
                self._count(part.source, reason, Tally(len(places), characters, int(end - begin)))
                self._keep_examples(part.source, reason, places, ids, values, originals)
        self.why[ids[stays]] = code

    def selection(self, common: int) -> Selection:
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

    def _count(self, source: str, reason: str, more: Tally) -> None:
        of = self._counts.setdefault(source, {})
        before = asdict(of.get(reason, Tally(0, 0, 0)))
        of[reason] = Tally(**{name: each + before[name] for name, each in asdict(more).items()})

    def _keep_examples(
        self,
        source: str,
        reason: str,
        places: I64,
        ids: I64,
        values: npt.NDArray[Any] | None,
        originals: I64 | None,
    ) -> None:
        """Keep the examples with the lowest hashed ids: they do not depend on other documents."""
        if not len(places):
            return
        drawn = splitmix64(ids[places].view(np.uint64))
        some = self._examples.setdefault(source, {}).setdefault(reason, [])
        for place in places[np.argsort(drawn)[:EXAMPLES]].tolist():
            number = int(ids[place])
            value = float(values[place]) if values is not None else None
            some.append(
                (
                    int(splitmix64(np.uint64(number))),
                    number,
                    value if value is not None and isfinite(value) else None,  # JSON has no NaN
                    int(originals[place]) if originals is not None else None,
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


def _filter_removals(
    part: MeasuredPart, filters: Mapping[str, Any]
) -> Iterator[tuple[str, npt.NDArray[Any], Bool]]:
    """Yield each bound of a part's filters, its values, and the mask of documents out of bounds."""
    for name, keys in filters.items():
        for bound in load_spec("filter", name).bounds:
            limit = getattr(keys, bound.key)
            if limit is None:
                continue
            value = part.columns[f"{name}.{bound.statistic}"]
            edge = np.float32(limit)
            within = value >= edge if bound.is_least else value <= edge
            yield f"{name}.{bound.key}", value, ~within  # NaN is out of bounds


def _remove_contaminated(removals: _Removals, rule: Contamination, identical: I64) -> int:
    """Remove documents with passages of held-out texts.

    Returns:
        Number of n-grams that were ignored as boilerplate.
    """
    parts = removals.corpus.parts
    highest = max((int(part.columns["contamination"].max(initial=0)) for part in parts), default=0)
    frequency = np.zeros(highest + 1, dtype=np.int64)
    for part in parts:
        owner = _rows_of_hits(part)
        copies = (part.among(identical[:, 0]) | removals.protected[part.ids])[owner]
        frequency += np.bincount(part.columns["contamination"][~copies], minlength=highest + 1)
    counted = np.ones(highest + 1, dtype=np.bool_)
    if rule.max_documents is not None:
        counted = frequency <= rule.max_documents
    for part in parts:
        owner = _rows_of_hits(part)[counted[part.columns["contamination"]]]
        hits = np.bincount(owner, minlength=part.columns.documents)
        goes = hits >= max(1, rule.min_ngrams)
        removals.remove(CONTAMINATED, part.ids[goes], hits[goes])
    return int((~counted).sum())


def _rows_of_hits(part: MeasuredPart) -> I64:
    """Return the row of each of a part's hits, [hits]."""
    ends = np.asarray(part.columns["contamination.ends"])
    return np.repeat(np.arange(len(ends)), np.diff(ends, prepend=0))


def _remove_copies(removals: _Removals, identical: I64, removes: bool) -> dict[int, int]:
    """Remove copies of identical texts, except the first of each text that is still there.

    Returns:
        For the first document of each text with several copies, the copy that stays, or -1 if none
        does. Documents that stay themselves are left out.
    """
    groups = np.concatenate((np.unique(identical[:, 1]), identical[:, 1]))
    members = np.concatenate((np.unique(identical[:, 1]), identical[:, 0]))
    order = np.lexsort((removals.ranks(members), groups))
    groups, members = groups[order], members[order]
    here = removals.why[members] == 0
    first, begin = np.unique(groups[here], return_index=True)
    stays = members[here][begin]
    if removes:
        originals = stays[np.searchsorted(first, groups[here])] if len(first) else groups[here]
        goes = originals != members[here]
        ids, originals = members[here][goes], originals[goes]
        order = np.argsort(ids)
        removals.remove(EXACT, ids[order], originals=originals[order])
    result = dict.fromkeys(np.setdiff1d(groups, first).tolist(), -1)
    moved = first != stays
    return result | dict(zip(first[moved].tolist(), stays[moved].tolist(), strict=True))


def _remove_near_duplicates(
    removals: _Removals, pairs: Pairs, identical: I64, stays: Mapping[int, int]
) -> None:
    """Remove near duplicates of earlier documents that stay."""
    ids = pairs.ids
    if stays:
        ids = ids.copy()
        for first, other in stays.items():
            ids[pairs.ids == first] = other
    there = (ids >= 0).all(1) & (removals.why[ids] == 0).all(1)
    ranks, index = np.sort(removals.ranks(ids[there]), axis=1), pairs.jaccard[there]
    ids = ranks % max(1, len(removals.protected))
    order = np.lexsort((ranks[:, 0], ranks[:, 1]))
    gone: dict[int, tuple[int, float]] = {}
    for (low, high), value in zip(ids[order].tolist(), index[order].tolist(), strict=True):
        if removals.protected[high]:
            continue
        if high not in gone and low not in gone:  # `low` is final: pairs are sorted by `high`
            gone[high] = (low, value)
    removed = np.array(list(gone), dtype=np.int64)
    removals.remove(
        NEAR,
        removed,
        np.array([value for _, value in gone.values()]),
        np.array([low for low, _ in gone.values()], dtype=np.int64),
    )


def _remove_repeated_passages(
    removals: _Removals, passages: Passages, share: float, stays: Mapping[int, int]
) -> None:
    """Remove documents that consist mostly of passages of earlier documents that stay."""
    begins = np.flatnonzero(np.diff(passages.document, prepend=-1))
    first = passages.document[begins]
    taking = np.array([stays.get(each, each) for each in first.tolist()], dtype=np.int64)
    there = (taking >= 0) & (removals.why[taking] == 0)
    ends = np.append(begins[1:], len(passages.document))[there]
    begins, taking = begins[there], taking[there]
    every = removals.corpus.rows("words", taking)
    has = np.zeros(int(passages.anchor.max(initial=-1)) + 1, dtype=np.bool_)
    gone: dict[int, float] = {}
    for number in np.argsort(removals.ranks(taking)).tolist():
        own = slice(begins[number], ends[number])
        known = has[passages.anchor[own]]
        part = words_covered(passages.word[own][known]) / int(every[number])
        if part >= share and not removals.protected[taking[number]]:
            gone[int(taking[number])] = part
        else:
            has[passages.anchor[own]] = True
    removals.remove(SUBSTRING, np.array(list(gone), dtype=np.int64), np.array(list(gone.values())))


HELD_OUT, DUPLICATES, SELECTION = ".held_out", ".duplicates", ".selection"
"""Folders beside those of the sources, whose names do not begin with a dot."""


def select_documents(
    parts: Sequence[PartToMeasure],
    folder: Path,
    rules: Rules,
    *,
    precedence: Sequence[str] = (),
    held_out: Iterable[Entry] = (),
    held_out_identity: str = "",
    protected: Callable[[MeasuredPart], Bool] | None = None,
    executor: Executor = INLINE,
    memory: int = MEMORY,
    done: Callable[[PartToMeasure], None] = lambda part: None,
) -> Selection:
    """Decide which documents of a corpus stay.

    Every step stores its result with a key of everything it depends on. A second call reads the
    results, a call after a kill continues, and with other thresholds only the decision is made
    again.

    Args:
        parts: In any order. Their filters are replaced by the rules' filters of their source.
        precedence: Sources, the first with the highest precedence; others follow by name.
        held_out: Texts to search for, if the rules have `contamination`.
        held_out_identity: Identity of these texts; if it is unchanged, none is read.
        protected: Returns the mask of a part's documents that always stay, [documents].
        memory: Bytes that a process of the deduplication may take for sorting.

    Raises:
        TrainctlError: What reading a part or a user's function raises; or stored results are
            damaged (exit code 5).
    """
    folder.mkdir(parents=True, exist_ok=True)
    remove_leftovers(folder)
    contaminates = rules.contamination is not None
    if contaminates:
        write_held_out(folder / HELD_OUT, held_out, identity=held_out_identity)
    wanted = WantedColumns(
        near=rules.near is not None,
        held_out=folder / HELD_OUT if contaminates else None,
        passages=rules.substring is not None,
    )
    parts = [replace(part, filters=rules.filters.get(part.source, {})) for part in parts]
    measure_all(parts, folder, wanted, executor=executor, done=done)
    corpus = MeasuredCorpus.load(parts, folder, precedence)
    stay = (
        np.concatenate([np.empty(0, np.bool_), *map(protected, corpus.parts)])
        if protected
        else None
    )
    mark = sha256(np.packbits(stay).tobytes()).hexdigest() if stay is not None else ""
    key = key_of_corpus(corpus, to_plain(rules), mark)
    if finished_key(folder / SELECTION) == key:
        return Selection.load(folder / SELECTION)
    found = find_duplicates(corpus, rules, folder / DUPLICATES, memory, executor)
    selection = decide_removals(corpus, rules, found.identical, found.pairs, found.passages, stay)
    selection.write(folder / SELECTION, key)
    return selection
