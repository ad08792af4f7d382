"""Statistics that filters judge documents by: one value per document, independent of thresholds.

Each function returns columns of a batch, `{statistic: [documents]}`. A word in these rules is a run
of characters without white space. Blank lines and paragraphs do not count. A share of nothing is 0.

The rules are of Rae et al., "Scaling Language Models: Methods, Analysis & Insights from Training
Gopher" (2021), appendix A.1.1 and table A1; Raffel et al., "Exploring the Limits of Transfer
Learning with a Unified Text-to-Text Transformer" (2020), section 2.2; Penedo et al., "The FineWeb
Datasets" (2024), section 3.6. Nothing is cut out of a document: C4's rules for lines become a share
of lines here. Users add word lists, URL lists and functions of their own.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trainctl.data.quality.batches import (
    I64,
    LETTER,
    SPACE,
    U64,
    Bool,
    DocumentBatch,
    Entry,
    Segments,
    Spans,
    hash_of_word,
    run_starts,
)
from trainctl.data.source_sampler import splitmix64
from trainctl.data.user_functions import make_importable
from trainctl.errors import TrainctlError, describe_exception
from trainctl.models.local_path import local_path

Statistics = dict[str, npt.NDArray[np.float32]]

STOP_WORDS = ("the", "be", "to", "of", "and", "that", "have", "with")
_BULLETS = np.array([ord(each) for each in "-*•‣▶◀◦■□▪▫–"], dtype=np.uint32)
_FULL_STOPS = np.array([ord(each) for each in ".!?。！？"], dtype=np.uint32)
_TERMINAL = np.array([ord(each) for each in ".!?\"'”’»…。！？"], dtype=np.uint32)
_ELLIPSIS, _DOT = ord("…"), ord(".")
_SHORT_LINE = 30
"""Characters below which a line is short, as in FineWeb."""
_C4_WORDS = 3
"""Minimum words of a line that C4 keeps."""
_C4_PHRASES = ("javascript", "terms of use", "privacy policy", "uses cookies", "cookie policy")
REPEATED_TOP = (2, 3, 4)
REPEATED = (5, 6, 7, 8, 9, 10)


def gopher_quality_statistics(batch: DocumentBatch) -> Statistics:
    """Compute the statistics of Gopher's quality rules."""
    tokens, lines = batch.tokens, batch.lines
    words = batch.total(tokens)
    letters = np.concatenate(([0], np.cumsum((batch.classes & LETTER) != 0)))
    lettered = letters[tokens.ends] > letters[tokens.starts]
    line_count = batch.total(lines)
    first, last = batch.codes[lines.starts], batch.codes[lines.ends - 1]
    dotted = _ends_in_dots(batch)
    return _as_columns(
        {
            "words": words,
            "mean_word_length": _divide_or_zero(batch.total(tokens, tokens.lengths), words),
            "hashes_per_word": _divide_or_zero(
                _characters_per_document(batch, batch.codes == ord("#")), words
            ),
            "ellipses_per_word": _divide_or_zero(_characters_per_document(batch, dotted), words),
            "lines": line_count,
            "bullet_lines": _divide_or_zero(
                batch.total(lines, np.isin(first, _BULLETS)), line_count
            ),
            "ellipsis_lines": _divide_or_zero(
                batch.total(lines, dotted[lines.ends - 1] | (last == _ELLIPSIS)), line_count
            ),
            "words_with_letters": _divide_or_zero(batch.total(tokens, lettered), words),
            "stop_words": _distinct_words(batch, STOP_WORDS),
        }
    )


