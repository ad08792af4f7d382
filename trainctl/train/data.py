"""Batches from the tokenized corpus, by sample counter alone."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from trainctl.engines.micro_batch import IGNORED_LABEL, MicroBatch
from trainctl.plan.sample_order import samples_in
from trainctl.train.corpus import Corpus, Split
from trainctl.train.order import sample_indices


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
        self._mask_documents = mask_documents
        self.num_samples = samples_in(split.tokens, sequence_length)

    def micro_batch(self, indices: npt.NDArray[np.int64]) -> MicroBatch:
        """The samples at `indices`; an index of -1 is a sample without labels (padding)."""
        starts = np.maximum(indices, 0) * self._length
        window = np.empty((len(indices), self._length + 1), dtype=np.int64)
        for row, start in zip(window, starts.tolist(), strict=True):
            # Slices: indices of all tokens cost more than twice as much.
            row[:] = self._tokens[start : start + self._length + 1]
        inputs, labels = window[:, :-1], window[:, 1:].copy()
        labels[indices < 0] = IGNORED_LABEL
        documents = np.zeros_like(inputs)
        positions = np.tile(np.arange(self._length), (len(indices), 1))
        ends = self._ends_in(inputs, starts)
        if ends is not None:
            documents[:, 1:] = np.cumsum(ends[:, :-1], axis=1)
            if self._mask_documents:
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
            is_masked=self._mask_documents,
        )

    def _ends_in(
        self, inputs: npt.NDArray[np.int64], starts: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.bool_] | None:
        """Whether a token is the last of its document, (samples, length); None if nothing tells."""
        if self._ends is None:  # a corpus of before they were kept
            end = self._end_of_document
            return None if end is None else inputs == end
        found = np.zeros(inputs.shape, dtype=bool)
        bounds = np.stack([starts, starts + self._length]).astype(self._ends.dtype)
        firsts, lasts = np.searchsorted(self._ends, bounds, side="right")
        for row, start, first, last in zip(found, starts, firsts, lasts, strict=True):
            row[self._ends[first:last].astype(np.int64) - start - 1] = True
        return found


@dataclass(frozen=True, slots=True)
class TrainingData:
    """The training samples of one data-parallel rank.

    The coordinate is the data-parallel rank alone, so ranks of one tensor, pipeline or sequence
    group get the same samples.
    """

    dataset: PackedDataset
    seed: int
    shuffle: bool
    micro_batch_size: int
    data_rank: int
    data_size: int

    def step(self, first_sample: int, passes: int) -> list[MicroBatch]:
        """This rank's micro-batches of an optimizer step.

        Args:
            first_sample: Counter of the step's first sample.
            passes: Gradient accumulation steps: how many micro-batches.
        """
        batches = []
        for counters in self.counters(first_sample, passes):
            indices = sample_indices(
                counters,
                num_samples=self.dataset.num_samples,
                seed=self.seed,
                shuffle=self.shuffle,
            )
            batches.append(self.dataset.micro_batch(indices))
        return batches

    def counters(self, first_sample: int, passes: int) -> npt.NDArray[np.int64]:
        """Sample counters of these micro-batches, (passes, micro_batch_size)."""
        size = self.micro_batch_size
        firsts = first_sample + (np.arange(passes) * self.data_size + self.data_rank) * size
        return firsts[:, None] + np.arange(size)
