"""Select the training documents of prepared sources: apply the rules of a configuration to stores.

This runs after the tasks of the stores are done and before the corpora are assembled.

Held-out documents are never removed. If two documents are duplicates, the held-out one is kept.
Measured columns are cached by what they depend on, so another threshold or held-out fraction reads
no text.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from trainctl.config.codec import to_plain
from trainctl.config.registry import load_spec
from trainctl.config.schema import DataConfig, Dedup
from trainctl.data.corpus_writer import held_out_masks
from trainctl.data.executors import INLINE, Executor
from trainctl.data.quality.batches import Bool, Entry
from trainctl.data.quality.columns import PartToMeasure
from trainctl.data.quality.decide import select_documents
from trainctl.data.quality.selection import Contamination, Rules, Selection
from trainctl.data.store import TokenStore, read_documents
from trainctl.data.tasks import OnPreparation, PreparationMeter, Task
from trainctl.errors import TrainctlError
from trainctl.options.data import document_identity, read_section
from trainctl.readers.documents import Reader, held_out_choice
from trainctl.readers.files import TextFiles, digest_of, split_files
from trainctl.readers.quality import (
    HELD_OUT,
    decontamination_sections,
    filter_digests,
    filters_of,
    precedence_of,
    threshold_of,
)
from trainctl.readers.remote import version_of
from trainctl.runs.records import ignore_progress

DROPPED = "dropped.json"
"""File of a corpus with the counts and reasons of dropped documents; only if there are
rules.
"""


@dataclass(frozen=True, slots=True)
class TokenizedSource:
    """A source whose tasks are done."""

    name: str
    """Name of the source; `data` if there is only one."""
    config: DataConfig
    store: TokenStore
    tasks: Sequence[Task]
    files: TextFiles


@dataclass(frozen=True, slots=True)
class KeptDocuments:
    """Documents that the rules keep, and an account of the others."""

    keep: Mapping[str, Mapping[str, Bool]]
    """Mask of kept documents, [documents], by source and task key."""
    dropped: Mapping[str, Mapping[str, Any]]


def selection_digest(
    run_data: DataConfig, sources: Mapping[str, tuple[DataConfig, TextFiles]]
) -> str:
    """Return a digest of everything that the selection depends on, for the keys of corpora.

    It covers the settings of the rules, the texts of every source, which texts are held out, and
    the held-out sets. `sources` has the section and files of each source.
    """
    held_out = [
        [*_text_settings(section), *map(version_of, split_files(section).train)]
        for section in decontamination_sections(run_data)
    ]
    every = {
        name: [
            *_text_settings(section),
            held_out_choice(section, files),
            section.filters,
            filter_digests(section),
            [version_of(file) for file in files.train],
            [version_of(file) for file in files.held_out],
        ]
        for name, (section, files) in sources.items()
    }
    what = [
        run_data.dedup.value,
        threshold_of(run_data),
        precedence_of(run_data),
        HELD_OUT in run_data.decontaminate,
        held_out,
        every,
    ]
    return digest_of(json.dumps(what))


def _text_settings(section: DataConfig) -> list[Any]:
    return [document_identity(section), section.on_bad_text.value, section.max_bytes]


def columns_folder(cache: Path, run_data: DataConfig, sources: Iterable[TokenizedSource]) -> Path:
    """Return the folder of the sources' measured columns, shared by all thresholds and files."""
    what = {
        "dedup": run_data.dedup.value,
        "decontaminate": run_data.decontaminate,
        "sources": {
            each.name: [each.store.folder.name, *_filter_settings(each)] for each in sources
        },
    }
    return cache / f"quality-{digest_of(json.dumps(what, sort_keys=True))[:24]}"


def select_training_documents(
    run_data: DataConfig,
    sources: Sequence[TokenizedSource],
    folder: Path,
    *,
    executor: Executor = INLINE,
    show: OnPreparation = ignore_progress,
) -> KeptDocuments:
    """Apply the rules to all sources and return the documents that stay.

    The caller holds the lock of `folder`, so that no other process uses it meanwhile.

    Args:
        run_data: The run's `data` section: deduplication, precedence, held-out sets.

    Raises:
        DamagedPart: A part of a store is not what was written.
        TrainctlError: Text cannot be read any more, a user's function fails, or nothing is left to
            train on.
    """
    rules = Rules(
        filters={each.name: filters_of(each.config) for each in sources},
        contamination=Contamination() if run_data.decontaminate else None,
        exact=run_data.dedup is not Dedup.none,
        near=threshold_of(run_data) if run_data.dedup is Dedup.minhash else None,
        substring=threshold_of(run_data) if run_data.dedup is Dedup.substring else None,
    )
    parts: list[PartToMeasure] = []
    task_of: dict[tuple[str, str], tuple[TokenizedSource, Task]] = {}
    protected: dict[tuple[str, str], Bool] = {}
    for source in sources:
        masks = held_out_masks(source.store, source.tasks, source.files, source.config)
        for order, (task, mask) in enumerate(zip(source.tasks, masks, strict=True)):
            part = _part_to_measure(source, task, order, task_of)
            parts.append(part)
            task_of[source.name, part.name] = source, task
            protected[source.name, part.name] = mask
    meter = PreparationMeter(
        sum(task.size for each in sources for task in each.tasks), show, doing="judging documents"
    )
    selection = select_documents(
        parts,
        folder,
        rules,
        precedence=precedence_of(run_data),
        held_out=_held_out_texts(run_data, task_of, protected),
        held_out_identity=_held_out_identity(run_data, parts, protected),
        protected=lambda part: protected[part.source, part.name],
        executor=executor,
        memory=run_data.sort_bytes,
        done=lambda part: meter.task(part.size),
    )
    return _keep_selected(selection, task_of, protected, sources)


