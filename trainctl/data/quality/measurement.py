"""Measure the documents of a corpus, part by part: the only time that their texts are read.

A part is done if its columns' manifest exists with the key of what is wanted. A finished part is
not measured again, whichever process did it. Memory is one batch per process (`batches`), plus 13
bytes and a table of up to 32 bytes for each word of held-out texts.

Fingerprints find similar documents. MinHash: documents that share most of their word 5-grams agree
in many values of a signature (Broder, "On the resemblance and containment of documents", 1997;
bands of rows: Leskovec, Rajaraman and Ullman, "Mining of Massive Datasets", 3.4). A signature has
`HASHES` minima, each under another permutation of the 32-bit hashes of a document's n-grams. The
share of minima in which two documents agree estimates their Jaccard index, |A and B| / |A or B|.

A *sketch* has the `SKETCH` smallest hashes of a document (Cohen and Kaplan, "Summarizing data using
bottom-k sketches", 2007). The Jaccard index of two sketches is exact if both documents have no more
n-grams than that; otherwise its standard error is below sqrt(J (1 - J) / SKETCH).

An *anchor* is the n-gram with the lowest hash of `WINDOW` consecutive ones (Schleimer, Wilkerson
and Aiken, "Winnowing", 2003). Two documents that share `SHARED` consecutive words share an anchor,
wherever the words are, and documents that share fewer than `ANCHOR_WORDS` share none. About 8 of
100 words have an anchor.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b, sha256
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trainctl.config.registry import function_of, load_spec
from trainctl.data.cache_files import convert_write_errors
from trainctl.data.executors import INLINE, Executor, ExecutorTask, require_results
from trainctl.data.quality.batches import I64, U64, DocumentBatch, batches, run_starts
from trainctl.data.quality.columns import (
    ColumnWriter,
    PartToMeasure,
    columns_folder,
    finished_key,
    remove_leftovers,
)
from trainctl.data.quality.selection import HeldOut
from trainctl.data.source_sampler import splitmix64

U32 = npt.NDArray[np.uint32]

WORDS = 5
"""Words per n-gram."""
HASHES = 112
"""Minima per signature: 14 bands of 8 rows, 16 of 7, or 22 of 5."""
SKETCH = 4096
"""Maximum hashes of a sketch: 16 KiB, about 25,000 characters of text without repetition."""

_DRAWN = splitmix64(np.arange(2 * HASHES, dtype=np.uint64))
_FACTORS = (_DRAWN[:HASHES] >> np.uint64(32)).astype(np.uint32) | np.uint32(1)
_MASKS = (_DRAWN[HASHES:] >> np.uint64(32)).astype(np.uint32)


@dataclass(frozen=True, slots=True)
class Bands:
    """Banding of signatures: two documents that agree in all rows of a band are candidates."""

    count: int
    rows: int
    """Values per band; count x rows is at most `HASHES`."""

    def recall(self, jaccard: float) -> float:
        """Return the probability that two documents of this Jaccard index are candidates."""
        return 1 - (1 - jaccard**self.rows) ** self.count

    @classmethod
    def for_threshold(cls, threshold: float, recall: float = 0.95) -> Bands:
        """Return the bands with this recall at a threshold that have most rows: fewest
        candidates.
        """
        for rows in range(HASHES, 1, -1):
            bands = cls(HASHES // rows, rows)
            if bands.recall(threshold) >= recall:
                return bands
        return cls(HASHES, 1)

    def keys(self, signatures: U32) -> U64:
        """Return 64-bit keys of each document's bands, [documents, count]; bands share no key."""
        used = signatures[:, : self.count * self.rows].astype(np.uint64)
        split = used.reshape(len(signatures), self.count, self.rows)
        keys = np.broadcast_to(np.arange(self.count, dtype=np.uint64), split.shape[:2])
        for row in range(self.rows):
            keys = splitmix64(keys ^ split[:, :, row])
        return keys


def ngram_sets(batch: DocumentBatch) -> tuple[U32, I64]:
    """Return the distinct n-gram hashes of each document, ascending, documents concatenated.

    Returns:
        The hashes, [n-grams], and their number in each document, [documents].
    """
    hashes, begin = batch.ngrams(WORDS, short=True)
    owner = batch.words.document[begin].astype(np.uint64)
    keys = np.sort(owner << np.uint64(32) | hashes >> np.uint64(32))
    keys = keys[run_starts(keys)]
    owners = (keys >> np.uint64(32)).astype(np.int64)
    return keys.astype(np.uint32), np.bincount(owners, minlength=len(batch)).astype(np.int64)


