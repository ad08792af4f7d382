"""Documents that are measured together: their characters in one array, and words, lines, n-grams.

All of it is arithmetic on whole arrays; no Python runs for a word. A batch takes up to 70 bytes a
character while it is measured, so `CHARACTERS` bound the memory, and the longest document does.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np
import numpy.typing as npt

from trainctl.data.quality.hashing import I64, U64, Bool, Segments

CHARACTERS = 1 << 18
"""Of a batch, if no document is longer: its arrays stay in a core's cache."""

WORD, SPACE, LETTER, ALONE = 1, 2, 4, 8
"""Bits of a character's class: part of a word, white space, a letter, a word by itself."""

_ASTRAL = 0x10000
"""All characters from here on count as one: a word by itself, as ideographs are."""

_WITHOUT_SPACES = (
    (0x0E00, 0x0EFF),  # Thai, Lao
    (0x1000, 0x109F),  # Myanmar
    (0x1780, 0x17FF),  # Khmer
    (0x3040, 0x30FF),  # Hiragana, Katakana
    (0x3400, 0x4DBF),  # CJK ideographs, extension A
    (0x4E00, 0x9FFF),  # CJK ideographs
    (0xF900, 0xFAFF),  # CJK compatibility ideographs
)
"""Scripts that set no space between words: a character is a word, as for Chinese BLEU."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A document to measure."""

    number: int
    """Its number in the part, which the columns keep."""
    text: str
    url: str = ""
    """Where it is from; empty if unknown."""


@dataclass(frozen=True, slots=True)
class Spans:
    """Segments of a batch's characters, none of which crosses a document."""

    starts: I64
    """First characters, ascending, [spans]."""
    ends: I64
    """Characters after the last, [spans]."""
    document: I64
    """The index in the batch of each one's document, [spans]."""

    @property
    def lengths(self) -> I64:
        """Characters, [spans]."""
        return self.ends - self.starts


class DocumentBatch:
    """Some documents, lower-cased, one after the other.

    Args:
        entries: The documents, in order.

    Attributes:
        entries: The same.
        lowered: Their texts in lower case.
        codes: Code points of all; a line feed stands after each document, [characters].
        ends: Where each document ends, without that line feed, [documents].
        starts: Where each begins, [documents].
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
        """Bits of each character's class, [characters]."""
        classes: npt.NDArray[np.uint8] = _classes()[np.minimum(self.codes, _ASTRAL)]
        return classes

    @cached_property
    def segments(self) -> Segments:
        """For hashes of spans."""
        return Segments(self.codes)

    @cached_property
    def words(self) -> Spans:
        """Runs of letters, digits, marks and underscores; of scripts without spaces, characters."""
        is_word = (self.classes & WORD) != 0
        alone = (self.classes & ALONE) != 0
        cut = (
            ~is_word[1:] | ~is_word[:-1] | alone[1:] | alone[:-1]
        )  # between a character and the next
        return self._runs(is_word, cut)

    @cached_property
    def tokens(self) -> Spans:
        """Runs of anything but white space: what the rules of filters call words."""
        is_token = (self.classes & SPACE) == 0
        return self._runs(is_token, is_token[1:] != is_token[:-1])

    @cached_property
    def lines(self) -> Spans:
        """Lines that are not blank, without the white space around them."""
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
        """Lines between blank ones."""
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
        """[words]."""
        return self.hashes(self.words)

    def hashes(self, spans: Spans) -> U64:
        """64-bit hashes of spans' characters, [spans]."""
        return self.segments.hashes(spans.starts, spans.ends)

    @cached_property
    def _grams(self) -> Segments:
        return Segments(self.word_hashes)

    def ngrams(self, size: int, *, short: bool) -> tuple[U64, I64]:
        """Hashes of the runs of so many words, and the word that each begins with, [n-grams].

        Args:
            short: Whether a document of fewer words has one n-gram: all of them.
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
        """Return the number of spans, or the sum of their weights, of each document,
        [documents]."""
        return np.bincount(of.document, weights, len(self)).astype(np.float64)

    def _runs(self, inside: Bool, cut: Bool) -> Spans:
        """Runs of characters inside, which end wherever `cut` is true: [characters - 1]."""
        first = np.concatenate(([True], cut)) & inside
        last = np.concatenate((cut, [True])) & inside
        return self._spans(np.flatnonzero(first), np.flatnonzero(last) + 1)

    def _spans(self, starts: I64, ends: I64) -> Spans:
        return Spans(starts, ends, np.searchsorted(self.ends, starts, side="right"))


def batches(entries: Iterable[Entry], characters: int = CHARACTERS) -> Iterator[DocumentBatch]:
    """Documents in batches of at least so many characters, except the last."""
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
def _classes() -> npt.NDArray[np.uint8]:
    """Return the class of each code point below `_ASTRAL`, and of all others: [_ASTRAL + 1]."""
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
