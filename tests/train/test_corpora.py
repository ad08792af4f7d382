"""The corpora of several sources: built, recorded, compared, and found too short in time."""

from __future__ import annotations

import json
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rank_processes import tiny_config, tiny_plan

from trainctl.cli.data_prepare import prepare as prepare_command
from trainctl.cli.main import run
from trainctl.config.codec import from_plain, to_plain
from trainctl.config.registry import new_section
from trainctl.config.schema import DataType, OnBadText, Packing, RunConfig
from trainctl.data.corpora import (
    build_corpora,
    changed_sources,
    corpus_digests,
    load_corpora,
    load_recorded_corpora,
    require_unchanged_corpora,
    save_corpora,
    unigram_entropy,
)
from trainctl.data.prepare import load_run_corpora, prepare
from trainctl.data.sample_contents import read_samples
from trainctl.data.source_lengths import preview_data_plan
from trainctl.data.tokenizer import ByteTokenizer
from trainctl.errors import ExitCode, TrainctlError
from trainctl.launchers.resume import compare_with_checkpoint
from trainctl.runs.checkpoints import CheckpointInfo
from trainctl.runs.files import write_json
from trainctl.runs.layout import RunPaths


@pytest.fixture(autouse=True)
def texts(tmp_path, monkeypatch):
    """Three sources of JSONL, and an empty cache."""
    monkeypatch.setenv("TRAINCTL_CACHE_DIR", str(tmp_path / "cache"))
    for name, documents in (("code", 90), ("prose", 60), ("notes", 60)):
        lines = (
            json.dumps({"text": f"{name} number {n} of many"}) + "\n" for n in range(documents)
        )
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
    return tmp_path


def mixed(folder, *names, stages=(), steps=4, **sources):
    """Build a configuration of sources with equal weights, changed by `sources`."""
    plain = to_plain(tiny_config(steps=steps, sequence_length=32, precision__compute=DataType.fp32))
    plain["data"]["sources"] = {
        name: {
            "paths": [str(folder / f"{name}.jsonl")],
            "weight": 1,
            "held_out_fraction": 0.2,
            **sources.get(name, {}),
        }
        for name in names
    }
    plain["data"]["stages"] = list(stages)
    return from_plain(RunConfig, plain)


def test_they_are_built_by_several_processes_and_recorded(texts, tmp_path):
    config = mixed(texts, "code", "prose")
    calls = []
    corpora = build_corpora(config, ByteTokenizer(), calls.append, workers=2)
    assert list(corpora) == ["code", "prose"]
    assert calls[-1].documents == 150
    file = tmp_path / "corpus.json"
    save_corpora(file, corpora)
    assert load_recorded_corpora(file) == load_corpora(file, config.data) == corpora
    with pytest.raises(TrainctlError, match="has not read the text of notes yet"):
        load_corpora(file, mixed(texts, "code", "notes").data)
    # Of one source the record is the corpus itself, as before there were several.
    one = {"data": corpora["code"]}
    save_corpora(file, one)
    assert "folder" in json.loads(file.read_text()) and load_recorded_corpora(file) == one
    assert corpus_digests(one) == {"corpus_digest": corpora["code"].digest}
    low, high = sorted(corpus.unigram_entropy for corpus in corpora.values())
    assert low < unigram_entropy(corpora) < high


def test_a_source_that_left_is_remembered_and_a_changed_one_refused(texts, tmp_path):
    file = tmp_path / "corpus.json"
    first = build_corpora(mixed(texts, "code", "prose"), ByteTokenizer())
    save_corpora(file, require_unchanged_corpora(first, file))
    without = build_corpora(mixed(texts, "code", "notes"), ByteTokenizer())
    save_corpora(file, require_unchanged_corpora(without, file))
    assert set(load_recorded_corpora(file)) == {"code", "prose", "notes"}
    manifest = corpus_digests(first)
    assert changed_sources(without, manifest) == []
    (texts / "prose.jsonl").write_text('{"text": "another"}\n' * 50)
    again = build_corpora(mixed(texts, "code", "prose"), ByteTokenizer())
    assert changed_sources(again, manifest) == ["prose"]
    with pytest.raises(
        TrainctlError, match=r"corpus of data\.sources\.prose is not the one"
    ) as told:
        require_unchanged_corpora(again, file)
    assert told.value.exit_code == ExitCode.run_state


