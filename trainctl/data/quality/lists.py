"""Statistics of documents from what a user provides: word lists, URL lists, or a function."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from trainctl.data.quality.batches import DocumentBatch, Entry
from trainctl.data.quality.hashing import U64
from trainctl.data.quality.statistics import Statistics
from trainctl.errors import TrainctlError, describe_exception


def words(batch: DocumentBatch, *, file: str) -> Statistics:
    """Return the number and share of a document's words that are listed: `listed`, `listed_share`.

    An entry of several words matches consecutive words, and counts as one.
    """
    found = np.zeros(len(batch))
    for size, hashes in _hashed(file).items():
        grams, begin = batch.ngrams(size, short=False)
        found += np.bincount(
            batch.words.document[begin[np.isin(grams, hashes)]], minlength=len(batch)
        )
    every = batch.total(batch.words)
    share = np.divide(found, every, out=np.zeros(len(batch)), where=every > 0)
    return {"listed": found.astype(np.float32), "listed_share": share.astype(np.float32)}


def urls(batch: DocumentBatch, *, file: str) -> Statistics:
    """Return the number of list entries that match a document's URL, `matches`; 0 without a URL."""
    listed = _addresses(file)
    matches = [len(_above(entry.url) & listed) for entry in batch.entries]
    return {"matches": np.array(matches, dtype=np.float32)}


def function(batch: DocumentBatch, *, call: str) -> Statistics:
    """Return what a user's function gives for each text, `score`.

    Raises:
        TrainctlError: The function cannot be imported, raises, or gives no number.
    """
    score = _imported(call)
    return {"score": np.array([_scored(call, score, each) for each in batch.entries], np.float32)}


def _scored(call: str, score: Callable[[str], float], entry: Entry) -> float:
    try:
        return float(score(entry.text))
    except Exception as error:  # user code may raise anything
        raise TrainctlError(
            f"the filter {call} failed with document {entry.number}: {describe_exception(error)}",
            hint="it is called with a text, and must give a number for any",
        ) from error


@cache
def _imported(call: str) -> Callable[[str], float]:
    module, _, name = call.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:  # our processes do not import from there
        sys.path.insert(0, here)
    try:
        found: Callable[[str], float] = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise TrainctlError(
            f"the filter function {call!r} cannot be imported: {error}",
            hint="name it as module:function; the module must be importable wherever the corpus is "
            "prepared",
        ) from None
    return found


def _lines(path: str) -> list[str]:
    """Return the lines of a list, without blank lines and those that begin with #."""
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise TrainctlError(
            f"the list {path!r} of a filter cannot be read: {error}", hint="name a text file"
        ) from None
    lines = (line.strip() for line in text.splitlines())
    return [line for line in lines if line and not line.startswith("#")]


@cache
def _hashed(path: str) -> dict[int, U64]:
    """Return the hashes of a list's entries by their number of words."""
    batch = DocumentBatch([Entry(number, line) for number, line in enumerate(_lines(path))])
    counts = batch.total(batch.words)
    result: dict[int, U64] = {}
    for size in np.unique(counts[counts > 0]).astype(int).tolist():
        hashes, begin = batch.ngrams(size, short=False)
        whole: npt.NDArray[np.bool_] = counts[batch.words.document[begin]] == size
        result[size] = np.unique(hashes[whole])
    return result


@cache
def _addresses(path: str) -> frozenset[str]:
    return frozenset(_plain(line) for line in _lines(path))


def _plain(url: str) -> str:
    """Return host and path of a URL, without scheme, user, port, query and fragment."""
    rest = url.lower().partition("://")[2] or url.lower()
    host, slash, path = rest.partition("/")
    host = host.rpartition("@")[2].partition(":")[0].removesuffix(".")
    return f"{host}{slash}{path.partition('?')[0].partition('#')[0]}".rstrip("/")


def _above(url: str) -> set[str]:
    """Return all entries that match a URL: itself, its parent paths and its parent domains."""
    if not url:
        return set()
    plain = _plain(url)
    host, *folders = plain.split("/")
    parts = host.split(".")
    hosts = {".".join(parts[number:]) for number in range(len(parts))}
    paths = {"/".join((host, *folders[:number])) for number in range(1, len(folders) + 1)}
    return hosts | paths
