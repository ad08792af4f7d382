"""Rules that remove documents of a corpus, and the resulting selection with its reasons.

Decontamination finds word n-grams of held-out texts in documents. As for GPT-3 (Brown et al., 2020,
appendix C) n-grams have 13 words. N-grams that very many documents have are boilerplate; `decide`
ignores them afterwards. A shorter held-out text is searched for as a whole, if it has at least
`SHORTEST` words.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trainctl.config.codec import to_plain
from trainctl.data.quality.batches import I64, U64, Bool, DocumentBatch, Entry, batches
from trainctl.data.quality.columns import Columns, ColumnWriter, finished_key

CONTAMINATED, EXACT, NEAR, SUBSTRING = "contamination", "exact", "near", "substring"
EXAMPLES = 5
"""Number of example documents kept for each source and reason."""


@dataclass(frozen=True, slots=True)
class Contamination:
    """Rule that removes documents with passages of held-out texts."""

    min_ngrams: int = 1
    """Minimum number of held-out n-grams in a document that is removed."""
    max_documents: int | None = 10
    """An n-gram in more documents than this, copies not counted, is boilerplate and is ignored.
    None ignores none.
    """


@dataclass(frozen=True, slots=True)
class Rules:
    """Rules that remove documents."""

    filters: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Settings of each source's filters: `{source: {filter: keys}}`."""
    contamination: Contamination | None = None
    """None disables decontamination."""
    exact: bool = True
    """Whether to remove copies of identical texts. They are always removed if `near` is set."""
    near: float | None = None
    """Minimum Jaccard index of near duplicates; None keeps them."""
    substring: float | None = None
    """Minimum share of words in passages of earlier documents for which a document is removed;
    None disables this.
    """


@dataclass(frozen=True, slots=True)
class Tally:
    """Numbers of documents that a reason removes from a source."""

    documents: int
    """Documents removed for this reason and for no earlier one."""
    characters: int
    applies: int
    """Documents that the reason applies to, including those removed for an earlier one."""


@dataclass(frozen=True, slots=True)
class Example:
    """A removed document."""

    source: str
    part: str
    number: int
    value: float | None = None
    """The number that decided: the filter's statistic, the number of held-out n-grams, the
    Jaccard index, or the share of words in shared passages. None if it is not finite.
    """
    like: tuple[str, str, int] | None = None
    """Source, part and number of the document that stays in its place."""
    word: int | None = None
    """First word of the first held-out passage (`contamination.passage`)."""


@dataclass(frozen=True, slots=True)
class Selection:
    """Decision for every document of a corpus, with counts and examples."""

    why: npt.NDArray[np.uint8]
    """0 for a document that stays, else 1 + the index of the first reason, [documents]."""
    reasons: tuple[str, ...]
    """Names of the reasons in the order of application, like `gopher_quality.min_words`."""
    counts: Mapping[str, Mapping[str, Tally]]
    """`{source: {reason: Tally}}`, for reasons that apply to some document."""
    examples: Mapping[str, Mapping[str, tuple[Example, ...]]]
    """`{source: {reason: some of the documents removed for it}}`."""
    common_ngrams: int
    """Number of held-out n-grams that were ignored as boilerplate."""
    parts: tuple[tuple[str, str, int], ...]
    """Source, name and first id of each part."""

    @property
    def stays(self) -> Bool:
        """Mask of the documents that stay, [documents]."""
        stays: Bool = self.why == 0
        return stays

    def write(self, folder: Path, key: str) -> None:
        """Store the selection with a key of everything it depends on."""
        with ColumnWriter(folder, key) as writer:
            writer.append({"why": self.why})
            writer.finish(
                reasons=self.reasons,
                counts=to_plain(self.counts),
                examples=to_plain(self.examples),
                common_ngrams=self.common_ngrams,
                parts=self.parts,
            )

    @classmethod
    def load(cls, folder: Path) -> Selection:
        """Load what `write` stored."""
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
                source: {reason: tuple(map(example_from_json, some)) for reason, some in of.items()}
                for source, of in facts["examples"].items()
            },
            common_ngrams=facts["common_ngrams"],
            parts=tuple(map(tuple, facts["parts"])),
        )


def example_from_json(data: dict[str, Any]) -> Example:
    """Create an example from its JSON."""
    like = data["like"]
    return Example(**{**data, "like": tuple(like) if like is not None else None})


WORDS = 13
"""Words per n-gram."""
SHORTEST = 8
"""Minimum number of words of a held-out text; shorter texts are ignored."""


