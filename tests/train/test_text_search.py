"""`data find`: documents and steps of a text, against all documents and all samples."""

import json

import pytest
from rank_processes import tiny_config, tiny_plan

from trainctl.config.registry import new_section, part_class
from trainctl.config.schema import SourceConfig, StageConfig
from trainctl.data.corpora import build_corpora
from trainctl.data.sample_contents import read_samples
from trainctl.data.text_search import AROUND, find_text, take_first
from trainctl.data.tokenizer import ByteTokenizer

LENGTH = 32
STEPS = 12
NUMBERS = {"code": 40, "prose": 20}
"""Documents of each source; each has its own number in words of its own."""


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRAINCTL_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture
def run(tmp_path):
    """Plan of two sources and two stages, its corpora, and records of all its steps but two."""
    sources = {}
    for name, count in NUMBERS.items():
        file = tmp_path / f"{name}.jsonl"
        texts = [f"{name} Number {number}, twice: Number {number}." for number in range(count)]
        file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        sources[name] = part_class(SourceConfig, "files")(
            paths=[str(file)], weight=1.0, held_out_fraction=0.0
        )
    config = tiny_config(steps=STEPS, sequence_length=LENGTH)
    stages = [StageConfig(until_step=6), StageConfig(weights={"code": 1.0}, sequence_length=16)]
    config.data = new_section("data", "files", sources=sources, stages=stages)
    plan = tiny_plan(config, 1)
    corpora = build_corpora(config, ByteTokenizer())
    events, first = [], 0
    for step in range(1, STEPS + 1):
        samples = plan.batch.global_batch_size * (1 if step <= 6 else 2)
        if step not in (3, 4):  # as after a spike, when samples are passed over
            events.append(
                {"event": "step", "attempt": 1, "step": step, "samples": [first, first + samples]}
            )
        first += samples
    return plan, corpora, events


@pytest.mark.slow
def test_every_document_is_found_and_each_step_that_saw_it(run):
    plan, corpora, events = run
    found = list(find_text(plan, corpora, ByteTokenizer(), "Number", events))
    assert [(each.source, each.document) for each in found] == [
        (name, number) for name in sorted(NUMBERS) for number in range(NUMBERS[name])
    ]
    sightings = 0
    for each in found:
        assert each.times == 2 and each.line == each.document + 1
        assert each.file.endswith(f"{each.source}.jsonl") and each.token == len(each.source) + 1
        seen = {sighting.sample: sighting for sighting in each.seen}
        sightings += len(seen)
        for event in events:
            samples = list(range(*event["samples"]))
            for sample in read_samples(plan, corpora, ByteTokenizer(), samples, most_characters=0):
                has_it = any(
                    sample.source == each.source
                    and passage.document == each.document
                    and passage.start <= each.token < passage.end
                    for passage in sample.passages
                )
                assert has_it == (sample.counter in seen)
                if has_it:
                    assert seen[sample.counter].step == event["step"]
                    assert seen[sample.counter].epoch == sample.epoch
    assert sightings


def test_case_surroundings_and_how_many(run):
    plan, corpora, _ = run
    assert not list(find_text(plan, corpora, ByteTokenizer(), "number 7,", []))
    found = find_text(plan, corpora, ByteTokenizer(), "number 7,", [], ignore_case=True)
    some, has_more = take_first(found, 1)
    assert has_more and [each.document for each in some] == [7]
    assert some[0].text == "code Number 7, twice: Number 7."[: 5 + 9 + AROUND]
    assert some[0].seen == ()
    every, has_more = take_first(find_text(plan, corpora, ByteTokenizer(), "Number 7,", []), 0)
    assert len(every) == 2 and not has_more
