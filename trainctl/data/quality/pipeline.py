"""The whole selection of a corpus: measure parts, find duplicates, decide, and store the result."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from trainctl.config.codec import to_plain
from trainctl.data.quality.batches import Entry
from trainctl.data.quality.columns import key_of
from trainctl.data.quality.contamination import write_held_out
from trainctl.data.quality.corpus import Measured, MeasuredPart
from trainctl.data.quality.decide import select
from trainctl.data.quality.duplicates import find_duplicates, key_of_corpus
from trainctl.data.quality.groups import MEMORY
from trainctl.data.quality.hashing import Bool
from trainctl.data.quality.measure import PartToMeasure, WantedColumns, measure_all
from trainctl.data.quality.selection import Rules, Selection

HELD_OUT, DUPLICATES, SELECTION = ".held_out", ".duplicates", ".selection"
"""Folders beside those of the sources, whose names do not begin with a dot."""


def judge(
    parts: Sequence[PartToMeasure],
    folder: Path,
    rules: Rules,
    *,
    precedence: Sequence[str] = (),
    held_out: Iterable[Entry] = (),
    held_out_identity: str = "",
    fixed: Callable[[MeasuredPart], Bool] | None = None,
    processes: int = 1,
    memory: int = MEMORY,
    done: Callable[[PartToMeasure], None] = lambda part: None,
) -> Selection:
    """Decide which documents of a corpus stay.

    Every step stores its result with a key of everything it depends on. A second call reads the
    results, a call after a kill continues, and with other thresholds only the decision is made
    again.

    Args:
        parts: In any order. Their filters are replaced by the rules' filters of their source.
        folder: Folder of all results.
        precedence: Sources, the first with the highest precedence; others follow by name.
        held_out: Texts to search for, if the rules have `contamination`.
        held_out_identity: Identity of these texts; if it is unchanged, none is read.
        fixed: Returns the mask of a part's documents that always stay, [documents].
        processes: Number of processes that measure.
        memory: Maximum bytes for sorting.
        done: Called after each part is measured.

    Raises:
        TrainctlError: What reading a part or a user's function raises; or stored results are
            damaged (exit code 5).
    """
    folder.mkdir(parents=True, exist_ok=True)
    contaminates = rules.contamination is not None
    if contaminates:
        write_held_out(folder / HELD_OUT, held_out, identity=held_out_identity)
    wanted = WantedColumns(
        near=rules.near is not None,
        held_out=folder / HELD_OUT if contaminates else None,
        passages=rules.substring is not None,
    )
    parts = [replace(part, filters=rules.filters.get(part.source, {})) for part in parts]
    measure_all(parts, folder, wanted, processes=processes, done=done)
    corpus = Measured.load(parts, folder, precedence)
    stay = np.concatenate([np.empty(0, np.bool_), *map(fixed, corpus.parts)]) if fixed else None
    mark = sha256(np.packbits(stay).tobytes()).hexdigest() if stay is not None else ""
    key = key_of_corpus(corpus, _plain(rules), mark)
    if key_of(folder / SELECTION) == key:
        return Selection.load(folder / SELECTION)
    found = find_duplicates(corpus, rules, folder / DUPLICATES, memory)
    selection = select(corpus, rules, found.same, found.pairs, found.passages, stay)
    selection.write(folder / SELECTION, key)
    return selection


def _plain(rules: Rules) -> Mapping[str, Any]:
    filters = {
        source: {name: to_plain(keys) for name, keys in of.items()}
        for source, of in rules.filters.items()
    }
    contamination = asdict(rules.contamination) if rules.contamination is not None else None
    return {
        "filters": filters,
        "contamination": contamination,
        "exact": rules.exact,
        "near": rules.near,
        "substring": rules.substring,
    }
