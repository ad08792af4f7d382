"""`data show`: what was in a sample, against the text that it was made of."""

import json
from dataclasses import asdict

import pytest
from rank_processes import tiny_config, tiny_plan

from trainctl.cli import data as command
from trainctl.config.registry import new_section
from trainctl.data.corpus import build_corpus
from trainctl.data.prepare import load_run_corpora, prepare
from trainctl.data.sample_contents import (
    MOST_SAMPLES,
    counters_of_step,
    parse_counters,
    read_samples,
)
from trainctl.data.tokenizer import ByteTokenizer
from trainctl.errors import TrainctlError
from trainctl.plans.mixture import SINGLE_SOURCE
from trainctl.runs.layout import RunPaths

LENGTH = 64


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRAINCTL_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture
def texts(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    for name in "abc":
        (folder / f"{name}.txt").write_text(f"{name}:" + "".join(f" {i}" for i in range(60)))
    lines = ["", *(json.dumps({"text": f"line {i} " * 9}) for i in range(8)), ""]
    (folder / "b.jsonl").write_text("\n".join(lines))
    return folder


def plan_of(folder, pattern, **data):
    config = tiny_config(steps=4, sequence_length=LENGTH)
    config.data = new_section(
        "data", "files", paths=[str(folder / pattern)], held_out_fraction=0.0, **data
    )
    return tiny_plan(config, 1)


def shown(plan, counters, most=0):
    corpus = build_corpus(plan.config.data, ByteTokenizer())
    return corpus, read_samples(
        plan, {SINGLE_SOURCE: corpus}, ByteTokenizer(), counters, most_characters=most
    )


def documents(folder, pattern):
    """Text, file and line of each document, in order."""
    for file in sorted(folder.glob(pattern)):
        if file.suffix != ".jsonl":
            yield file.read_text(), str(file), None
            continue
        for number, line in enumerate(file.read_text().split("\n"), 1):
            if line:
                yield json.loads(line)["text"], str(file), number


@pytest.mark.parametrize("pattern", ["*.txt", "*.*"])
def test_each_passage_is_where_it_says(texts, pattern):
    plan = plan_of(texts, pattern)
    source = list(documents(texts, pattern))
    corpus, samples = shown(plan, list(range(12)))
    tokens = corpus.tokens(corpus.train)
    assert len({sample.index for sample in samples}) > 5
    for sample in samples:
        assert sample.first_token == sample.index * LENGTH and not sample.is_cut
        found = ""
        for passage in sample.passages:
            text, file, line = source[passage.document]
            assert (passage.file, passage.line) == (file, line)
            found += text[passage.start : passage.end]  # one past its end is the end of document
        assert sample.text == found
        own = tokens[sample.first_token : sample.first_token + LENGTH]
        assert ByteTokenizer().decode(own.tolist()) == found
        assert sum(passage.end - passage.start for passage in sample.passages) == LENGTH


def test_a_second_pass_has_other_places_for_the_same_samples(texts):
    _, samples = shown(plan_of(texts, "*.txt"), [0])
    count = (sum(len(text) + 1 for text, _, _ in documents(texts, "*.txt")) - 1) // LENGTH
    _, again = shown(plan_of(texts, "*.txt"), list(range(count, 2 * count)))
    assert {sample.epoch for sample in again} == {1}
    assert sorted(sample.index for sample in again) == list(range(count))
    assert samples[0].index in [sample.index for sample in again]


def test_texts_are_cut_and_files_may_be_gone(texts):
    plan = plan_of(texts, "*.txt")
    corpus = build_corpus(plan.config.data, ByteTokenizer())
    for file in texts.iterdir():
        file.unlink()
    (sample,) = read_samples(
        plan, {SINGLE_SOURCE: corpus}, ByteTokenizer(), [3], most_characters=10
    )
    assert len(sample.text) == 10 and sample.is_cut
    assert {passage.file for passage in sample.passages} == {None}


@pytest.mark.parametrize(
    ("text", "counters"),
    [("7", [7]), ("12,40-44", [12, 40, 41, 42, 43, 44]), ("3-3, 9", [3, 9])],
)
def test_lists_of_samples(text, counters):
    assert parse_counters(text) == counters


@pytest.mark.parametrize("text", ["", "x", "1-", "5-3", "-4", "1,,2", "0-1000", "0-9999999999999"])
def test_invalid_sample_lists_are_refused(text):
    with pytest.raises(TrainctlError, match="samples"):
        parse_counters(text)


def test_the_samples_of_a_step_follow_the_current_branch_of_the_run():
    events = [
        {"event": "step", "attempt": attempt, "step": step, "samples": samples}
        for attempt, step, samples in [(1, 1, [0, 4]), (1, 2, [4, 8]), (2, 2, [8, 12])]
    ]
    assert counters_of_step(events, 1) == [0, 1, 2, 3]
    assert counters_of_step(events, 2) == [8, 9, 10, 11], "those of the last attempt"
    with pytest.raises(TrainctlError, match="no record of step 3"):
        counters_of_step(events, 3)
    events[0]["samples"] = [5, 5 + MOST_SAMPLES + 1]
    with pytest.raises(TrainctlError) as refused:
        counters_of_step(events, 1)
    assert "--samples 5-1004" in refused.value.hint


def test_the_command_escapes_what_a_terminal_would_obey(tmp_path, capsys, monkeypatch):
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.txt").write_text("\x1b[31mred\x07 text\n" * 20)
    run = RunPaths(tmp_path / "run")
    run.root.mkdir()
    plan = plan_of(folder, "*.txt")
    prepare(plan, run)
    monkeypatch.setattr("trainctl.cli.data.find_attempt", lambda path: (run, None))
    monkeypatch.setattr("trainctl.runs.directory.last_attempt", lambda paths: 1)
    monkeypatch.setattr("trainctl.launchers.text_preparation.read_plan", lambda path: plan)
    command.show([str(run.root)], "0", characters=400)
    out = capsys.readouterr().out
    assert "\x1b" not in out and "\x07" not in out and "red" in out
    assert "a.txt" in out and "document 0, tokens" in out
    command.show([str(run.root)], "0-1", characters=5, as_json=True)
    answer = json.loads(capsys.readouterr().out)
    with pytest.raises(TrainctlError, match="which samples"):
        command.show([str(run.root)])
    corpora = load_run_corpora(plan, run)
    expected = read_samples(plan, corpora, ByteTokenizer(), [0, 1], most_characters=5)
    assert answer["samples"] == json.loads(json.dumps([asdict(sample) for sample in expected]))