def test_what_is_wrong_with_a_source_names_its_keys(texts):
    (texts / "prose.jsonl").write_text('{"body": "x"}\n')
    with pytest.raises(TrainctlError) as told:
        build_corpora(mixed(texts, "code", "prose"), ByteTokenizer())
    said = f"{told.value.message} {told.value.hint}"
    assert said.startswith("data.sources.prose: ") and "data.sources.prose.text_key" in said
    assert "prose.jsonl" in said


def test_a_source_that_is_short_ends_the_launch_before_its_ranks(texts, tmp_path):
    config = mixed(texts, "code", "prose", steps=400, prose={"max_epochs": 2})
    plan, run = tiny_plan(config, 1), RunPaths(tmp_path / "run")
    run.root.mkdir()
    assert (
        preview_data_plan(plan)[1] == []
    )  # nobody has tokenized them, and a guess refuses nothing
    with pytest.raises(TrainctlError, match=r"prose falls short by [\d,]+ tokens") as told:
        prepare(plan, run)
    assert told.value.exit_code == ExitCode.bad_input and "max_epochs=" in told.value.hint
    assert not run.corpus.is_file()
    _, (problem,) = preview_data_plan(plan)  # of the cache: the next launch is refused at once
    assert problem.key == "data.sources.prose.max_epochs" and problem.is_error


def run_of(folder, plan, samples, step):
    """Make a run with a checkpoint at `step`, after `samples` samples; return its paths and the
    folder.
    """
    run = RunPaths(folder)
    run.attempt(1).root.mkdir(parents=True)
    write_json(run.attempt(1).plan, to_plain(plan))
    prepare(plan, run)
    path = run.root / "checkpoints" / f"step-{step}"
    path.mkdir(parents=True)
    manifest = {"samples": samples, "step": step, "tokens": 32 * samples}
    (path / "manifest.json").write_text(json.dumps(manifest))
    return run, path


def test_the_past_of_a_run_is_kept_and_what_is_to_come_may_be_another(texts, tmp_path, monkeypatch):
    stages = [{"until_step": 2}, {"weights": {"code": 1}}]
    plan = tiny_plan(mixed(texts, "code", "prose", stages=stages), 1)
    run, path = run_of(tmp_path / "run", plan, 3 * 8, 3)
    found = json.loads((path / "manifest.json").read_text())
    monkeypatch.setattr("trainctl.launchers.resume.read_manifest", lambda _: found)
    checkpoint = CheckpointInfo(step=3, path=path, size_bytes=0, metrics={}, attempt=1)

    def resume(*names, stages=stages, **changes):
        config = mixed(texts, *names, stages=stages, **changes)
        compare_with_checkpoint(run, checkpoint, tiny_plan(config, 1), print)

    resume("code", "prose")
    later = [stages[0], stages[1] | {"until_step": 4}, {"sequence_length": 16}]
    resume("code", "prose", stages=later, steps=6)
    later[2] |= {"weights": {"notes": 1, "code": 1}}
    resume("code", "prose", "notes", stages=later, steps=6, notes={"weight": None})
    for names, others, message in (
        (("code", "prose"), [{"until_step": 3}, stages[1]], "1 stages would have begun"),
        (("code", "prose"), [stages[0] | {"sequence_length": 16}, stages[1]], "has samples of 16"),
        (("code", "prose"), [stages[0], {"weights": {"prose": 1}}], "has the weights"),
        (("code",), stages, "prose was drawn from"),
    ):
        with pytest.raises(TrainctlError, match="has drawn 24 samples") as told:
            resume(*names, stages=others)
        assert message in told.value.message
        assert told.value.exit_code == ExitCode.bad_input


def test_a_stage_begins_where_the_plan_says_or_the_resume_is_refused(texts, tmp_path, monkeypatch):
    stages = [{"until_step": 3}, {"weights": {"code": 1}}]
    config = mixed(texts, "code", "prose", stages=stages)
    run, path = run_of(tmp_path / "run", tiny_plan(config, 1), 2 * 8, 2)
    found = json.loads((path / "manifest.json").read_text())
    monkeypatch.setattr("trainctl.launchers.resume.read_manifest", lambda _: found)
    checkpoint = CheckpointInfo(step=2, path=path, size_bytes=0, metrics={}, attempt=1)

    def resume(**training):
        changed = replace(config, training=replace(config.training, **training))
        compare_with_checkpoint(run, checkpoint, tiny_plan(changed, 1), print)

    resume()
    for size in (16, 4):  # the second stage would never begin, and have begun already
        with pytest.raises(TrainctlError, match=r"512 tokens in 2 steps") as told:
            resume(global_batch_size=size)
        assert "training.batch_ramp" in told.value.hint
    resume(global_batch_size=16, batch_ramp=[{"until_steps": 2, "global_batch_size": 8}])
    found["samples"] += 8  # of a batch that was passed over
    resume()