def gopher_repetition_statistics(batch: DocumentBatch) -> Statistics:
    """Compute the statistics of Gopher's repetition rules.

    Every occurrence after the first is repeated. A character in several repeated n-grams counts
    once.
    """
    result: dict[str, npt.NDArray[np.float64]] = {}
    for name, spans in (("lines", batch.lines), ("paragraphs", batch.paragraphs)):
        again = _repeated_spans(batch.hashes(spans), spans.document)
        every = batch.total(spans, spans.lengths)
        result[f"repeated_{name}"] = _divide_or_zero(batch.total(spans, again), batch.total(spans))
        result[f"repeated_{name}_characters"] = _divide_or_zero(
            batch.total(spans, spans.lengths * again), every
        )
    result |= _repeated_ngrams(batch)
    return _as_columns(result)


def c4_statistics(batch: DocumentBatch) -> Statistics:
    """Compute the statistics of C4's rules, among them the share of lines C4 would keep."""
    lines = batch.lines
    last = np.isin(batch.codes[lines.ends - 1], _TERMINAL) & ~_ends_in_dots(batch)[lines.ends - 1]
    begins = np.zeros(len(batch.codes) + 1, dtype=np.int64)
    np.cumsum(np.bincount(batch.tokens.starts, minlength=len(batch.codes)), out=begins[1:])
    words = begins[lines.ends] - begins[lines.starts]
    kept = last & (words >= _C4_WORDS)
    for number in np.flatnonzero(kept):
        document = lines.document[number]
        offset = batch.starts[document]
        text = batch.lowered[document]
        begin, end = lines.starts[number] - offset, lines.ends[number] - offset
        if any(text.find(phrase, begin, end) >= 0 for phrase in _C4_PHRASES):
            kept[number] = False
    stops = np.isin(batch.codes, _FULL_STOPS)
    stops[:-1] &= (batch.classes[1:] & SPACE) != 0
    return _as_columns(
        {
            "sentences": _characters_per_document(batch, stops),
            "c4_lines": _divide_or_zero(batch.total(lines, kept), batch.total(lines)),
            "curly_brackets": _characters_per_document(batch, batch.codes == ord("{")),
            "lorem_ipsum": np.array([text.count("lorem ipsum") for text in batch.lowered], float),
        }
    )


def fineweb_statistics(batch: DocumentBatch) -> Statistics:
    """Compute the statistics of FineWeb's own rules."""
    lines = batch.lines
    count = batch.total(lines)
    ended = np.isin(batch.codes[lines.ends - 1], _TERMINAL)
    again = _repeated_spans(batch.hashes(lines), lines.document)
    return _as_columns(
        {
            "terminated_lines": _divide_or_zero(batch.total(lines, ended), count),
            "short_lines": _divide_or_zero(batch.total(lines, lines.lengths < _SHORT_LINE), count),
            "repeated_lines_characters": _divide_or_zero(
                batch.total(lines, lines.lengths * again), batch.total(lines, lines.lengths)
            ),
            "lines_per_word": _divide_or_zero(
                _characters_per_document(batch, batch.codes == 10), batch.total(batch.tokens)
            ),
        }
    )


def _repeated_ngrams(batch: DocumentBatch) -> dict[str, npt.NDArray[np.float64]]:
    """Return shares of characters in word n-grams that occur more than once.

    A repeated run of n words begins with a repeated run of n - 1: only those are checked for each
    n.
    """
    tokens = batch.tokens
    hashed = Segments(batch.hashes(tokens))
    every = batch.total(tokens, tokens.lengths)
    last = np.searchsorted(tokens.document, np.arange(len(batch)), side="right")[tokens.document]
    lengths = np.concatenate(([0], np.cumsum(tokens.lengths)))
    begin = np.arange(len(last))
    result = {}
    for size in range(min(REPEATED_TOP), max(REPEATED) + 1):
        begin = begin[begin + size <= last[begin]]
        keys = splitmix64(
            hashed.hashes(begin, begin + size) ^ splitmix64(tokens.document[begin].view(np.uint64))
        )
        order, run_starts = _order_and_run_starts(keys)
        runs = np.diff(np.append(run_starts, len(order)))
        if size in REPEATED_TOP:
            one = begin[order[run_starts[runs > 1]]]
            covered = (lengths[one + size] - lengths[one]) * runs[runs > 1]
            top = np.zeros(len(batch))
            np.maximum.at(top, tokens.document[one], covered)
            result[f"top_{size}gram_characters"] = np.minimum(_divide_or_zero(top, every), 1)
        if size in REPEATED:
            is_first = np.zeros(len(order), dtype=np.bool_)
            is_first[run_starts] = True
            result[f"repeated_{size}gram_characters"] = _divide_or_zero(
                _covered_characters(begin[order[~is_first]], size, tokens, len(batch)), every
            )
        begin = np.sort(begin[order[np.repeat(runs > 1, runs)]])
    return result