def signatures(values: U32, counts: I64) -> U32:
    """Return MinHash signatures, [documents, HASHES]; all ones for a document without words.

    `values` and `counts` are the result of `ngram_sets`.
    """
    result = np.full((HASHES, len(counts)), np.uint32(0xFFFFFFFF))
    there = counts > 0
    if len(values):
        starts = (np.cumsum(counts) - counts)[there]
        hashed = np.empty_like(values)
        for number in range(HASHES):
            np.bitwise_xor(values, _MASKS[number], out=hashed)
            np.multiply(hashed, _FACTORS[number], out=hashed)
            result[number, there] = np.minimum.reduceat(hashed, starts)
    return np.ascontiguousarray(result.T)


def sketches(values: U32, counts: I64) -> tuple[U32, I64]:
    """Return the smallest `SKETCH` hashes of each document, concatenated, and their numbers.

    `values` and `counts` are the result of `ngram_sets`.
    """
    if not len(counts) or counts.max() <= SKETCH:
        return values, counts
    place = np.arange(len(values)) - np.repeat(np.cumsum(counts) - counts, counts)
    return values[place < SKETCH], np.minimum(counts, SKETCH)


def jaccard(left: tuple[U32, I64], right: tuple[U32, I64]) -> npt.NDArray[np.float64]:
    """Return the Jaccard index of each pair of sketches, [pairs]; 0 if one has no words.

    `left` and `right` have the hashes of the pairs' first and second documents, concatenated, and
    their counts, [pairs]. If a sketch is cut off, only hashes in the range of both sketches are
    compared: a random sample of the documents' n-grams.
    """
    pairs = len(left[1])
    owners = [np.repeat(np.arange(pairs), counts) for _, counts in (left, right)]
    limit = np.full(pairs, 0xFFFFFFFF, dtype=np.uint32)
    for values, counts in (left, right):
        cut = counts >= SKETCH
        limit[cut] = np.minimum(limit[cut], values[np.cumsum(counts)[cut] - 1])
    keys = [
        owner.astype(np.uint64) << np.uint64(32) | values
        for owner, (values, _) in zip(owners, (left, right), strict=True)
    ]
    both = np.concatenate(keys)
    del keys, owners
    both.sort()
    owner = (both >> np.uint64(32)).astype(np.int64)
    both, owner = _at_most(both, owner, limit)
    again = ~run_starts(both)
    shared = np.bincount(owner[again], minlength=pairs)
    union = np.bincount(owner, minlength=pairs) - shared
    index: npt.NDArray[np.float64] = shared / np.maximum(union, 1)
    return index


def _at_most(keys: U64, owner: I64, limit: U32) -> tuple[U64, I64]:
    kept = keys.astype(np.uint32) <= limit[owner]
    return keys[kept], owner[kept]


ANCHOR_WORDS = 25
"""Words per n-gram."""
WINDOW = 26
"""Number of consecutive n-grams, one of which is an anchor."""
SHARED = ANCHOR_WORDS + WINDOW - 1
"""Words of a shared passage that is always found."""


def anchors(batch: DocumentBatch) -> tuple[U64, I64, I64]:
    """Return the anchors of documents.

    Returns:
        Hashes of the anchors, [anchors]; the word of the document at which each begins, ascending
        within a document, [anchors]; and their number in each document, [documents].
    """
    hashes, begin = batch.ngrams(ANCHOR_WORDS, short=False)
    document = batch.words.document[begin]
    chosen = np.empty(0, dtype=np.int64)
    if len(hashes) >= WINDOW:
        windows = np.lib.stride_tricks.sliding_window_view(hashes, WINDOW)
        whole = np.flatnonzero(document[: len(windows)] == document[WINDOW - 1 :])
        chosen = whole + windows[whole].argmin(axis=1)
    counts = np.bincount(document, minlength=len(batch))
    short = np.flatnonzero((counts < WINDOW)[document])  # a document of one incomplete window
    order = short[np.lexsort((hashes[short], document[short]))]
    chosen = np.unique(np.concatenate((chosen, order[run_starts(document[order])])))
    of_document = np.searchsorted(batch.words.document, np.arange(len(batch)))
    words = begin[chosen] - of_document[document[chosen]]
    return hashes[chosen], words, np.bincount(document[chosen], minlength=len(batch))


def words_covered(words: I64) -> int:
    """Count the words in the n-grams that begin at `words` (ascending), each once."""
    return int(np.minimum(np.diff(words), ANCHOR_WORDS).sum()) + ANCHOR_WORDS if len(words) else 0


VERSION = 1
"""Version of the measures: raise it when the same document gets other numbers."""


