"""Micro-batches of the tokenized corpus as a function of the sample counter alone; prefetched."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from trainctl.data.corpus import Corpus, Split
from trainctl.data.infilling import infilling_settings
from trainctl.data.mixture import sample_order
from trainctl.data.order import SampleOrder
from trainctl.data.packing import load_bins, packed_token_count
from trainctl.data.sample_reader import SampleBatch, SampleReader, token_masking
from trainctl.data.streaming.corpora import Stream, StreamedCorpus
from trainctl.data.targets import Prompt
from trainctl.engines.micro_batch import IGNORED_LABEL, MicroBatch
from trainctl.options.data import SampleKind, spec_of
from trainctl.options.objective import RECORDS, objective_of
from trainctl.plans.mixture import StagedBatches, sources_of, stages_of_plan
from trainctl.plans.types import Batch, RunPlan


class Rows(Protocol):
    """A row for each sample, in memory or read when it is indexed."""

    def __len__(self) -> int: ...

    def __getitem__(self, indices: npt.NDArray[np.int64], /) -> npt.NDArray[Any]: ...


class PackedDataset:
    """Samples of one length from one split of a corpus, as micro-batches.

    Args:
        sequence_length: Tokens of a sample.
        mask_documents: Whether attention stays within a document.
        counts_records: Whether the loss is a mean over samples rather than labels.
        how: Further arguments of `SampleReader`: `bins`, `infilling` and `masking`.
    """

    def __init__(
        self,
        corpus: Corpus,
        split: Split,
        *,
        sequence_length: int,
        mask_documents: bool,
        kind: SampleKind = SampleKind.text,
        counts_records: bool = False,
        **how: Any,
    ) -> None:
        self._samples = SampleReader(corpus, split, sequence_length, **how)
        self.sequence_length = sequence_length
        self._how: dict[str, Any] = {
            "is_masked": mask_documents,
            "kind": kind,
            "counts_records": counts_records,
            "hides_tokens": how.get("masking") is not None,
        }
        self.stored: dict[str, Rows] = {}
        """Arrays of `Objective.stored` by name, with a row for each sample, once they are known."""
        self.num_samples = self._samples.num_samples
        self.read, self.pieces = self._samples.read, self._samples.pieces
        self.target_width = self._samples.target_width
        self.prompt = self._samples.prompt

    def micro_batch(self, indices: npt.NDArray[np.int64]) -> MicroBatch:
        """Return the samples at `indices`; index -1 gives a sample without labels (padding)."""
        rows = self.read(indices)
        rows.ignored[indices < 0], rows.hidden[indices < 0] = True, -1
        return self.batch_of(rows, indices, self.stored_rows(np.maximum(indices, 0)))

    def stored_rows(self, indices: npt.NDArray[np.int64]) -> dict[str, npt.NDArray[Any]]:
        """Return the rows of the stored arrays by name, (samples, ...)."""
        return {name: each[indices] for name, each in self.stored.items() if len(each)}

    def batch_of(
        self,
        rows: SampleBatch,
        indices: npt.NDArray[np.int64],
        stored: Mapping[str, npt.NDArray[Any]],
    ) -> MicroBatch:
        """Return a micro-batch of samples that were read, with their stored rows."""
        batch = _micro_batch(rows, indices, **self._how)
        return replace(batch, stored={name: torch.from_numpy(r) for name, r in stored.items()})


def _micro_batch(
    rows: SampleBatch,
    indices: npt.NDArray[np.int64],
    *,
    is_masked: bool,
    kind: SampleKind,
    counts_records: bool,
    hides_tokens: bool,
) -> MicroBatch:
    """Build a micro-batch from the tokens of its samples.

    In records whose tokens are not predicted, a label is the token itself, so that a position with
    a label is one that the objective may read.
    """
    inputs, labels = rows.tokens[:, :-1], rows.tokens[:, 1:].copy()
    ends = rows.ends | _ends_within_records(rows.ignored, kind)
    labels[rows.ignored] = IGNORED_LABEL
    documents = np.zeros_like(inputs)
    documents[:, 1:] = np.cumsum(ends[:, :-1], axis=1)
    positions = np.tile(np.arange(inputs.shape[1]), (len(inputs), 1))
    if is_masked:
        # The last token of a document must not learn the first one of the next.
        labels[ends] = IGNORED_LABEL
        first = np.where(np.pad(ends[:, :-1], ((0, 0), (1, 0))), positions, 0)
        positions = positions - np.maximum.accumulate(first, axis=1)
    if kind in (SampleKind.labelled, SampleKind.similar, SampleKind.prompts):  # all but padding
        behind = np.maximum.accumulate(rows.ends[:, ::-1], axis=1)[:, ::-1]
        labels = np.where(behind & (indices >= 0)[:, None], inputs, IGNORED_LABEL)
    elif kind is SampleKind.steps:  # the marked tokens
        is_marked = np.pad(~rows.ignored[:, :-1], ((0, 0), (1, 0)))
        labels = np.where(is_marked, inputs, IGNORED_LABEL)
    if hides_tokens:
        labels = np.where(rows.hidden < 0, IGNORED_LABEL, rows.hidden)
    return MicroBatch(
        input_ids=torch.from_numpy(np.ascontiguousarray(inputs)),
        labels=torch.from_numpy(labels),
        position_ids=torch.from_numpy(positions),
        document_ids=torch.from_numpy(documents),
        sample_ids=torch.from_numpy(indices.copy()),
        is_masked=is_masked,
        counts_records=counts_records,
        targets=torch.from_numpy(rows.targets) if rows.targets.shape[1] else None,
    )


def _ends_within_records(ignored: npt.NDArray[np.bool_], kind: SampleKind) -> npt.NDArray[np.bool_]:
    """Return a mask of the last token of each document that another one of its record follows,
    (samples, length).

    Marks tell where that is (`data.record_encoders`): a document of pairs ends with its answer,
    whose tokens alone are marked; of similar texts each but the first begins with a mark.
    """
    ends = np.zeros_like(ignored)
    if kind is SampleKind.similar:
        ends = ~ignored
    elif kind is SampleKind.pairs:
        ends[:, 1:] = ignored[:, 1:] & ~ignored[:, :-1]
    return ends


@dataclass(frozen=True, slots=True)
class TrainingData:
    """Training samples of one data-parallel rank.

    They depend on the data-parallel rank alone, so all ranks of a tensor, pipeline or sequence
    group get the same samples.
    """

    order: SampleOrder
    """Order of the run's samples."""
    datasets: Mapping[tuple[str, int], PackedDataset]
    """Datasets by source name and sample length."""
    data_rank: int
    """Index of this rank among the ranks that get different samples."""
    data_size: int
    """Number of ranks that get different samples."""
    streams: tuple[Stream, ...] = ()
    """Streamed corpora, which are fetched while they are read."""

    @classmethod
    def of(
        cls, plan: RunPlan, corpora: Mapping[str, Corpus], *, data_rank: int, data_size: int
    ) -> TrainingData:
        """Build the training data of a plan.

        Raises:
            ValueError: A stage draws from a source that is shorter than one of its samples.
        """
        sections = sources_of(plan.config.data)
        order = sample_order(
            plan, {n: packed_token_count(plan.config, corpora[n]) for n in sections}
        )
        datasets = {
            (name, stage.length): _packed(
                plan,
                corpora[name],
                corpora[name].train,
                stage.length,
                infilling=infilling_settings(plan.config, name),
                masking=token_masking(plan.config, name),
            )
            for stage in order.stages
            for name in stage.weights
        }
        return cls(order, datasets, data_rank, data_size, _prefetched_streams(plan, order, corpora))

    def step(self, first_sample: int, batch: Batch) -> list[MicroBatch]:
        """Return this rank's micro-batches of an optimizer step.

        Args:
            first_sample: Counter of the step's first sample.
        """
        for stream in self.streams:
            stream.move(first_sample)
        samples = self.order.at(self.counters(first_sample, batch))
        return [
            self._micro_batch(*of_pass, batch.sequence_length)
            for of_pass in zip(samples.source, samples.index, samples.epoch, strict=True)
        ]

    def of_rank(self, data_rank: int) -> TrainingData:
        """Return the training data of another data-parallel rank."""
        return replace(self, data_rank=data_rank)

    def prompt(self, number: int) -> Prompt:
        """Return the prompt at a place of the run's order, counted from 0."""
        found = self.order.at(np.array([number]))
        ((name, index),) = zip(found.source.tolist(), found.index.tolist(), strict=True)
        (dataset,) = (
            each for key, each in self.datasets.items() if key[0] == self.order.names[name]
        )
        return dataset.prompt(index)

    def counters(self, first_sample: int, batch: Batch) -> npt.NDArray[np.int64]:
        """Return the sample counters of this rank's micro-batches, (passes, micro_batch_size)."""
        dealt = self.order.order_over_ranks(first_sample, batch.global_batch_size)
        each = dealt.reshape(-1, self.data_size, batch.micro_batch_size)
        return each[:, self.data_rank]

    def source_draws(self, first_sample: int, end_sample: int) -> dict[str, int]:
        """Return the number of samples of each source among counters [first_sample, end_sample)."""
        before, after = self.order.draws_before(first_sample), self.order.draws_before(end_sample)
        return {name: after[name] - before[name] for name in self.order.names}

    def _micro_batch(
        self,
        sources: npt.NDArray[np.int64],
        indices: npt.NDArray[np.int64],
        epochs: npt.NDArray[np.int64],
        length: int,
    ) -> MicroBatch:
        dataset = next(iter(self.datasets.values()))
        rows = SampleBatch.empty(len(indices), length, dataset.target_width)
        stored: dict[str, npt.NDArray[Any]] = {}
        for source in np.unique(sources):
            dataset = self.datasets[self.order.names[source], length]
            mine = np.flatnonzero(sources == source)
            rows.put(mine, dataset.read(indices[mine], epochs[mine]))
            for name, own in dataset.stored_rows(indices[mine]).items():
                empty = np.empty((len(indices), *own.shape[1:]), own.dtype)
                stored.setdefault(name, empty)[mine] = own
        return dataset.batch_of(rows, indices, stored)  # records have one source (TC393)


