"""Files by which a corpus differs from the one that a run began with. No torch."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from trainctl.config.schema import DataConfig
from trainctl.data.corpus_record import FILES, Corpus
from trainctl.errors import TrainctlError
from trainctl.readers.files import split_files

_AT_ONCE = 1 << 20
"""Tokens of both corpora that are compared at once."""


def describe_changed_files(
    before: Corpus, now: Corpus, section: DataConfig | None, read_at: float
) -> str:
    """Name the first file that differs, with what is known of it; empty if nothing is known.

    Args:
        section: The source of `now`. Without the tokens of `before` its files that were written
            since `read_at` are named.
        read_at: Time at which the run last read the files, in seconds.
    """
    try:
        found = [*_differing_files(before, now)]
    except (TrainctlError, OSError, ValueError, IndexError):  # the cache has lost it
        found = []
    found = found or [*_written_since(section, read_at)]
    more = f", and {len(found) - 1:,} more files differ" if len(found) > 1 else ""
    return found[0] + more if found else ""


def _differing_files(before: Corpus, now: Corpus) -> Iterator[str]:
    """Yield what differs of each file: its presence, its size, or else the first other text."""
    old, new = _sizes(before), _sizes(now)
    is_known = bool(old and new)
    yield from (f"{file} is gone" for file in old if is_known and file not in new)
    yield from (f"{file} is new" for file in new if is_known and file not in old)
    equal = 0
    for file in old:
        if file in new and old[file] != new[file]:
            documents, tokens = new[file]
            yield (
                f"{file} has {documents:,} documents of {tokens:,} tokens, and had "
                f"{old[file][0]:,} of {old[file][1]:,}"
            )
        equal += old[file] == new.get(file)
    if is_known and equal == len(old) == len(new):
        yield from _first_other_text(before, now)


def _sizes(corpus: Corpus) -> dict[str, tuple[int, int]]:
    """Return documents and tokens of each file; empty if the corpus has no origins."""
    origins = [(split, corpus.origin(split)) for split in (corpus.train, corpus.held_out)]
    if any(origin is None for split, origin in origins if split.documents):
        return {}
    files = json.loads((Path(corpus.folder) / FILES).read_bytes())
    sizes = np.zeros((2, len(files)), dtype=np.int64)
    for split, origin in origins:
        if origin is not None and len(origin):
            lengths = np.diff(corpus.ends(split).astype(np.int64), prepend=0)
            numbers = origin["file"].astype(np.int64)
            sizes[0] += np.bincount(numbers, minlength=len(files))
            sizes[1] += np.bincount(numbers, lengths, len(files)).astype(np.int64)
    return {str(file): (int(d), int(t)) for file, d, t in zip(files, *sizes, strict=True)}


def _first_other_text(before: Corpus, now: Corpus) -> Iterator[str]:
    """Yield the place of the first document with other ids."""
    files = json.loads((Path(now.folder) / FILES).read_bytes())
    for old, new in ((before.train, now.train), (before.held_out, now.held_out)):
        left, right = before.stored(old), now.stored(new)
        for start in range(0, min(old.tokens, new.tokens), _AT_ONCE):
            a, b = left[start : start + _AT_ONCE], right[start : start + _AT_ONCE]
            size = min(len(a), len(b))
            if (others := np.flatnonzero(a[:size] != b[:size])).size:
                place = start + int(others[0])
                document = int(np.searchsorted(now.ends(new), np.uint64(place), side="right"))
                origin = now.origin(new)
                assert origin is not None
                file, line = origin[document].tolist()
                yield f"{files[file]}{f':{line}' if line else ''} has other text"
                return


def _written_since(section: DataConfig | None, read_at: float) -> Iterable[str]:
    """Return the local files of a source that were written since a time."""
    try:
        files = split_files(section) if section is not None else None
    except TrainctlError:
        return
    for file in (*files.train, *files.held_out) if files is not None else ():
        if isinstance(file, Path) and file.stat().st_mtime > read_at:
            yield f"{file} was written after the run had read it"
