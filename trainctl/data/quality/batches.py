"""Batches of documents to measure: their characters in one array, with words, lines and n-grams.

All of this is arithmetic on whole arrays, without Python code per word. Measuring a batch takes up
to 70 bytes of memory a character, so `CHARACTERS` or the longest document bounds the memory.

The hash of a segment a[s:e] is the polynomial sum over i of a[i] R^(i-s), modulo 2^64, mixed with
the length. R is odd and so invertible, and all segments of an array follow from one running sum
(Karp and Rabin, "Efficient randomized pattern-matching algorithms", 1987). The cost is linear in
the array's length, whatever the segments are and however they overlap.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from trainctl.data.source_sampler import splitmix64

U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]

_MULTIPLIER = 0x9FB21C651E98DF2B
"""R: odd; R - 1 and R + 1 are divisible by 2 and 4 only, so that neighbors in another order
differ in nearly all bits.
"""

_FOR_LENGTH = np.uint64(0x9E3779B97F4A7C15)
"""Added once per element, so that trailing zeros change the hash."""


def run_starts(*columns: npt.NDArray[Any]) -> Bool:
    """Return the mask of rows that differ from the row before in a column; the first row differs.

    In sorted columns these are the first rows of each distinct value.
    """
    starts = np.ones(len(columns[0]), dtype=np.bool_)
    starts[1:] = np.logical_or.reduce([each[1:] != each[:-1] for each in columns])
    return starts


class Segments:
    """Prefix sums of an array of integers below 2^64, for hashing any of its segments."""

    def __init__(self, values: npt.NDArray[Any]) -> None:
        self._sums = np.zeros(len(values) + 1, dtype=np.uint64)
        scaled = np.multiply(values, _POWERS.up_to(len(values)), dtype=np.uint64)
        np.cumsum(scaled, out=self._sums[1:])

    def hashes(self, starts: I64, ends: I64) -> U64:
        """Return 64-bit hashes of values[start:end], [segments]; equal segments have equal
        hashes.
        """
        sums = (self._sums[ends] - self._sums[starts]) * _INVERSES.up_to(len(self._sums))[starts]
        return splitmix64(sums + (ends - starts).astype(np.uint64) * _FOR_LENGTH)


def hash_of_word(word: str) -> np.uint64:
    """Return the hash that `Segments` over code points gives for a word."""
    codes = np.array([ord(each) for each in word], dtype=np.uint32)
    return cast(np.uint64, Segments(codes).hashes(np.array([0]), np.array([len(codes)]))[0])


class _Powers:
    """Powers of a number modulo 2^64, cached and extended as needed."""

    def __init__(self, base: int) -> None:
        self._base = np.uint64(base)
        self._known = np.ones(1, dtype=np.uint64)

    def up_to(self, count: int) -> U64:
        """Return powers 0 to count - 1."""
        while len(self._known) < count:
            with np.errstate(over="ignore"):
                next_power = self._known[-1] * self._base
            self._known = np.concatenate((self._known, self._known * next_power))
        return self._known[:count]


_POWERS = _Powers(_MULTIPLIER)
_INVERSES = _Powers(pow(_MULTIPLIER, -1, 1 << 64))

CHARACTERS = 1 << 18
"""Characters of a batch, if no document is longer: its arrays fit in a core's cache."""

WORD, SPACE, LETTER, ALONE = 1, 2, 4, 8
"""Bits of a character's class: part of a word, white space, a letter, a word by itself."""

_ASTRAL = 0x10000
"""Code points from here on share one class: each character is a word by itself, like an
ideograph.
"""

_WITHOUT_SPACES = (
    (0x0E00, 0x0EFF),  # Thai, Lao
    (0x1000, 0x109F),  # Myanmar
    (0x1780, 0x17FF),  # Khmer
    (0x3040, 0x30FF),  # Hiragana, Katakana
    (0x3400, 0x4DBF),  # CJK ideographs, extension A
    (0x4E00, 0x9FFF),  # CJK ideographs
    (0xF900, 0xFAFF),  # CJK compatibility ideographs
)
"""Scripts without spaces between words: each character is a word, as for Chinese BLEU."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A document to measure."""

    number: int
    """Number of the document in its part, which the columns keep."""
    text: str
    url: str = ""
    """Address of the document; empty if unknown."""


@dataclass(frozen=True, slots=True)
class Spans:
    """Segments of a batch's characters. None of them crosses a document."""

    starts: I64
    """First character of each, ascending, [spans]."""
    ends: I64
    """Character after the last of each, [spans]."""
    document: I64
    """Index of each span's document in the batch, [spans]."""

    @property
    def lengths(self) -> I64:
        """Number of characters, [spans]."""
        return self.ends - self.starts


