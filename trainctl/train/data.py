"""Batches from the tokenized corpus, by sample counter alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from trainctl.data.mixture import order_of
from trainctl.data.order import Order
from trainctl.engines.micro_batch import IGNORED_LABEL, MicroBatch
from trainctl.plan.batches import Batch
from trainctl.plan.mixture import sources_of
from trainctl.plan.sample_order import samples_in
from trainctl.plan.types import RunPlan
from trainctl.train.corpus import Corpus, Split


class PackedDataset:
    """Fixed-length samples cut out of the concatenated documents of a split.

    Sample i covers tokens [i L, i L + L], one more than its length L for the labels; what is left
    over at the end of the split is not used.
    """

    def __init__(
        self, corpus: Corpus, split: Split, *, sequence_length: int, mask_documents: bool
    ) -> None:
        self._tokens = corpus.tokens(split, in_order=False)
        self._ends = corpus.ends(split)
        self._end_of_document = corpus.end_of_document
        self._length = sequence_length
        self.mask_documents = mask_documents
        self.num_samples = samples_in(split.tokens, sequence_length)

    def micro_batch(self, indices: npt.NDArray[np.int64]) -> MicroBatch:
        """The samples at `indices`; an index of -1 is a sample without labels (padding)."""
        window, ends = self.rows(indices)
        batch = _micro_batch(window, ends, indices, is_masked=self.mask_documents)
        batch.labels[torch.from_numpy(indices < 0)] = IGNORED_LABEL
        return batch

    def rows(
        self, indices: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        """The samples at `indices`; below 0 is the first one.

        Returns:
            Their tokens and the one behind each, (samples, length + 1); and which tokens are the
            last of their document, (samples, length).
        """
        starts = np.maximum(indices, 0) * self._length
        window = np.empty((len(indices), self._length + 1), dtype=np.int64)
        for row, start in zip(window, starts.tolist(), strict=True):
            # Slices: indices of all tokens cost more than twice as much.
            row[:] = self._tokens[start : start + self._length + 1]
        return window, self._ends_in(window[:, :-1], starts)

    def _ends_in(
        self, inputs: npt.NDArray[np.int64], starts: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.bool_]:
        """Whether a token is the last of its document, (samples, length); no if nothing tells."""
        found = np.zeros(inputs.shape, dtype=bool)
        if self._ends is None:  # a corpus of before they were kept
            return found if self._end_of_document is None else inputs == self._end_of_document
        bounds = np.stack([starts, starts + self._length]).astype(self._ends.dtype)
        firsts, lasts = np.searchsorted(self._ends, bounds, side="right")
        for row, start, first, last in zip(found, starts, firsts, lasts, strict=True):
            row[self._ends[first:last].astype(np.int64) - start - 1] = True
        return found


def _micro_batch(
    window: npt.NDArray[np.int64],
    ends: npt.NDArray[np.bool_],
    indices: npt.NDArray[np.int64],
    *,
    is_masked: bool,
) -> MicroBatch:
    """A micro-batch of rows, as `PackedDataset.rows` gives them."""
    inputs, labels = window[:, :-1], window[:, 1:].copy()
    documents = np.zeros_like(inputs)
    documents[:, 1:] = np.cumsum(ends[:, :-1], axis=1)
    positions = np.tile(np.arange(inputs.shape[1]), (len(inputs), 1))
    if is_masked:
        # The end of a document must not have to guess how the next one begins.
        labels[ends] = IGNORED_LABEL
        first = np.where(np.pad(ends[:, :-1], ((0, 0), (1, 0))), positions, 0)
        positions = positions - np.maximum.accumulate(first, axis=1)
    return MicroBatch(
        input_ids=torch.from_numpy(np.ascontiguousarray(inputs)),
        labels=torch.from_numpy(labels),
        position_ids=torch.from_numpy(positions),
        document_ids=torch.from_numpy(documents),
        sample_ids=torch.from_numpy(indices.copy()),
        is_masked=is_masked,
    )


@dataclass(frozen=True, slots=True)
class TrainingData:
    """The training samples of one data-parallel rank.

    The coordinate is the data-parallel rank alone, so ranks of one tensor, pipeline or sequence
    group get the same samples.

    Attributes:
        order: That of the run's samples.
        datasets: One for each name of a source and length of a sample.
        data_rank: Number of this rank among those that have other samples.
        data_size: Number of those.
    """

    order: Order
    datasets: Mapping[tuple[str, int], PackedDataset]
    data_rank: int
    data_size: int

    @classmethod
    def of(
        cls, plan: RunPlan, corpora: Mapping[str, Corpus], *, data_rank: int, data_size: int
    ) -> TrainingData:
        """Those of a plan, whose sources are long enough for its stages."""
        names = sources_of(plan.config.data)
        order = order_of(plan, {name: corpora[name].train.tokens for name in names})
        datasets = {
            (name, stage.length): PackedDataset(
                corpora[name],
                corpora[name].train,
                sequence_length=stage.length,
                mask_documents=plan.config.data.mask_documents,
            )
            for stage in order.stages
            for name in stage.weights
        }
        return cls(order, datasets, data_rank, data_size)

    def step(self, first_sample: int, batch: Batch) -> list[MicroBatch]:
        """This rank's micro-batches of an optimizer step.

        Args:
            first_sample: Counter of the step's first sample.
            batch: Of the step, of all ranks.
        """
        samples = self.order.at(self.counters(first_sample, batch))
        return [
            self._micro_batch(sources, indices, batch.sequence_length)
            for sources, indices in zip(samples.source, samples.index, strict=True)
        ]

    def counters(self, first_sample: int, batch: Batch) -> npt.NDArray[np.int64]:
        """Sample counters of these micro-batches, (passes, micro_batch_size)."""
        dealt = self.order.dealt(first_sample, batch.global_batch_size)
        each = dealt.reshape(-1, self.data_size, batch.micro_batch_size)
        return each[:, self.data_rank]

    def drawn(self, first_sample: int, end_sample: int) -> dict[str, int]:
        """Samples of each source among the counters from the first to before the end."""
        before, after = self.order.drawn(first_sample), self.order.drawn(end_sample)
        return {name: after[name] - before[name] for name in self.order.names}

    def _micro_batch(
        self, sources: npt.NDArray[np.int64], indices: npt.NDArray[np.int64], length: int
    ) -> MicroBatch:
        window = np.empty((len(indices), length + 1), dtype=np.int64)
        ends = np.empty((len(indices), length), dtype=bool)
        is_masked = False
        for source in np.unique(sources):
            dataset = self.datasets[self.order.names[source], length]
            mine = np.flatnonzero(sources == source)
            window[mine], ends[mine] = dataset.rows(indices[mine])
            is_masked = dataset.mask_documents
        return _micro_batch(window, ends, indices, is_masked=is_masked)


def held_out_data(plan: RunPlan, corpora: Mapping[str, Corpus]) -> dict[str, PackedDataset]:
    """What each source of a run holds out, in samples of `training.sequence_length`."""
    return {
        name: PackedDataset(
            corpora[name],
            corpora[name].held_out,
            sequence_length=plan.batch.sequence_length,
            mask_documents=plan.config.data.mask_documents,
        )
        for name in sources_of(plan.config.data)
    }
