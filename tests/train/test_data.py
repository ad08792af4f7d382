"""Batches: shifted labels, document boundaries, and who gets which sample."""

from fractions import Fraction

import numpy as np
import pytest
from plain_order import sample_indices

from trainctl.data.corpus import Corpus, Split
from trainctl.data.order import OrderedSource, OrderedStage, SampleOrder
from trainctl.engines.micro_batch import IGNORED_LABEL
from trainctl.plans.mixture import SINGLE_SOURCE
from trainctl.plans.types import Batch
from trainctl.train.data import PackedDataset, TrainingData

END = 256


def make_corpus(tmp_path, ids):
    np.asarray(ids, dtype="<u2").tofile(tmp_path / "train.bin")
    ends = sorted({len(ids)} | {place + 1 for place, id in enumerate(ids) if id == END})
    np.asarray(ends, dtype="<u8").tofile(tmp_path / "train.ends")
    return Corpus(
        folder=str(tmp_path),
        dtype="<u2",
        end_of_document=END,
        train=Split("train.bin", len(ids), len(ends), ends="train.ends"),
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
    data = {(SINGLE_SOURCE, 2): dataset(tmp_path, list(range(250)), length=2)}
    order = SampleOrder(
        3, [OrderedSource(SINGLE_SOURCE, 250)], [OrderedStage(0, 2, {SINGLE_SOURCE: Fraction(1)})]
    )

    def step(rank, size, micro, passes):
        batch = Batch(
            global_batch_size=size * micro * passes,
            micro_batch_size=micro,
            gradient_accumulation_steps=passes,
            sequence_length=2,
        )
        batches = TrainingData(order, data, rank, size).step(40, batch)
        return [i for batch in batches for i in batch.sample_ids.tolist()]

    seen = [i for rank in range(data_size) for i in step(rank, data_size, micro, accumulation)]
    reference = step(0, 1, 8, 1)
    before = sample_indices(np.arange(40, 48), num_samples=124, seed=3, shuffle=True)
    assert reference == before.tolist()  # of one source, in the order of runs that were begun
    assert sorted(seen) == sorted(reference)


def test_rows_of_a_mixture_match_their_sources(tmp_path):
    corpora = {name: tmp_path / name for name in "ab"}
    for folder in corpora.values():
        folder.mkdir()
    data = {
        ("a", 4): dataset(corpora["a"], [1, END, 3, 4, 5, 6, 7, 8, 9], 4, mask_documents=True),
        ("b", 4): dataset(corpora["b"], list(range(100, 200)), 4, mask_documents=True),
    }
    weights = {"a": Fraction(1), "b": Fraction(1)}
    sources = [OrderedSource("a", 9), OrderedSource("b", 100)]
    order = SampleOrder(3, sources, [OrderedStage(0, 4, weights)])
    batch = Batch(
        global_batch_size=8,
        micro_batch_size=2,
        gradient_accumulation_steps=2,
        sequence_length=4,
    )
    seen = []
    for rank in range(2):
        own = TrainingData(order, data, rank, 2)
        counters = own.counters(16, batch)
        for row, made in zip(counters, own.step(16, batch), strict=True):
            for place, counter in enumerate(row):
                at = order.at(counter)
                name = order.names[int(at.source)]
                alone = data[name, 4].micro_batch(at.index.reshape(1))
                assert (made.input_ids[place] == alone.input_ids[0]).all()
                assert (made.labels[place] == alone.labels[0]).all()
                assert (made.position_ids[place] == alone.position_ids[0]).all()
                seen.append((int(counter), name))
    assert sorted(counter for counter, _ in seen) == list(range(16, 24))
    drawn = TrainingData(order, data, 0, 2).source_draws(16, 24)
    assert drawn == {name: sum(n == name for _, n in seen) for name in "ab"} == {"a": 4, "b": 4}
