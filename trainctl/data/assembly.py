"""Assemble the parts of a store into the two sides of a corpus."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trainctl.data.part import Part
from trainctl.data.store import Store, files_in_order, shift_line_number
from trainctl.data.tasks import Task
from trainctl.data.token_spans import Span
from trainctl.readers.documents import EXAMPLES, BadText, held_out_threshold
from trainctl.readers.files import TextFiles
from trainctl.readers.remote import File


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive documents of one side."""

    side: str
    ids: npt.NDArray[np.integer]
    """Tokens of the documents."""
    ends: npt.NDArray[np.integer]
    """End of each document, in tokens of the chunk."""
    files: npt.NDArray[np.integer] | None = None
    """Index of each document's file among the corpus's files; None if there are none."""
    lines: npt.NDArray[np.integer] | None = None
    """Line of each document in its file, from 1; 0 if the file is the document."""
    span: Span | None = None
    """Location of tokens that stay in place; `ids` are then a sample of them, for counting."""


def chunks(
    store: Store,
    tasks: Sequence[Task],
    files: TextFiles,
    fraction: float,
    keep: Mapping[str, npt.NDArray[np.bool_]] | None = None,
) -> Iterator[Chunk]:
    """Yield all documents of the tasks, in order within each side.

    Args:
        store: All of the tasks are done in it.
        files: Which file is on which side, or that documents are divided.
        fraction: Held-out fraction if documents are divided.
        keep: Mask of documents to keep, [documents], by task key; None keeps all.

    Raises:
        DamagedPart: A part is not what was written.
    """
    numbers = {file: n for n, file in enumerate(files_in_order(files.train, files.held_out))}
    before: dict[File, int] = {}
    sides = held_out_of(store, tasks, files, fraction)
    for task, held_out in zip(tasks, sides, strict=True):
        part = store.part(task)
        origin = part.origin()
        pieces = origin["piece"]
        kept = keep[task.key] if keep is not None else np.ones(len(pieces), dtype=np.bool_)
        file_of = np.array([numbers[piece.file] for piece in task.pieces])[pieces]
        skipped = np.array([before.get(piece.file, 0) for piece in task.pieces])[pieces]
        line_of = origin["line"] + np.where(origin["line"], skipped, 0)
        ids, ends = part.ids(), part.ends().astype(np.int64)
        for side, chosen in (("held_out", held_out & kept), ("train", ~held_out & kept)):
            if chosen.any():
                found = _chosen(ids, ends, chosen)
                yield Chunk(side, *found, file_of[chosen], line_of[chosen])
        for piece, facts in zip(task.pieces, part.pieces, strict=True):
            before[piece.file] = before.get(piece.file, 0) + facts.lines


def held_out_of(
    store: Store, tasks: Sequence[Task], files: TextFiles, fraction: float
) -> Iterator[npt.NDArray[np.bool_]]:
    """Yield the mask of held-out documents of each task, [documents].

    Arguments are as in `chunks`.

    Raises:
        DamagedPart: A part is not what was written.
    """
    held_out_files = set(files.held_out)
    limit = _limit(store, tasks, fraction) if files.by_document else None
    for task in tasks:
        part = store.part(task)
        if limit is not None:
            yield _places(part) <= np.uint64(limit)
        else:
            of_piece = np.array([piece.file in held_out_files for piece in task.pieces])
            yield of_piece[part.origin()["piece"]]


def bad_text(store: Store, tasks: Sequence[Task], files: TextFiles) -> BadText:
    """Return the account of bad text in the tasks, examples of held-out files first.

    Raises:
        DamagedPart: A part is not what was written.
    """
    of_sides = {True: BadText(), False: BadText()}
    held_out_files = set(files.held_out)
    before: dict[File, int] = {}
    for task in tasks:
        for piece, facts in zip(task.pieces, store.part(task).pieces, strict=True):
            bad = of_sides[piece.file in held_out_files]
            bad.replaced += facts.replaced
            bad.skipped += facts.skipped
            lines = before.get(piece.file, 0)
            bad.examples += [
                f"{piece.file}{shift_line_number(text, piece, lines)}" for text in facts.examples
            ]
            before[piece.file] = lines + facts.lines
    held_out, train = of_sides[True], of_sides[False]
    return BadText(
        held_out.replaced + train.replaced,
        held_out.skipped + train.skipped,
        [*held_out.examples, *train.examples][:EXAMPLES],
    )


def _chosen(
    ids: npt.NDArray[np.integer], ends: npt.NDArray[np.int64], chosen: npt.NDArray[np.bool_]
) -> tuple[npt.NDArray[np.integer], npt.NDArray[np.int64]]:
    """Return ids and ends of the chosen documents."""
    if chosen.all():
        return ids, ends
    lengths = np.diff(ends, prepend=0)
    return ids[np.repeat(chosen, lengths)], np.cumsum(lengths[chosen])


def _places(part: Part) -> npt.NDArray[np.uint64]:
    """Return the first 8 bytes of documents' hashes as numbers, as in `readers.documents`."""
    first = np.ascontiguousarray(part.hashes()[:, :8])
    return first.view(">u8").reshape(-1).astype(np.uint64)


def _limit(store: Store, tasks: Sequence[Task], fraction: float) -> int:
    places = (_places(store.part(task)) for task in tasks)
    extremes = [int(end) for each in places if len(each) for end in (each.min(), each.max())]
    return max(0, held_out_threshold(extremes, fraction))  # below 0 if there are no documents