def _covered_characters(
    begin: I64, size: int, tokens: Spans, documents: int
) -> npt.NDArray[np.float64]:
    """Return the characters of words in the n-grams at `begin`, each word once, [documents]."""
    edges = np.bincount(begin, minlength=len(tokens.starts) + 1)
    edges -= np.bincount(begin + size, minlength=len(edges))[: len(edges)]
    inside = np.cumsum(edges)[:-1] > 0
    return np.bincount(tokens.document, tokens.lengths * inside, documents).astype(np.float64)


def _order_and_run_starts(keys: U64) -> tuple[I64, I64]:
    """Return an order that puts equal keys together (first occurrence first), and the runs' starts.

    Positions are sorted with the keys, in their low bits, which costs a quarter of `argsort`.
    Different keys are taken as equal with a probability of N^2 / 2^(65 - bits) for N keys.
    """
    bits = np.uint64(max(1, len(keys).bit_length()))
    mask = (np.uint64(1) << bits) - np.uint64(1)
    packed = np.sort((keys & ~mask) | np.arange(len(keys), dtype=np.uint64))
    return (packed & mask).astype(np.int64), np.flatnonzero(run_starts(packed >> bits))


def _repeated_spans(hashes: U64, document: I64) -> Bool:
    """Return the mask of spans that occurred earlier in their document, [spans]."""
    order, starts = _order_and_run_starts(splitmix64(hashes ^ splitmix64(document.view(np.uint64))))
    again = np.ones(len(order), dtype=np.bool_)
    again[order[starts]] = False
    return again


def _distinct_words(batch: DocumentBatch, words: tuple[str, ...]) -> npt.NDArray[np.float64]:
    """Return how many of the given words each document contains, [documents]."""
    found = np.zeros((len(words), len(batch)), dtype=np.bool_)
    for number, word in enumerate(words):
        found[number, batch.words.document[batch.word_hashes == hash_of_word(word)]] = True
    counts: I64 = np.count_nonzero(found, axis=0)
    return counts.astype(np.float64)


def _ends_in_dots(batch: DocumentBatch) -> Bool:
    """Return the mask of ellipses: `…`, or the last of three dots, [characters]."""
    dot = batch.codes == _DOT
    three: Bool = batch.codes == _ELLIPSIS
    three[2:] |= dot[2:] & dot[1:-1] & dot[:-2]
    three[:-1] &= ~dot[1:]
    return three


def _characters_per_document(batch: DocumentBatch, which: Bool) -> npt.NDArray[np.float64]:
    """Count true characters per document, [documents], without the line feeds between documents."""
    places = np.flatnonzero(which)
    places = places[~np.isin(places, batch.ends)]
    document = np.searchsorted(batch.ends, places, side="right")
    return np.bincount(document, minlength=len(batch)).astype(np.float64)


