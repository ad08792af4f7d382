"""Shuffle by hash range: bring rows of equal keys together, in tasks of an executor.

Each of the *map* tasks writes its rows sorted by key into one file, with the place where each range
of keys begins. Each of the *reduce* tasks reads its range from all of these files, sorts it, and
computes on the groups of equal keys. So an input of any size takes two files a task, each task
takes the memory it is allowed, and the results do not depend on the number of tasks.

Results are kept under a key of everything they depend on until the whole step is done, so that a
step that was killed continues.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from trainctl.config.schema import DataConfig
from trainctl.data.cache_files import convert_write_errors
from trainctl.data.executors import INLINE, Executor, ExecutorTask, require_results
from trainctl.data.quality.batches import I64, U64, run_starts
from trainctl.data.quality.columns import (
    Array,
    Columns,
    ColumnWriter,
    MeasuredCorpus,
    finished_key,
    key_of_corpus,
)
from trainctl.plans.preparation import ROW_BYTES, range_bits, shuffle_share

Groups = tuple[I64, I64]
"""Ids of several groups, concatenated and ascending within each, and the size of each group."""

Rows = Iterable[tuple[U64, I64]]
"""Keys, evenly spread over 64 bits, and their ids."""

Result = dict[str, Array]


@dataclass(frozen=True, slots=True)
class DuplicateSearch:
    """A search for duplicates in a corpus, whose tasks keep their results in a folder."""

    corpus: MeasuredCorpus
    folder: Path
    """Folder of this search alone, removed at its end."""
    key: str
    """Digest of everything that the results depend on."""
    executor: Executor
    memory: int
    """Bytes that sorting may take in each task."""

    @property
    def table(self) -> Path:
        """File with the table of the corpus, for `MeasuredCorpus.open` in tasks."""
        return self.folder / "table.json"

    def keep(self, name: str, values: I64) -> Path:
        """Write an array for `read_kept` in tasks, unless it is there, and return its folder."""
        _write_result(self.folder / name, self.key, lambda: [{"values": values}])
        return self.folder / name

    def run(
        self, name: str, calls: Sequence[Callable[[], Iterable[Result]]], size: int
    ) -> list[Columns]:
        """Return the columns that each call yields, in order; `size` is the bytes of all.

        Calls are picklable.
        """
        folders = [self.folder / f"{name}-{number:06d}" for number in range(len(calls))]
        todo = [n for n, folder in enumerate(folders) if finished_key(folder) != self.key]
        self.executor.run(
            [
                ExecutorTask(
                    folders[number].name,
                    partial(_write_result, folders[number], self.key, calls[number]),
                    size // len(calls),
                )
                for number in todo
            ]
        )
        require_results(
            self.executor,
            [folders[number].name for number in todo],
            lambda name: finished_key(self.folder / name) == self.key,
            self.folder,
        )
        return [Columns.load(folder) for folder in folders]


def read_kept(path: Path) -> I64:
    """Return an array that `DuplicateSearch.keep` wrote, memory-mapped."""
    values: I64 = Columns.load(path)["values"]
    return values


MEMORY = DataConfig().sort_bytes
"""Bytes that sorting may take in each task, unless `data.sort_bytes` says otherwise."""


@contextmanager
def search_in(
    corpus: MeasuredCorpus,
    scratch: Path,
    memory: int = MEMORY,
    executor: Executor = INLINE,
    *,
    key: str = "",
) -> Iterator[DuplicateSearch]:
    """Provide a search in a folder of its key; what other searches left in `scratch` is removed.

    Args:
        scratch: Removed at the end, but not after an error: the next search continues there.
        memory: Bytes that sorting may take in each task.
        key: What the search looks for, if that is not the same each time.
    """
    own = key_of_corpus(corpus, memory, key)
    folder = scratch / own[:24]
    for other in scratch.iterdir() if scratch.is_dir() else ():
        if other != folder:
            shutil.rmtree(other, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    search = DuplicateSearch(corpus, folder, own, executor, memory)
    corpus.save(search.table)
    yield search
    shutil.rmtree(scratch, ignore_errors=True)


def shuffle(
    search: DuplicateSearch,
    name: str,
    inputs: Sequence[tuple[Callable[[], Rows], int]],
    reduce: Callable[[Groups], Result],
) -> Sequence[Result | Columns]:
    """Return the results for the groups of at least two ids with the same key, by range of keys.

    What one task can sort is sorted in this process, and not kept.

    Args:
        inputs: Calls that give rows, each with their number; neighbors are read by one map task.
        reduce: Picklable function of the groups of a range.
    """
    total = sum(count for _, count in inputs)
    share = shuffle_share(total, search.memory)
    bits = range_bits(total, share)
    if not bits:
        (run,) = _sorted_runs([call for call, _ in inputs], total + 1, 0)
        return [reduce(equal_groups(run["key"], run["id"]))]
    maps: list[list[Callable[[], Rows]]] = [[]]
    size = 0
    for call, count in inputs:
        if size >= share:
            maps, size = [*maps, []], 0
        maps[-1].append(call)
        size += count * ROW_BYTES
    rows, total = share // ROW_BYTES, total * ROW_BYTES
    mapped = search.run(
        f"{name}-map", [partial(_sorted_runs, calls, rows, bits) for calls in maps], total
    )
    folders = [columns.folder for columns in mapped]
    ranges = [partial(_reduce_range, folders, number, reduce) for number in range(1 << bits)]
    return search.run(f"{name}-reduce", ranges, total)


def _write_result(folder: Path, key: str, call: Callable[[], Iterable[Result]]) -> None:
    if finished_key(folder) != key:
        with convert_write_errors(folder), ColumnWriter(folder, key) as writer:
            for columns in call():
                writer.append(columns)
            writer.finish()


def _sorted_runs(calls: Sequence[Callable[[], Rows]], most: int, bits: int) -> Iterator[Result]:
    """Yield the rows in sorted runs of at most about `most` rows, with the edges of the ranges."""
    pending: list[tuple[U64, I64]] = [(np.empty(0, np.uint64), np.empty(0, np.int64))]
    before = count = 0
    for keys, ids in (rows for call in calls for rows in call()):
        pending.append((keys, ids))
        count += len(keys)
        if count >= most:
            yield _sorted_run(pending, before, bits)
            before, count, pending = before + count, 0, pending[:1]
    yield _sorted_run(pending, before, bits)


def _sorted_run(pending: Sequence[tuple[U64, I64]], before: int, bits: int) -> Result:
    keys, ids = (np.concatenate(each) for each in zip(*pending, strict=True))
    order = np.argsort(keys, kind="stable")
    keys = keys[order]
    begins = np.arange(1, 1 << bits, dtype=np.uint64) << np.uint64(64 - bits)
    edges = before + np.array([0, *np.searchsorted(keys, begins), len(keys)], dtype=np.int64)
    return {"key": keys, "id": ids[order], "edges": edges[None, :]}


def _reduce_range(
    folders: Sequence[Path], number: int, reduce: Callable[[Groups], Result]
) -> Iterator[Result]:
    keys, ids = [np.empty(0, np.uint64)], [np.empty(0, np.int64)]
    for folder in folders:
        columns = Columns.load(folder)
        for edges in columns["edges"]:
            own = slice(edges[number], edges[number + 1])
            keys.append(np.array(columns["key"][own]))  # not a view: it would keep the file mapped
            ids.append(np.array(columns["id"][own]))
    yield reduce(equal_groups(np.concatenate(keys), np.concatenate(ids)))


def equal_groups(keys: U64, ids: I64) -> Groups:
    """Return the groups of at least two ids with the same key, in the order of the keys."""
    order = np.lexsort((ids, keys))
    keys, ids = keys[order], ids[order]
    starts = np.flatnonzero(run_starts(keys)) if len(keys) else np.empty(0, np.int64)
    counts = np.diff(np.append(starts, len(keys)))
    several = counts > 1
    return ids[np.repeat(several, counts)], counts[several]


def joined(results: Sequence[Result | Columns], name: str) -> npt.NDArray[np.int64]:
    """Return a column of all results, in their order."""
    return np.concatenate([np.asarray(each[name]) for each in results])
