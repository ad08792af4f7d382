"""Best-fit packing and fill-in-the-middle of a run: what a rank trains on, and what is kept."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from rank_processes import Case, curve, tiny_config, tiny_plan, train_cases, with_stop
from tokenizers import Tokenizer, models, pre_tokenizers

from trainctl.config.codec import from_plain, to_plain
from trainctl.config.registry import new_section
from trainctl.config.schema import Packing, RunConfig
from trainctl.data.corpora import build_corpora
from trainctl.data.infilling import infilling_settings
from trainctl.data.mixture import SourceLength, plan_data
from trainctl.data.packing import load_bins, packed_token_count
from trainctl.data.sample_contents import read_samples
from trainctl.data.tokenizer import ByteTokenizer, load_tokenizer
from trainctl.engines.micro_batch import IGNORED_LABEL
from trainctl.engines.protocol import Engine
from trainctl.errors import TrainctlError
from trainctl.options.objective import objective_of
from trainctl.runs.layout import RunPaths
from trainctl.runs.records import read_events, step_curve
from trainctl.train.data import PackedDataset, TrainingData

LENGTH = 64
SENTINELS = ["<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>"]
NAMES = [f"w{n}" for n in range(50)]


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRAINCTL_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture
def config(tmp_path):
    """Documents of 2 to 200 tokens, the ends among them."""
    folder = tmp_path / "texts"
    folder.mkdir()
    lengths = np.random.default_rng(0).integers(1, 200, 120)
    for number, length in enumerate(lengths.tolist()):
        text = "".join(chr(97 + (number + n) % 26) for n in range(length))
        (folder / f"{number:03}.txt").write_text(text)
    made = tiny_config(sequence_length=LENGTH, steps=4, micro_batch_size=2, global_batch_size=4)
    made.data = new_section("data", "files", paths=[str(folder)], packing=Packing.best_fit)
    return made


def with_data(config, **values):
    return replace(config, data=replace(config.data, **values))


def every_sample(config, corpus, *, mask, **how):
    bins = load_bins(config, corpus, corpus.train)
    data = PackedDataset(
        corpus, corpus.train, sequence_length=LENGTH, mask_documents=mask, bins=bins, **how
    )
    return data, data.micro_batch(np.arange(data.num_samples))


@pytest.mark.parametrize("mask", [False, True])
def test_every_token_is_trained_on_once_and_padding_never(config, mask):
    corpus = build_corpora(config, ByteTokenizer())["data"]
    text = corpus.tokens(corpus.train)[: corpus.train.tokens].astype(int)
    ends = corpus.ends(corpus.train).astype(int).tolist()
    data, batch = every_sample(config, corpus, mask=mask)
    assert packed_token_count(config, corpus) == data.num_samples * LENGTH + 1
    found = np.zeros(len(text), dtype=int)
    labels = 0
    for index, (ids, targets, positions, documents) in enumerate(
        zip(
            batch.input_ids.numpy(),
            batch.labels.numpy(),
            batch.position_ids.numpy(),
            batch.document_ids.numpy(),
            strict=True,
        )
    ):
        at = 0
        pieces = data.pieces(index)
        for number, (start, end) in enumerate(pieces):
            size = end - start
            found[start:end] += 1
            place = slice(at, at + size)
            assert ids[place].tolist() == text[start:end].tolist()
            assert set(documents[place].tolist()) == {number}
            first = 0 if mask else at
            assert positions[place].tolist() == list(range(first, first + size))
            inside = targets[at : at + size - 1].tolist()
            assert inside == text[start + 1 : end].tolist()
            last = targets[at + size - 1]
            if end not in ends:  # a piece of a longer document: the next token is known
                assert size == LENGTH and last == text[end]
            elif mask or number == len(pieces) - 1:
                assert last == IGNORED_LABEL
            else:
                assert last == text[pieces[number + 1][0]]
            at += size
        assert (targets[at:] == IGNORED_LABEL).all() and (ids[at:] == 256).all()
        labels += int((targets != IGNORED_LABEL).sum())
    assert (found == 1).all()
    documents = [end - start for start, end in pairwise([0, *ends])]
    if mask:
        assert labels == len(text) - len(documents)


@pytest.mark.parametrize("mask", [False, True])
def test_the_loss_is_a_mean_over_labels_and_not_over_padding(config, mask):
    corpus = build_corpora(config, ByteTokenizer())["data"]
    _, batch = every_sample(config, corpus, mask=mask)
    process = SimpleNamespace(sum=lambda *values: list(values), world_size=1)
    mesh = SimpleNamespace(data=SimpleNamespace(size=1))
    objective = objective_of(config.objective)
    engine = SimpleNamespace(
        _plan=tiny_plan(config, 1), _process=process, mesh=mesh, objective=objective
    )
    counted = Engine._num_labels(engine, [batch])
    assert counted == int((batch.labels != IGNORED_LABEL).sum()) < batch.labels.numel()


def test_bins_are_kept_and_made_again_where_they_are_damaged(config):
    corpus = build_corpora(config, ByteTokenizer())["data"]
    said = []
    first = load_bins(config, corpus, corpus.train, said.append)
    (folder,) = Path(corpus.folder).parent.glob("packing-*[0-9a-f]")
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    raw = bytearray(before["lengths.bin"])
    raw[0] ^= 1
    (folder / "lengths.bin").write_bytes(raw)
    again = load_bins(config, corpus, corpus.train, said.append)
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before
    assert said == [
        f"{folder} is damaged (lengths.bin has another checksum): packing the documents again"
    ]
    assert again.starts.tolist() == first.starts.tolist()
    assert load_bins(with_data(config, packing=Packing.stream), corpus, corpus.train) is None
    longer = replace(config, training=replace(config.training, sequence_length=2 * LENGTH))
    assert packed_token_count(longer, corpus) != packed_token_count(config, corpus)


def test_what_is_shown_is_what_was_trained_on(config):
    plan = tiny_plan(config, 1)
    corpora = build_corpora(config, ByteTokenizer())
    samples = read_samples(plan, corpora, ByteTokenizer(), [*range(16)], most_characters=0)
    own = TrainingData.of(plan, corpora, data_rank=0, data_size=1)
    steps = [own.step(first, plan.batch) for first in (0, 4, 8, 12)]
    rows = [row for step in steps for batch in step for row in batch.input_ids]
    for sample, row in zip(samples, rows, strict=True):
        size = sum(passage.end - passage.start for passage in sample.passages)
        assert sample.text == ByteTokenizer().decode(row[:size].tolist())
        for passage in sample.passages:
            written = Path(passage.file).read_text()
            assert written[passage.start : passage.end] in sample.text


@pytest.fixture
def with_words(config, tmp_path):
    """Return the configuration with a word tokenizer that has the fill-in-the-middle tokens."""
    vocabulary = {name: n for n, name in enumerate([*NAMES, "</s>", *SENTINELS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(tmp_path / "words.json"))
    for file in sorted((tmp_path / "texts").iterdir()):
        file.write_text(" ".join(NAMES[n % 50] for n in range(len(file.read_text()))))
    section = new_section("tokenizer", "file", path=str(tmp_path / "words.json"))
    return replace(with_data(config, fim_rate=0.5), tokenizer=section)


@pytest.mark.parametrize("packing", Packing)
def test_a_document_is_the_same_in_all_its_samples_and_another_in_the_next_epoch(
    with_words, packing
):
    config = with_data(with_words, packing=packing)
    corpus = build_corpora(config, load_tokenizer(config.tokenizer))["data"]
    infilling = infilling_settings(config, "data")
    data = PackedDataset(
        corpus,
        corpus.train,
        sequence_length=LENGTH,
        mask_documents=False,
        bins=load_bins(config, corpus, corpus.train),
        infilling=infilling,
    )
    text, ends = corpus.tokens(corpus.train)[: corpus.train.tokens], corpus.ends(corpus.train)
    epochs = []
    for epoch in range(2):
        whole = text.astype(np.int64)
        infilling.apply(whole, 0, text, ends, epoch)
        indices = np.arange(data.num_samples)
        rows = data.read(indices, np.full(len(indices), epoch))
        for index in indices.tolist():
            at = 0
            for start, end in data.pieces(index):
                found = rows.tokens[index, at : at + end - start]
                assert found.tolist() == whole[start:end].tolist()
                at += end - start
            if not rows.ignored[index, -1]:
                assert rows.tokens[index, LENGTH] == whole[end]
        epochs.append(whole)
        assert (np.flatnonzero(whole == 50) + 1).tolist() == ends.tolist()
    sentinels = [(np.isin(whole, [51, 52, 53])).sum() for whole in epochs]
    assert 0.3 < sentinels[0] / (3 * len(ends)) < 0.7 and (epochs[0] != epochs[1]).any()


def test_tokens_that_there_are_not_are_named(with_words):
    config = with_data(with_words, fim_tokens=["<|fim_prefix|>", "<MID>", "<|fim_suffix|>"])
    with pytest.raises(TrainctlError, match=r"words\.json has no token '<MID>'"):
        infilling_settings(config, "data")


@pytest.mark.parametrize("packing", Packing)
def test_any_layout_reads_the_same_samples_whatever_was_read_before(with_words, packing):
    config = with_data(with_words, packing=packing, mask_documents=True)
    plan = tiny_plan(config, 1)
    corpora = build_corpora(config, load_tokenizer(config.tokenizer))
    alone = TrainingData.of(plan, corpora, data_rank=0, data_size=1)
    ranks = [TrainingData.of(plan, corpora, data_rank=rank, data_size=2) for rank in range(2)]

    def rows(batches):
        return [
            [column[row].tolist() for column in (each.input_ids, each.labels, each.position_ids)]
            for each in batches
            for row in range(len(each.input_ids))
        ]

    epoch = alone.datasets["data", LENGTH].num_samples
    halved = replace(plan.batch, gradient_accumulation_steps=1)
    for first in (4, 0, epoch, epoch + 4):  # not in the order of the run, and of two epochs
        shared = [row for rank in ranks for row in rows(rank.step(first, halved))]
        assert sorted(shared) == sorted(rows(alone.step(first, plan.batch)))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_mixture_of_bins_is_trained_as_planned_and_goes_on_bit_for_bit(with_words, tmp_path):
    plain = to_plain(with_words)
    paths = plain["data"]["paths"]
    plain["data"] |= {
        "paths": [],
        "fim_rate": 0.0,
        "mask_documents": True,
        "sources": {
            "a": {"paths": paths, "weight": 3, "fim_rate": 0.5},
            "b": {"paths": [f"{paths[0]}/0*.txt"], "weight": 1, "held_out_fraction": 0.1},
        },
    }
    plain["checkpoint"]["every_steps"] = 2
    config = from_plain(RunConfig, plain)
    plan = tiny_plan(config, 1)
    whole, stopped = (RunPaths(tmp_path / name) for name in ("whole", "stopped"))
    train_cases(1, [Case(plan, whole), Case(with_stop(plan, 3), stopped)], together=True)
    train_cases(1, [Case(plan, stopped, attempt=2)])
    assert curve(stopped) == curve(whole)
    corpora = build_corpora(config, load_tokenizer(config.tokenizer))
    counts = {
        name: SourceLength(tokens=packed_token_count(config, corpus))
        for name, corpus in corpora.items()
    }
    (stage,) = plan_data(plan, counts).stages
    steps = step_curve(read_events(whole.events)).values()
    for name, use in stage.sources.items():
        assert sum(step["sources"][name] for step in steps) == use.samples