class DocumentBatch:
    """Consecutive documents in lower case, as arrays.

    `lowered` are the lower-case texts and `codes` their code points, [characters], with a line feed
    after each document. `starts` and `ends` are the bounds of each document in `codes` without that
    line feed, [documents].
    """

    def __init__(self, entries: Sequence[Entry]) -> None:
        self.entries = entries
        self.lowered = [entry.text.lower() for entry in entries]
        joined = "\n".join(self.lowered) + "\n"
        self.codes = np.frombuffer(joined.encode("utf-32-le", "surrogatepass"), dtype="<u4")
        lengths = np.fromiter(map(len, self.lowered), dtype=np.int64, count=len(entries))
        self.ends = np.cumsum(lengths + 1) - 1
        self.starts = self.ends - lengths

    def __len__(self) -> int:
        return len(self.entries)

    @cached_property
    def classes(self) -> npt.NDArray[np.uint8]:
        """Class bits of each character, [characters]."""
        classes: npt.NDArray[np.uint8] = _character_classes()[np.minimum(self.codes, _ASTRAL)]
        return classes

    @cached_property
    def segments(self) -> Segments:
        """Rolling hashes over the code points."""
        return Segments(self.codes)

    @cached_property
    def words(self) -> Spans:
        """Runs of letters, digits, marks and underscores; single characters in scripts without
        spaces.
        """
        is_word = (self.classes & WORD) != 0
        alone = (self.classes & ALONE) != 0
        cut = (
            ~is_word[1:] | ~is_word[:-1] | alone[1:] | alone[:-1]
        )  # between a character and the next
        return self._runs(is_word, cut)

    @cached_property
    def tokens(self) -> Spans:
        """Runs without white space, which the rules of filters call words."""
        is_token = (self.classes & SPACE) == 0
        return self._runs(is_token, is_token[1:] != is_token[:-1])

    @cached_property
    def lines(self) -> Spans:
        """Lines that are not blank, stripped of white space."""
        feeds = np.flatnonzero(self.codes == 10)
        filled = np.flatnonzero((self.classes & SPACE) == 0)
        if not len(filled):
            return self._spans(np.empty(0, np.int64), np.empty(0, np.int64))
        before = np.concatenate(([0], feeds[:-1] + 1))
        first, after = np.searchsorted(filled, before), np.searchsorted(filled, feeds)
        there = first < after
        return self._spans(filled[first[there]], filled[after[there] - 1] + 1)

    @cached_property
    def paragraphs(self) -> Spans:
        """Runs of lines between blank lines."""
        lines = self.lines
        if not len(lines.starts):
            return lines
        feeds = np.concatenate(([0], np.cumsum(self.codes == 10)))
        apart = (feeds[lines.starts[1:]] - feeds[lines.ends[:-1]]) > 1
        apart |= lines.document[1:] != lines.document[:-1]
        first = np.concatenate(([True], apart))
        return self._spans(lines.starts[first], lines.ends[np.concatenate((apart, [True]))])

    @cached_property
    def word_hashes(self) -> U64:
        """Hashes of the words, [words]."""
        return self.hashes(self.words)

    def hashes(self, spans: Spans) -> U64:
        """Return 64-bit hashes of spans' characters, [spans]."""
        return self.segments.hashes(spans.starts, spans.ends)

    @cached_property
    def _grams(self) -> Segments:
        return Segments(self.word_hashes)

    def ngrams(self, size: int, *, short: bool) -> tuple[U64, I64]:
        """Return the hash and the first word of each n-gram of `size` words, [n-grams].

        With `short`, a document of fewer words has one n-gram of all its words; otherwise it has
        none.
        """
        document = self.words.document
        first = np.searchsorted(document, np.arange(len(self)))
        last = np.searchsorted(document, np.arange(len(self)), side="right")[document]
        begin = np.arange(len(document))
        whole = begin + size <= last
        if short:
            whole |= begin == first[document]
        begin = begin[whole]
        return self._grams.hashes(begin, np.minimum(begin + size, last[begin])), begin

    def total(
        self, of: Spans, weights: npt.NDArray[np.generic] | None = None
    ) -> npt.NDArray[np.float64]:
        """Return the number of spans, or the sum of their weights, per document, [documents]."""
        return np.bincount(of.document, weights, len(self)).astype(np.float64)

    def _runs(self, inside: Bool, cut: Bool) -> Spans:
        """Return runs of characters in `inside`, cut after each character where `cut` is true.

        `inside` has the shape [characters], `cut` [characters - 1].
        """
        first = np.concatenate(([True], cut)) & inside
        last = np.concatenate((cut, [True])) & inside
        return self._spans(np.flatnonzero(first), np.flatnonzero(last) + 1)

    def _spans(self, starts: I64, ends: I64) -> Spans:
        return Spans(starts, ends, np.searchsorted(self.ends, starts, side="right"))


def batches(entries: Iterable[Entry], characters: int = CHARACTERS) -> Iterator[DocumentBatch]:
    """Group documents into batches of at least `characters` characters, except the last batch."""
    group: list[Entry] = []
    size = 0
    for entry in entries:
        group.append(entry)
        size += len(entry.text)
        if size >= characters:
            yield DocumentBatch(group)
            group, size = [], 0
    if group:
        yield DocumentBatch(group)


@cache
def _character_classes() -> npt.NDArray[np.uint8]:
    """Return the class of each code point below `_ASTRAL`, and one for all others, [_ASTRAL
    + 1].
    """
    table = np.zeros(_ASTRAL + 1, dtype=np.uint8)
    for code in range(_ASTRAL):
        letter = chr(code)
        if letter.isalnum() or letter == "_" or unicodedata.category(letter)[0] == "M":
            table[code] = WORD | (LETTER if letter.isalpha() else 0)
        elif letter.isspace():
            table[code] = SPACE
    for low, high in _WITHOUT_SPACES:
        table[low : high + 1] |= np.where(
            table[low : high + 1] & WORD, np.uint8(ALONE), np.uint8(0)
        )
    table[_ASTRAL] = WORD | LETTER | ALONE
    return table
