"""Measure the documents of a corpus, part by part: the only time that their texts are read.

A part is done if its columns' manifest exists with the key of what is wanted. A finished part is
not measured again, whichever process did it. Memory is one batch per process (`batches`), plus 13
bytes and a table of up to 32 bytes for each word of held-out texts.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b, sha256
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trainctl.config.registry import function_of, load
from trainctl.data.quality import minhash
from trainctl.data.quality.batches import DocumentBatch, batches
from trainctl.data.quality.columns import (
    ColumnWriter,
    PartToMeasure,
    folder_of,
    key_of,
)
from trainctl.data.quality.contamination import HeldOut
from trainctl.data.quality.minhash import anchors
from trainctl.errors import ExitCode, TrainctlError
from trainctl.runs.processes import die_with_parent

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
    processes: int = 1,
    done: Callable[[PartToMeasure], None] = lambda part: None,
) -> None:
    """Measure all parts that are not done yet.

    Args:
        folder: Folder of all columns; a part's are in `SOURCE/NAME/` below it.

    Raises:
        TrainctlError: What reading a part or a user's function raises, or a process was killed
            (exit code 4). Finished parts are kept.
    """
    work = partial(measure, folder=folder, wanted=wanted)
    if processes == 1:
        for part in parts:
            work(part)
            done(part)
        return
    with (
        _ignored_folder(),
        ProcessPoolExecutor(
            processes, get_context("spawn"), initializer=die_with_parent, initargs=(os.getpid(),)
        ) as pool,
    ):
        started = {pool.submit(work, part): part for part in parts}
        try:
            for future in as_completed(started):
                future.result()
                done(started[future])
        except BrokenProcessPool:
            raise TrainctlError(
                "a process that judged documents was killed",
                hint="start again: what it had finished is kept; fewer of them need less memory",
                exit_code=ExitCode.environment,
            ) from None
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


@contextmanager
def _ignored_folder() -> Iterator[None]:
    """Keep the pool's processes, which begin with `-c`, from importing from the current folder."""
    before = os.environ.get("PYTHONSAFEPATH")
    os.environ["PYTHONSAFEPATH"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONSAFEPATH"]
        else:
            os.environ["PYTHONSAFEPATH"] = before


def measure(part: PartToMeasure, folder: Path, wanted: WantedColumns) -> None:
    """Measure a part, unless it is done."""
    target = folder_of(part, folder)
    held_out = HeldOut.load(wanted.held_out) if wanted.held_out is not None else None
    key = _key(part, wanted, held_out)
    if key_of(target) == key:
        return
    measures = {
        name: partial(function_of("filter", name), **settings)
        for name, settings in _filter_settings(part).items()
    }
    characters = 0
    with ColumnWriter(target, key) as writer:
        for batch in _with_one_empty(batches(part.read())):
            writer.append(_basics(batch))
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


def _basics(batch: DocumentBatch) -> dict[str, npt.NDArray[Any]]:
    number = np.array([entry.number for entry in batch.entries], dtype=np.int64)
    return {"number": number, "characters": batch.ends - batch.starts}


def _append_near(writer: ColumnWriter, batch: DocumentBatch) -> None:
    values, counts = minhash.ngram_sets(batch)
    writer.append({"ngrams": counts, "signature": minhash.signatures(values, counts)})
    writer.append_ragged("sketch", *minhash.sketches(values, counts))


def _with_one_empty(every: Iterator[DocumentBatch]) -> Iterator[DocumentBatch]:
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
        name: {each: getattr(keys, each) for each in load("filter", name).settings}
        for name, keys in part.filters.items()
    }


def _key(part: PartToMeasure, wanted: WantedColumns, held_out: HeldOut | None) -> str:
    """Return a digest of everything that a part's columns depend on."""
    what = [
        *(VERSION, part.source, part.name, part.identity, _filter_settings(part)),
        *(wanted.exact, wanted.near, wanted.passages),
        held_out.key if held_out is not None else None,
    ]
    return sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()