def _prefetched_streams(
    plan: RunPlan, order: SampleOrder, corpora: Mapping[str, Corpus]
) -> tuple[Stream, ...]:
    """Return the streamed corpora, set up to prefetch what the run's samples need."""
    found = {
        name: corpus.stream
        for name, corpus in corpora.items()
        if isinstance(corpus, StreamedCorpus) and corpus.stream is not None
    }
    if not found:
        return ()
    stages = stages_of_plan(plan)
    batches = [phase.batch for stage in stages for phase in stage.batches.phases]
    largest = max(batch.global_batch_size for batch in batches)
    for name, stream in found.items():
        stream.follow(order, name, end=stages[-1].sample_of(stages[-1].end_step), batch=largest)
    return tuple(found.values())


def held_out_data(plan: RunPlan, corpora: Mapping[str, Corpus]) -> dict[str, PackedDataset]:
    """Return the held-out split of each source, in samples of `training.sequence_length`."""
    length = plan.batch.sequence_length
    return {
        name: _packed(
            plan,
            corpora[name],
            corpora[name].held_out,
            length,
            masking=token_masking(plan.config, name, held_out=True),
        )
        for name in sources_of(plan.config.data)
    }


def _packed(plan: RunPlan, corpus: Corpus, split: Split, length: int, **how: Any) -> PackedDataset:
    data = plan.config.data
    return PackedDataset(
        corpus,
        split,
        sequence_length=length,
        mask_documents=data.mask_documents,
        kind=spec_of(data).gives,
        counts_records=objective_of(plan.config.objective).counts == RECORDS,
        bins=load_bins(plan.config, corpus, split),
        **how,
    )


