"""Group documents by keys that do not fit in memory, and find connected components."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from trainctl.data.quality.hashing import I64, U64

MEMORY = 1 << 30
"""Maximum bytes that each sorting step uses."""

_ROW = np.dtype([("key", "<u8"), ("id", "<i8")])
_PEAK = 4
"""Memory that sorting a bucket takes, as a multiple of the size of its rows."""

Groups = tuple[I64, I64]
"""Ids of several groups, concatenated and ascending within each, and the size of each group."""


def equal_keys(
    rows: Callable[[], Iterable[tuple[U64, I64]]], total: int, scratch: Path, memory: int = MEMORY
) -> Iterator[Groups]:
    """Yield groups of at least two ids that have the same key.

    Rows are distributed to files by the first bits of their keys, and one file is sorted at a time.

    Args:
        rows: Yields keys, evenly spread over 64 bits, and their ids.
        total: Number of rows.
        scratch: Folder for the files, 16 bytes a row; removed at the end.
        memory: Maximum bytes of memory.
    """
    needed = total * _ROW.itemsize * _PEAK
    bits = max(0, (needed - 1) // memory).bit_length()
    if bits == 0:
        given = list(rows())
        if given:
            keys, ids = (np.concatenate(each) for each in zip(*given, strict=True))
            yield from _grouped(keys, ids)
        return
    shutil.rmtree(scratch, ignore_errors=True)  # left by a killed process
    try:
        scratch.mkdir(parents=True)
        for keys, ids in rows():
            if len(keys):
                _deal(keys, ids, bits, scratch)
        for path in sorted(scratch.iterdir()):
            table = np.fromfile(path, _ROW)
            path.unlink()
            yield from _grouped(table["key"], table["id"])
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _deal(keys: U64, ids: I64, bits: int, folder: Path) -> None:
    bucket = (keys >> np.uint64(64 - bits)).astype(np.int64)
    order = np.argsort(bucket, kind="stable")
    table = np.empty(len(keys), _ROW)
    table["key"], table["id"] = keys[order], ids[order]
    found, begin = np.unique(bucket[order], return_index=True)
    for number, piece in zip(found.tolist(), np.split(table, begin[1:]), strict=True):
        with (folder / f"{number:08d}").open("ab") as stream:
            stream.write(piece.tobytes())


def _grouped(keys: U64, ids: I64) -> Iterator[Groups]:
    order = np.lexsort((ids, keys))
    keys, ids = keys[order], ids[order]
    starts = np.flatnonzero(np.concatenate(([True], keys[1:] != keys[:-1])))
    counts = np.diff(np.append(starts, len(keys)))
    several = counts > 1
    if several.any():
        yield ids[np.repeat(several, counts)], counts[several]


def components(pairs: npt.NDArray[np.int64]) -> tuple[I64, I64]:
    """Return the ids in pairs, ascending, and the lowest id in each one's connected component.

    Every id takes the lowest label of its neighbors until nothing changes, with path halving in
    between: about log(n) passes over the pairs (Shiloach and Vishkin, 1982). `pairs` has the shape
    [pairs, 2].
    """
    ids, inside = np.unique(pairs, return_inverse=True)
    left, right = inside.reshape(-1, 2).T
    lowest = np.arange(len(ids))
    while True:
        before = lowest.copy()
        least = np.minimum(lowest[left], lowest[right])
        np.minimum.at(lowest, lowest[left], least)
        np.minimum.at(lowest, lowest[right], least)
        while True:
            halved = lowest[lowest]
            if np.array_equal(halved, lowest):
                break
            lowest = halved
        if np.array_equal(before, lowest):
            return ids, ids[lowest]


def by_group(groups: I64, members: I64) -> Groups:
    """Return the members sorted by group and ascending within each, and the size of each group."""
    order = np.lexsort((members, groups))
    _, counts = np.unique(groups, return_counts=True)
    return members[order], counts
