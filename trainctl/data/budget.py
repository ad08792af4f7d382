"""Check that the disk has room for tokenizing, before anything is written."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import numpy as np

from trainctl.data.encoding import dtype_for
from trainctl.data.part import DamagedPart
from trainctl.data.store import Store
from trainctl.data.tasks import Task
from trainctl.errors import ExitCode, TrainctlError
from trainctl.readers.documents import Reader
from trainctl.readers.stream import is_compressed

_OF_A_DOCUMENT = 40
"""Bytes per document besides its tokens: end, origin and hash in the store, and end in the
corpus.
"""
_SAMPLE = 1 << 18
"""Characters tokenized to estimate tokens per byte, if nothing has been tokenized yet."""
_UNPACKED = 3.0
"""Minimum bytes of text per byte of a compressed file."""


def space_needed(store: Store, tasks: Sequence[Task], left: Sequence[Task]) -> int:
    """Estimate the bytes that the open tasks `left` and the corpus of all `tasks` will take.

    A part stores its tokens, and the corpus stores them a second time.
    """
    share = _bytes_per_byte(store, tasks)
    return round(share * sum(task.size for task in [*tasks, *left]))


def require_space(store: Store, tasks: Sequence[Task], left: Sequence[Task]) -> None:
    """Refuse to start if the disk has too little room.

    Raises:
        TrainctlError: There is too little room (exit code 4).
    """
    needed = space_needed(store, tasks, left)
    free = _free(store.folder)
    if needed > free:
        raise TrainctlError(
            f"{store.folder.parent} has {free / 1e9:,.2f} GB free, and the tokens of this text "
            f"will take about {needed / 1e9:,.2f} GB there",
            hint="free space there, or name another folder in TRAINCTL_CACHE_DIR",
            exit_code=ExitCode.environment,
        )


def _bytes_per_byte(store: Store, tasks: Sequence[Task]) -> float:
    """Return the bytes written per byte of the files, from finished tasks or from a sample."""
    done = [task for task in islice(tasks, 1000) if store.is_done(task)]
    size = sum(task.size for task in done)
    if size:
        try:
            parts = [store.part(task) for task in done]
        except DamagedPart:
            parts = []
        if parts:
            return sum(_on_disk(part.folder) for part in parts) / size
    return _sampled(store, tasks)


def _on_disk(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir())


def _sampled(store: Store, tasks: Sequence[Task]) -> float:
    """Estimate bytes written per byte from the first documents. Errors in them are ignored here."""
    texts: list[str] = []
    room = _SAMPLE
    try:
        for piece in (piece for task in tasks for piece in task.pieces):
            for document in Reader(store.config).read(piece.file, piece.span):
                texts.append(document.text[:room])
                room -= len(texts[-1])
                if room <= 0:
                    break
            if room <= 0:
                break
    except TrainctlError:
        pass
    size = sum(len(text.encode()) for text in texts)
    if not size:
        return 1.0
    ids = sum(len(each) for each in store.tokenizer.encode_all(texts))
    width = np.dtype(dtype_for(store.tokenizer.vocab_size)).itemsize
    unpacked = _UNPACKED if is_compressed(tasks[0].pieces[0].file) else 1.0
    return (ids * width + len(texts) * _OF_A_DOCUMENT) / size * unpacked


def _free(folder: Path) -> int:
    return shutil.disk_usage(folder).free
