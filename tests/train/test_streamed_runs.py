"""A run whose corpus lies in a bucket, with less room here than it takes: the same losses."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest
from bucket import s3_server
from rank_processes import Case, curve, tiny_config, tiny_plan, train_cases

from trainctl.config.codec import from_plain, to_plain
from trainctl.config.registry import new_section
from trainctl.config.schema import RunConfig
from trainctl.data import mixture
from trainctl.data.corpora import build_corpora, load_corpora
from trainctl.data.order import SampleOrder
from trainctl.data.prepare import prepare
from trainctl.data.streaming.corpora import upload_corpus
from trainctl.data.tokenizer import ByteTokenizer
from trainctl.errors import TrainctlError
from trainctl.plans.types import RunPlan
from trainctl.rules.plan import data as rules
from trainctl.runs.layout import RunPaths
from trainctl.train.data import TrainingData, held_out_data

PLACE = "s3://corpus/prepared"
SHARD = 4096


def unheard(_):
    """Nobody listens."""


@pytest.fixture(scope="module")
def bucket():
    with s3_server():
        yield


@pytest.fixture
def config(tmp_path, monkeypatch):
    """Configuration of a run over files, in the order of their text."""
    monkeypatch.setenv("TRAINCTL_CACHE_DIR", str(tmp_path / "cache"))
    file = tmp_path / "a.txt"
    file.write_text("\n".join(f"line {n} of {n * n % 97} in all" for n in range(4000)))
    found = tiny_config(
        steps=24,
        sequence_length=256,
        micro_batch_size=4,
        global_batch_size=16,
        gradient_accumulation_steps=None,
        evaluate_every_steps=8,
        checkpoint__at_end=False,
        model__hidden_size=32,
        model__intermediate_size=64,
        model__num_layers=1,
    )
    found.data = new_section("data", "files", paths=[str(file)], shuffle=False)
    found.data.mask_documents = True
    return found


def streamed(config, **values):
    plain = to_plain(config)
    plain["data"] = {"kind": "stream", "url": PLACE, "shuffle": False, "mask_documents": True}
    plain["data"].update(values)
    return from_plain(RunConfig, plain)


def test_what_has_no_room_or_another_tokenizer_is_refused(bucket, config, tmp_path):
    tokenizer = ByteTokenizer()
    (corpus,) = build_corpora(config, tokenizer).values()
    upload_corpus(corpus, tokenizer, PLACE, SHARD, unheard)
    run = RunPaths(tmp_path / "run")
    run.root.mkdir()
    for changes, message in [
        ({"cache_bytes": 4 * SHARD}, "data.cache_bytes=16384 holds less than has to be here"),
        ({"cache_bytes": 20 * SHARD, "shuffle": True}, "holds less than has to be here"),
        ({"url": "s3://corpus/none"}, "there is no prepared corpus at s3://corpus/none"),
    ]:
        with pytest.raises(TrainctlError, match=message):
            prepare(tiny_plan(streamed(config, **changes), 1), run)
    assert not run.corpus.exists()


@pytest.mark.slow
def test_batches_are_the_same_with_windows_and_masks(bucket, config, tmp_path, monkeypatch):
    """Order and shards of one small size, as they are both of 64 Mi tokens."""
    monkeypatch.setattr(mixture, "SampleOrder", partial(SampleOrder, shard_tokens=SHARD))
    monkeypatch.setattr(rules, "SHARD_TOKENS", SHARD)
    tokenizer = ByteTokenizer()
    (corpus,) = build_corpora(config, tokenizer).values()
    record = upload_corpus(corpus, tokenizer, PLACE, SHARD, unheard)
    size = max(facts.size for facts in record.shards["train"])
    config = streamed(config, shuffle=True, shuffle_shards=3, cache_bytes=8 * size)
    plan: RunPlan = tiny_plan(config, 1)
    run = RunPaths(tmp_path / "run")
    run.root.mkdir()
    prepare(plan, run)
    assert len(record.shards["train"]) > 12
    corpora = load_corpora(run.corpus, config.data)
    (held_out,) = held_out_data(plan, corpora).values()
    (expected,) = held_out_data(plan, {"data": corpus}).values()
    indices = np.array([2, 0, 5, -1])
    mine, other = held_out.micro_batch(indices), expected.micro_batch(indices)
    assert held_out.num_samples == expected.num_samples
    assert (mine.labels == other.labels).all() and (mine.input_ids == other.input_ids).all()
    there = TrainingData.of(plan, corpora, data_rank=0, data_size=1)
    here = TrainingData.of(plan, {"data": corpus}, data_rank=0, data_size=1)
    folder = next(Path(tmp_path / "cache").glob("stream-*"))
    for step in range(24):
        batch = plan.batches.at(step)
        first = plan.batches.samples_before(step)
        for mine, other in zip(there.step(first, batch), here.step(first, batch), strict=True):
            assert (mine.input_ids == other.input_ids).all()
            assert (mine.labels == other.labels).all()
            assert (mine.position_ids == other.position_ids).all()
        assert sum(path.stat().st_size for path in folder.glob("*.shard*")) <= 8 * size


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_ranks_train_from_a_bucket_as_from_here(bucket, config, tmp_path):
    tokenizer = ByteTokenizer()
    (corpus,) = build_corpora(config, tokenizer).values()
    record = upload_corpus(corpus, tokenizer, PLACE, SHARD, unheard)
    limit = 6 * max(facts.size for facts in record.shards["train"])
    assert limit < record.size("train") / 2
    here, there = RunPaths(tmp_path / "here"), RunPaths(tmp_path / "there")
    elsewhere = streamed(config, cache_bytes=limit)
    train_cases(2, [Case(tiny_plan(config, 2), here), Case(tiny_plan(elsewhere, 2), there)])
    assert len(curve(here)) == 24 and curve(there) == curve(here)
    (folder,) = (tmp_path / "cache").glob("stream-*")
    assert sum(path.stat().st_size for path in folder.glob("*.shard*")) <= limit
    # What was being fetched when the ranks ended is removed by the next start.
    load_corpora(there.corpus, elsewhere.data)["data"].stream.cache.clean()
    assert not list(folder.glob("*.tmp")) and list(folder.glob("*.shard"))