def test_resuming_with_another_packing_is_refused(texts, tmp_path, monkeypatch):
    config = mixed(texts, "code", "prose")
    run, path = run_of(tmp_path / "run", tiny_plan(config, 1), 2 * 8, 2)
    found = json.loads((path / "manifest.json").read_text())
    monkeypatch.setattr("trainctl.launchers.resume.read_manifest", lambda _: found)
    checkpoint = CheckpointInfo(step=2, path=path, size_bytes=0, metrics={}, attempt=1)
    changed = replace(config, data=replace(config.data, packing=Packing.best_fit))
    with pytest.raises(TrainctlError, match=r"packing is best_fit, and it was stream"):
        compare_with_checkpoint(run, checkpoint, tiny_plan(changed, 1), print)


def test_samples_of_any_step_have_their_source_and_document(texts, tmp_path):
    stages = [{"until_step": 2}, {"weights": {"code": 1, "prose": 3}, "sequence_length": 16}]
    plan = tiny_plan(mixed(texts, "code", "prose", stages=stages), 1)
    run, _ = run_of(tmp_path / "run", plan, 0, 0)
    found = read_samples(
        plan, load_run_corpora(plan, run), ByteTokenizer(), list(range(40)), most_characters=0
    )
    assert {sample.source for sample in found} == {"code", "prose"}
    for sample in found:
        length = 32 if sample.counter < 16 else 16
        assert sum(part.end - part.start for part in sample.passages) == length
        assert sample.first_token == sample.index * length
        for part in sample.passages:
            assert part.file == str(texts / f"{sample.source}.jsonl")
            assert part.line is not None


def test_prepare_says_what_each_source_has(texts, tmp_path, monkeypatch, capsys):
    config = mixed(texts, "code", "prose")
    monkeypatch.setattr(
        "trainctl.cli.data_prepare.compose_target",
        lambda *_: type("Composed", (), {"config": config, "source_of": lambda *_: ""})(),
    )
    prepare_command([], as_json=True)
    answer = json.loads(capsys.readouterr().out)
    assert answer["documents_tokenized"] == 150 and set(answer["sources"]) == {"code", "prose"}
    prepare_command([], task="1/1", as_json=True)
    assert json.loads(capsys.readouterr().out)["left"] == 0


@pytest.mark.parametrize("fields", [{}, {"held_out_fraction": 0.0}, {"max_bytes": 100}], ids=str)
def test_a_text_without_a_token_is_an_error_that_counts_its_documents(texts, fields):
    (texts / "code.jsonl").write_text('{"text": ""}\n' * 5)
    config = tiny_config(sequence_length=4)
    words = {"paths": [str(texts / "code.jsonl")], **fields}
    for _ in range(2):  # from the cache as well
        config.data = new_section("data", "files", **words)
        with pytest.raises(TrainctlError, match="5 of 5 documents to train on are empty") as caught:
            build_corpora(config, ByteTokenizer())
        assert caught.value.exit_code == ExitCode.bad_input
    with pytest.raises(TrainctlError, match=r"data\.sources\.code: 5 of 5 documents"):
        build_corpora(mixed(texts, "code", "prose", code=fields), ByteTokenizer())
    (texts / "code.jsonl").write_text('{"text": ""}\n' * 5 + '{"text": "a"}\n{"text": "b"}\n')
    assert build_corpora(config, ByteTokenizer())


def test_a_table_without_rows_has_0_documents(texts, capsys):
    file = texts / "none.parquet"
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), file)
    words = ["recipe=tiny", "data=parquet", f"data.paths=[{file}]"]
    assert run(["data", "prepare", *words]) == ExitCode.bad_input
    assert "the files of data.paths have 0 documents" in capsys.readouterr().err
    (texts / "bad.jsonl").write_text('{"body": ""}\n' * 5)
    config = tiny_config(sequence_length=4)
    paths = [str(texts / "bad.jsonl")]
    config.data = new_section("data", "files", paths=paths, on_bad_text=OnBadText.skip)
    with pytest.raises(TrainctlError, match=r"have 0 documents: data\.on_bad_text=skip left out 5"):
        build_corpora(config, ByteTokenizer())