def _part_to_measure(
    source: TokenizedSource, task: Task, order: int, taken: Mapping[Any, object]
) -> PartToMeasure:
    content = source.store.part(task).folder.name
    name, number = content, 1
    while (source.name, name) in taken:  # two tasks with the same content
        number += 1
        name = f"{content}-{number}"
    return PartToMeasure(
        source=source.name,
        name=name,
        identity=" ".join((content, *filter_digests(source.config))),
        read=partial(_documents_of_task, to_plain(source.config), task.to_plain()),
        order=order,
        size=task.size,
    )


def _documents_of_task(section: Mapping[str, Any], task: Mapping[str, Any]) -> Iterator[Entry]:
    """Yield the documents of a task, numbered as in its part."""
    documents = read_documents(Task.from_plain(dict(task)), read_section(section))
    for number, (_, text) in enumerate(documents):
        yield Entry(number, text)


def _filter_settings(source: TokenizedSource) -> list[Any]:
    """Return the filter settings that a source's columns depend on."""
    return [
        [name, *(getattr(keys, each) for each in load_spec("filter", name).settings)]
        for name, keys in sorted(filters_of(source.config).items())
    ]


def _held_out_identity(
    run_data: DataConfig, parts: Sequence[PartToMeasure], protected: Mapping[tuple[str, str], Bool]
) -> str:
    named = [
        [to_plain(section), *map(version_of, split_files(section).train)]
        for section in decontamination_sections(run_data)
    ]
    own = [
        [part.source, part.identity, np.packbits(protected[part.source, part.name]).tobytes().hex()]
        for part in (parts if HELD_OUT in run_data.decontaminate else ())
    ]
    return digest_of(json.dumps([named, own]))


def _held_out_texts(
    run_data: DataConfig,
    task_of: Mapping[tuple[str, str], tuple[TokenizedSource, Task]],
    protected: Mapping[tuple[str, str], Bool],
) -> Iterator[Entry]:
    """Yield the texts to decontaminate against."""
    for section in decontamination_sections(run_data):
        for document in Reader(section).documents(split_files(section).train):
            yield Entry(0, document.text)
    if HELD_OUT not in run_data.decontaminate:
        return
    for at, (source, task) in task_of.items():
        if protected[at].any():
            for entry in _documents_of_task(to_plain(source.config), task.to_plain()):
                if protected[at][entry.number]:
                    yield entry


def _keep_selected(
    selection: Selection,
    task_of: Mapping[tuple[str, str], tuple[TokenizedSource, Task]],
    protected: Mapping[tuple[str, str], Bool],
    sources: Sequence[TokenizedSource],
) -> KeptDocuments:
    keep: dict[str, dict[str, Bool]] = {each.name: {} for each in sources}
    trained = dict.fromkeys(keep, 0)
    left = dict.fromkeys(keep, 0)
    stays = selection.stays
    for name, part, first in selection.parts:
        mask = protected[name, part]
        own = stays[first : first + len(mask)]
        if len(own) != len(mask):
            raise TrainctlError(
                f"the text of {name} is not the one that was tokenized",
                hint="start again when nobody writes to its files",
            )
        keep[name][task_of[name, part][1].key] = own
        trained[name] += int((~mask).sum())
        left[name] += int((own & ~mask).sum())
    dropped = {
        name: {
            "schema": 1,
            "source": name,
            "documents": trained[name],
            "stay": left[name],
            "reasons": {
                reason: asdict(tally) for reason, tally in selection.counts.get(name, {}).items()
            },
            "common_ngrams": selection.common_ngrams,
            **_dropped_examples(selection, name, task_of),
        }
        for name in keep
    }
    for name in keep:
        if trained[name] and not left[name]:
            raise TrainctlError(
                f"nothing of {name} is left to train on: of {trained[name]:,} documents "
                f"{describe_removals(dropped[name])}",
                hint="choose another threshold, or set the filter to null",
            )
    return KeptDocuments(keep, dropped)


def describe_removals(dropped: Mapping[str, Any]) -> str:
    """Describe what was dropped from a source and why: `exact took 12, c4.min_sentences 3`."""
    counts = {reason: tally["documents"] for reason, tally in dropped["reasons"].items()}
    most_first = sorted(counts.items(), key=lambda each: -each[1])
    some = [f"{reason} took {count:,}" for reason, count in most_first if count]
    return ", ".join(some) or "none went"


def _dropped_examples(
    selection: Selection,
    name: str,
    task_of: Mapping[tuple[str, str], tuple[TokenizedSource, Task]],
) -> dict[str, Any]:
    by_reason = selection.examples.get(name, {})
    every = [each for some in by_reason.values() for each in some]
    named = {(each.source, each.part) for each in every}
    named |= {each.like[:2] for each in every if each.like is not None}
    return {
        "examples": {reason: [asdict(each) for each in some] for reason, some in by_reason.items()},
        "sections": {at[0]: _reading_settings(task_of[at][0].config) for at in named},
        "parts": [[*at, task_of[at][1].to_plain()] for at in sorted(named)],
    }


def _reading_settings(section: DataConfig) -> dict[str, Any]:
    """Return the keys of a section without those that say where the text is prepared."""
    return {
        name: value
        for name, value in to_plain(section).items()
        if not name.startswith("executor") and name != "sort_bytes"
    }