PREFETCH_STEPS = 2
"""Most steps to prefetch: one may be slow, as when it is read from a disk for the first time."""


Wanted = tuple[int, Batch]
"""Key of a prefetched step, which decides the samples of each rank: first sample, global batch."""


class BatchPrefetcher:
    """Micro-batches of each step, prefetched by a thread; a context manager.

    The samples of a step follow from its first sample's counter and the sizes of its batch alone,
    so batches of the next steps can be made while the device works. If another step is taken than
    was foreseen (a batch was skipped, the run rewound, the ramp made a step larger), the prefetched
    batches are dropped. A run has consumed the batches that it took, never those only made.

    The thread makes one step after the other, in the order in which they are taken. Leaving the
    context drops the batches that were made and waits for those being made.

    Args:
        stop_step: Last step of the run; later ones are not prefetched.
        device: Device of this rank. For a GPU, batches are put in pinned memory, so that their copy
            overlaps with computation.
    """

    def __init__(
        self,
        data: TrainingData,
        batches: StagedBatches,
        *,
        stop_step: int,
        device: torch.device,
    ) -> None:
        self._data, self._batches, self._stop_step = data, batches, stop_step
        self._pins = device.type == "cuda"
        self._made: deque[tuple[Wanted, Future[list[MicroBatch]]]] = deque()
        self._thread = ThreadPoolExecutor(
            max_workers=1,
            thread_name_prefix="batches",
            # Pinned memory belongs to a device's context, and a new thread starts on device 0.
            initializer=partial(torch.cuda.set_device, device) if self._pins else None,
        )

    def __enter__(self) -> BatchPrefetcher:
        return self

    def __exit__(self, *exception: object) -> None:
        self._made.clear()
        self._thread.shutdown(wait=True, cancel_futures=True)

    def take(self, step: int, first_sample: int) -> list[MicroBatch]:
        """Return the micro-batches of the step after `step` steps; wait until they are made.

        Args:
            step: Steps of the run done so far.
            first_sample: Counter of the next sample.

        Raises:
            Exception: Any error from making the batches.
        """
        wanted = self._batches.at(step, first_sample)
        while self._made and self._made[0][0] != wanted:
            _, unwanted = self._made.popleft()
            unwanted.cancel()
        self._submit_steps(step, first_sample)
        _, made = self._made.popleft()
        return made.result()

    def _submit_steps(self, step: int, first_sample: int) -> None:
        """Submit this step and the next ones to the thread, unless they are submitted already."""
        for place in range(PREFETCH_STEPS + 1):
            if place and step + place >= self._stop_step:
                return
            wanted = self._batches.at(step + place, first_sample)
            first_sample = wanted[0] + wanted[1].global_batch_size
            if place < len(self._made):
                if self._made[place][0] == wanted:
                    continue
                while len(self._made) > place:  # a batch ramp: foreseen from another step
                    self._made.pop()[1].cancel()
            self._made.append((wanted, self._thread.submit(self._make, *wanted)))

    def _make(self, first_sample: int, batch: Batch) -> list[MicroBatch]:
        batches = self._data.step(first_sample, batch)
        return [batch.pinned() for batch in batches] if self._pins else batches
