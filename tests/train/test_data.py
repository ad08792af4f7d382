"""Batches: shifted labels, document boundaries, and who gets which sample."""

import numpy as np
import pytest

from trainctl.engines.micro_batch import IGNORED_LABEL
from trainctl.train.corpus import Corpus, Split
from trainctl.train.data import PackedDataset, TrainingData

END = 256


def make_corpus(tmp_path, ids):
    np.asarray(ids, dtype="<u2").tofile(tmp_path / "train.bin")
    return Corpus(
        folder=str(tmp_path),
        dtype="<u2",
        end_of_document=END,
        train=Split("train.bin", len(ids), 1),
        held_out=Split("held_out.bin", 0, 0),
        unigram_entropy=1.0,
        digest="",
    )


def dataset(tmp_path, ids, length, mask_documents=False):
    corpus = make_corpus(tmp_path, ids)
    return PackedDataset(
        corpus, corpus.train, sequence_length=length, mask_documents=mask_documents
    )


def test_labels_are_the_next_tokens_across_the_sample_boundary(tmp_path):
    data = dataset(tmp_path, range(10), length=4)
    assert data.num_samples == 2
    batch = data.micro_batch(np.array([1, 0]))
    assert batch.input_ids.tolist() == [[4, 5, 6, 7], [0, 1, 2, 3]]
    assert batch.labels.tolist() == [[5, 6, 7, 8], [1, 2, 3, 4]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3]] * 2
    assert batch.sample_ids.tolist() == [1, 0]


def test_document_boundaries_and_masking(tmp_path):
    ids = [1, 2, END, 3, END, 4, 5, 6, 7]
    plain = dataset(tmp_path, ids, length=8).micro_batch(np.array([0]))
    assert plain.document_ids.tolist() == [[0, 0, 0, 1, 1, 2, 2, 2]]
    assert plain.position_ids.tolist() == [list(range(8))]
    assert plain.num_labels == 8
    masked = dataset(tmp_path, ids, length=8, mask_documents=True).micro_batch(np.array([0]))
    assert masked.position_ids.tolist() == [[0, 1, 2, 0, 1, 0, 1, 2]]
    assert masked.labels.tolist() == [[2, END, IGNORED_LABEL, END, IGNORED_LABEL, 5, 6, 7]]
    assert masked.num_labels == 6


def test_padding_samples_have_no_labels(tmp_path):
    batch = dataset(tmp_path, range(10), length=4).micro_batch(np.array([0, -1]))
    assert batch.num_labels == 4


@pytest.mark.parametrize(
    ("data_size", "micro", "accumulation"), [(1, 4, 2), (2, 2, 2), (4, 1, 2), (2, 4, 1)]
)
def test_every_layout_sees_the_same_samples_in_a_step(tmp_path, data_size, micro, accumulation):
    data = dataset(tmp_path, list(range(250)), length=2)
    seen = []
    for rank in range(data_size):
        batches = TrainingData(
            dataset=data,
            seed=3,
            shuffle=True,
            micro_batch_size=micro,
            data_rank=rank,
            data_size=data_size,
        ).step(40, accumulation)
        seen += [i for batch in batches for i in batch.sample_ids.tolist()]
    reference = TrainingData(data, 3, True, 8, 0, 1).step(40, 1)[0].sample_ids.tolist()
    assert sorted(seen) == sorted(reference)