def _divide_or_zero(part: npt.NDArray[Any], whole: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    result = np.zeros(len(whole))
    np.divide(part, whole, out=result, where=whole > 0)
    return result


def _as_columns(values: dict[str, npt.NDArray[np.float64]]) -> Statistics:
    return {name: each.astype(np.float32) for name, each in values.items()}


def word_list(batch: DocumentBatch, *, file: str) -> Statistics:
    """Return the number and share of a document's words that are listed: `listed`, `listed_share`.

    An entry of several words matches consecutive words, and counts as one.
    """
    found = np.zeros(len(batch))
    for size, hashes in _hash_entries(file).items():
        grams, begin = batch.ngrams(size, short=False)
        found += np.bincount(
            batch.words.document[begin[np.isin(grams, hashes)]], minlength=len(batch)
        )
    every = batch.total(batch.words)
    share = np.divide(found, every, out=np.zeros(len(batch)), where=every > 0)
    return {"listed": found.astype(np.float32), "listed_share": share.astype(np.float32)}


def url_list(batch: DocumentBatch, *, file: str) -> Statistics:
    """Return the number of list entries that match a document's URL, `matches`; 0 without a URL."""
    listed = _listed_urls(file)
    matches = [len(_matching_entries(entry.url) & listed) for entry in batch.entries]
    return {"matches": np.array(matches, dtype=np.float32)}


def user_function(batch: DocumentBatch, *, call: str) -> Statistics:
    """Return what a user's function gives for each text, `score`.

    Raises:
        TrainctlError: The function cannot be imported, raises, or gives no number.
    """
    score = _import_score(call)
    return {
        "score": np.array([_call_score(call, score, each) for each in batch.entries], np.float32)
    }


def _call_score(call: str, score: Callable[[str], float], entry: Entry) -> float:
    try:
        return float(score(entry.text))
    except Exception as error:  # user code may raise anything
        raise TrainctlError(
            f"the filter {call} failed with document {entry.number}: {describe_exception(error)}",
            hint="it is called with a text, and must give a number for any",
        ) from error


@cache
def _import_score(call: str) -> Callable[[str], float]:
    module, _, name = call.partition(":")
    make_importable(Path.cwd())
    try:
        found: Callable[[str], float] = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise TrainctlError(
            f"the filter function {call!r} cannot be imported: {error}",
            hint="name it as module:function; the module must be importable wherever the corpus is "
            "prepared",
        ) from None
    return found


def _list_lines(path: str) -> list[str]:
    """Return the lines of a list, without blank lines and those that begin with #."""
    try:
        text = local_path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise TrainctlError(
            f"the list {path!r} of a filter cannot be read: {error}", hint="name a text file"
        ) from None
    lines = (line.strip() for line in text.splitlines())
    return [line for line in lines if line and not line.startswith("#")]


@cache
def _hash_entries(path: str) -> dict[int, U64]:
    """Return the hashes of a list's entries by their number of words."""
    batch = DocumentBatch([Entry(number, line) for number, line in enumerate(_list_lines(path))])
    counts = batch.total(batch.words)
    result: dict[int, U64] = {}
    for size in np.unique(counts[counts > 0]).astype(int).tolist():
        hashes, begin = batch.ngrams(size, short=False)
        whole: npt.NDArray[np.bool_] = counts[batch.words.document[begin]] == size
        result[size] = np.unique(hashes[whole])
    return result


@cache
def _listed_urls(path: str) -> frozenset[str]:
    return frozenset(_plain_url(line) for line in _list_lines(path))


def _plain_url(url: str) -> str:
    """Return host and path of a URL, without scheme, user, port, query and fragment."""
    rest = url.lower().partition("://")[2] or url.lower()
    host, slash, path = rest.partition("/")
    host = host.rpartition("@")[2].partition(":")[0].removesuffix(".")
    return f"{host}{slash}{path.partition('?')[0].partition('#')[0]}".rstrip("/")


def _matching_entries(url: str) -> set[str]:
    """Return all entries that match a URL: itself, its parent paths and its parent domains."""
    if not url:
        return set()
    plain = _plain_url(url)
    host, *folders = plain.split("/")
    parts = host.split(".")
    hosts = {".".join(parts[number:]) for number in range(len(parts))}
    paths = {"/".join((host, *folders[:number])) for number in range(1, len(folders) + 1)}
    return hosts | paths
