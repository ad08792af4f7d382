"""The process behind `evaluate`, `sample` and `export`: its answers when something is missing."""

import json
import shutil
from dataclasses import asdict, replace

import pytest
import torch
from fabricated import fabricate
from rank_processes import SECONDS, server, tiny_config, tiny_plan

from trainctl.data.cache_files import CACHE_VARIABLE
from trainctl.data.corpus import Corpus
from trainctl.data.prepare import prepare
from trainctl.errors import ExitCode
from trainctl.runs.directory import new_attempt
from trainctl.runs.files import write_json
from trainctl.runs.layout import RunPaths


def offline(task, **arguments):
    """Exit code and last answer, of a process that is forked with everything imported."""
    words = [task, json.dumps(arguments, default=str)]
    ((code, answer),) = server().run("offline_probe:answer", words, 1, SECONDS)
    return code, json.loads(answer)


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Paths of a run with one attempt and a corpus, but no checkpoint."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    run = RunPaths(tmp_path / "run")
    plan = tiny_plan(tiny_config(steps=1), 1)
    run.root.mkdir()
    new_attempt(run, plan)
    prepare(plan, run)
    return run


def test_a_checkpoint_that_goes_meanwhile_is_an_answer(run):
    """Rotation may take it between the choice and the reading."""
    missing = run.checkpoints / "step-00000001"
    drawn = {"prompt": "x", "tokens": 1, "temperature": 1.0}
    code, answer = offline("sample", run=run.root, checkpoint=missing, **drawn)
    assert code == ExitCode.run_state == answer["error"]["exit_code"]
    assert answer["error"]["message"] == "step-00000001 was removed while it was read"


def test_a_corpus_that_the_cache_lost_is_made_again_if_it_is_the_same(run, tmp_path):
    checkpoint = fabricate(run, tiny_config().model)
    shutil.rmtree(tmp_path / "cache")
    code, answer = offline("evaluate", run=run.root, checkpoint=checkpoint, samples=2)
    assert code == 0 and answer["result"]["samples"] == 2
    assert answer["result"]["loss"] == pytest.approx(5.56, abs=0.3)  # ln 260: it knows nothing
    shutil.rmtree(tmp_path / "cache")
    write_json(run.corpus, asdict(replace(Corpus.load(run.corpus), digest="another")))
    code, answer = offline("evaluate", run=run.root, checkpoint=checkpoint, samples=2)
    assert code == ExitCode.run_state and "text of this run" in answer["error"]["message"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a cuda device")
def test_a_device_that_is_not_here_is_refused(run):
    checkpoint = fabricate(run, tiny_config().model)
    for task, given in (
        ("evaluate", {}),
        ("tasks", {"names": ["arc_easy"]}),
    ):  # of tasks, before the export
        where = {"run": run.root, "checkpoint": checkpoint, "device": "cuda"}
        code, answer = offline(task, **where, **given)
        assert code == ExitCode.environment and "no cuda device" in answer["error"]["message"]


def test_what_a_directory_lacks_is_reported(tmp_path):
    """The message names the missing file, not only the number of findings."""
    where = {"directory": tmp_path / "none", "out": tmp_path / "out"}
    code, answer = offline("add-tokens", **where, tokens=["<a>"], multiple_of=1)
    assert code == ExitCode.bad_input and str(tmp_path / "none") in answer["error"]["message"]
    assert "config.json" in answer["error"]["hint"] and not (tmp_path / "out").exists()