@dataclass(frozen=True, slots=True)
class WantedColumns:
    """Columns to measure of all parts."""

    exact: bool = True
    near: bool = True
    passages: bool = False
    held_out: Path | None = None
    """Folder of held-out n-grams (`contamination.write_held_out`), or None."""


def measure_all(
    parts: Sequence[PartToMeasure],
    folder: Path,
    wanted: WantedColumns,
    *,
    executor: Executor = INLINE,
    done: Callable[[PartToMeasure], None] = lambda part: None,
) -> None:
    """Measure all parts that are not done yet.

    Args:
        folder: Folder of all columns; a part's are in `SOURCE/NAME/` below it.

    Raises:
        TrainctlError: What reading a part or a user's function raises, or as `Executor.run`.
            Finished parts are kept.
    """
    held_out = HeldOut.load(wanted.held_out) if wanted.held_out is not None else None
    named = {f"{part.source}/{part.name}": part for part in parts}
    keys = {name: _part_key(part, wanted, held_out) for name, part in named.items()}

    def is_done(name: str) -> bool:
        return finished_key(folder / name) == keys[name]

    tasks = []
    for name, part in named.items():
        if is_done(name):
            done(part)
        else:
            tasks.append(ExecutorTask(name, partial(measure_part, part, folder, wanted), part.size))
    executor.run(tasks, lambda task: done(named[task.name]))
    require_results(executor, [task.name for task in tasks], is_done, folder)
    for source in {part.source for part in parts}:
        remove_leftovers(folder / source)


def measure_part(part: PartToMeasure, folder: Path, wanted: WantedColumns) -> None:
    """Measure a part, unless it is done."""
    target = columns_folder(part, folder)
    held_out = HeldOut.load(wanted.held_out) if wanted.held_out is not None else None
    key = _part_key(part, wanted, held_out)
    if finished_key(target) == key:
        return
    measures = {
        name: partial(function_of("filter", name), **settings)
        for name, settings in _filter_settings(part).items()
    }
    characters = 0
    with convert_write_errors(target), ColumnWriter(target, key) as writer:
        for batch in _batches_or_empty(batches(part.read())):
            number = np.array([entry.number for entry in batch.entries], dtype=np.int64)
            writer.append({"number": number, "characters": batch.ends - batch.starts})
            if wanted.exact:
                writer.append({"hash": text_hashes(batch)})
            if wanted.near:
                _append_near(writer, batch)
            if wanted.passages:
                hashes, words, counts = anchors(batch)
                writer.append_ragged("anchor", hashes, counts)
                writer.append({"anchor.word": words.astype(np.uint32)})
                writer.append({"words": batch.total(batch.words).astype(np.int64)})
            if held_out is not None:
                which, counts, first = held_out.find(batch)
                writer.append_ragged("contamination", which, counts)
                writer.append({"contamination.word": first})
            for name, numbers in measures.items():
                writer.append({f"{name}.{each}": got for each, got in numbers(batch).items()})
            characters += int((batch.ends - batch.starts).sum())
        writer.finish(source=part.source, name=part.name, characters=characters)


def text_hashes(batch: DocumentBatch) -> npt.NDArray[np.uint64]:
    """Return 128 bits of BLAKE2b of each text, [documents, 2]."""
    digests = (
        blake2b(entry.text.encode(errors="surrogatepass"), digest_size=16).digest()
        for entry in batch.entries
    )
    return np.frombuffer(b"".join(digests), dtype="<u8").reshape(len(batch), 2)


def _append_near(writer: ColumnWriter, batch: DocumentBatch) -> None:
    values, counts = ngram_sets(batch)
    writer.append({"ngrams": counts, "signature": signatures(values, counts)})
    writer.append_ragged("sketch", *sketches(values, counts))


def _batches_or_empty(every: Iterator[DocumentBatch]) -> Iterator[DocumentBatch]:
    """Yield the batches, or one empty batch, so that an empty part has all columns."""
    empty = True
    for batch in every:
        empty = False
        yield batch
    if empty:
        yield DocumentBatch([])


def _filter_settings(part: PartToMeasure) -> dict[str, dict[str, Any]]:
    """Return the settings that the statistics of a part's filters depend on, by filter."""
    return {
        name: {each: getattr(keys, each) for each in load_spec("filter", name).settings}
        for name, keys in part.filters.items()
    }


def _part_key(part: PartToMeasure, wanted: WantedColumns, held_out: HeldOut | None) -> str:
    """Return a digest of everything that a part's columns depend on."""
    what = [
        *(VERSION, part.source, part.name, part.identity, _filter_settings(part)),
        *(wanted.exact, wanted.near, wanted.passages),
        held_out.key if held_out is not None else None,
    ]
    return sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()