def write_held_out(folder: Path, texts: Iterable[Entry], *, identity: str = "") -> HeldOut:
    """Write the hashed n-grams of held-out texts to a folder and return them.

    This takes up to 40 bytes of memory per word of the texts. If the folder was written with the
    same `identity` (not empty), no text is read.
    """
    if identity and _written_identity(folder) == identity:
        return HeldOut.load(folder)
    hashes, sizes = [], []
    too_short = 0
    for batch in batches(texts):
        counts = batch.total(batch.words).astype(np.int64)
        too_short += int((counts < SHORTEST).sum())
        short = np.unique(counts[(counts >= SHORTEST) & (counts < WORDS)]).tolist()
        for size in (WORDS, *short):
            grams, begin = batch.ngrams(size, short=False)
            document = batch.words.document[begin]
            whole = np.ones(len(begin), np.bool_) if size == WORDS else counts[document] == size
            hashes.append(grams[whole])
            sizes.append(np.full(int(whole.sum()), size, dtype=np.int16))
    every = np.concatenate([np.empty(0, np.uint64), *hashes])
    unique, first = np.unique(every, return_index=True)
    words = np.concatenate([np.empty(0, np.int16), *sizes])[first]
    with ColumnWriter(folder, sha256(unique.tobytes()).hexdigest()) as writer:
        writer.append({"ngram": unique, "words": words})
        writer.finish(sizes=np.unique(words).tolist(), too_short=too_short, identity=identity)
    return HeldOut.load(folder)


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Hashed n-grams of held-out texts."""

    key: str
    ngrams: U64
    sizes: tuple[int, ...]
    too_short: int
    table: npt.NDArray[np.bool_]
    """Lookup by the top bits of a hash: False if no n-gram has them, which excludes most hashes
    quickly.
    """

    @classmethod
    def load(cls, folder: Path) -> HeldOut:
        """Load what `write_held_out` wrote; cached per process."""
        return _load_held_out(folder, Columns.load(folder).manifest["key"])

    def find(self, batch: DocumentBatch) -> tuple[npt.NDArray[np.uint32], I64, I64]:
        """Find these n-grams in documents.

        Returns:
            Indices of the n-grams, ascending and unique within a document, [hits]; their number in
            each document, [documents]; and the first word of the first hit, [documents], -1 if
            there is none.
        """
        shift = np.uint64(64 - (len(self.table) - 1).bit_length())
        which, where = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        for size in self.sizes:
            hashes, begin = batch.ngrams(size, short=False)
            likely = np.flatnonzero(self.table[hashes >> shift])
            place = np.minimum(np.searchsorted(self.ngrams, hashes[likely]), len(self.ngrams) - 1)
            found = self.ngrams[place] == hashes[likely]
            which.append(place[found])
            where.append(begin[likely[found]])
        hits, words = np.concatenate(which), np.concatenate(where)
        document = batch.words.document[words] if len(words) else words
        first = np.full(len(batch), np.iinfo(np.int64).max)
        np.minimum.at(first, document, words)
        first -= np.searchsorted(batch.words.document, np.arange(len(batch)))
        first[~np.isin(np.arange(len(batch)), document)] = -1
        unique = np.unique(document << 32 | hits)
        counts = np.bincount(unique >> 32, minlength=len(batch)).astype(np.int64)
        return (unique & 0xFFFFFFFF).astype(np.uint32), counts, first


def _written_identity(folder: Path) -> str:
    """Return the identity that a folder's n-grams were written with; empty if there is none."""
    found = Columns.load(folder).manifest if finished_key(folder) is not None else {}
    return str(found.get("identity", ""))


@cache
def _load_held_out(folder: Path, key: str) -> HeldOut:
    columns = Columns.load(folder)
    ngrams = np.array(columns["ngram"])
    bits = min(30, max(16, (16 * len(ngrams)).bit_length()))
    table = np.zeros(1 << bits, dtype=np.bool_)
    table[ngrams >> np.uint64(64 - bits)] = True
    return HeldOut(
        key=key,
        ngrams=ngrams,
        sizes=tuple(columns.manifest["sizes"]),
        too_short=columns.manifest["too_short"],
        table=table,
    )


def words_from(text: str, first: int, words: int = WORDS) -> str:
    """Return `words` words of a text from word `first` on, in lower case, to show a hit."""
    batch = DocumentBatch([Entry(0, text)])
    spans = batch.words
    last = min(first + words, len(spans.starts)) - 1
    return batch.lowered[0][spans.starts[first] : spans.ends[last]]
