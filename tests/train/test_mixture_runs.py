"""Ranks train on a mixture in stages: what was planned is drawn, and a resume changes nothing."""

from __future__ import annotations

import shutil

import pytest
from rank_processes import Case, curve, tiny_config, tiny_plan, train_cases, with_stop

from trainctl.config.codec import from_plain, to_plain
from trainctl.config.schema import RunConfig
from trainctl.data.corpora import load_recorded_corpora
from trainctl.data.mixture import SourceLength, plan_data
from trainctl.runs.layout import RunPaths
from trainctl.runs.records import read_events, step_curve

STEPS, CHANGE, SAVED, STOP = 8, 5, 6, 7
"""The second stage begins within the run, and the resume is within it."""

WORDS = ("river", "stone", "letter", "window", "garden", "morning", "paper", "winter")


def texts(folder):
    """Write two sources: the run sees the small one twice and only a part of the large one."""
    folder.mkdir()
    small, large = folder / "small.txt", folder / "large.txt"
    small.write_text(" ".join(WORDS[i * i % 7] for i in range(305)))
    large.write_text("\n".join(f"{WORDS[i % 8]} {i} {WORDS[i // 8 % 8]}" for i in range(2500)))
    return small, large


def mixed(folder, stage=1, **changes):
    small, large = (folder / f"{name}.txt" for name in ("small", "large"))
    config = tiny_config(
        steps=STEPS,
        sequence_length=128,
        micro_batch_size=2,
        global_batch_size=8,
        gradient_accumulation_steps=None,
        evaluate_every_steps=4,
        schedule__warmup_steps=2,
        zero_stage__stage=stage,
        precision__compute="fp32",
        checkpoint__every_steps=SAVED,
        checkpoint__at_end=False,
        **changes,
    )
    plain = to_plain(config)
    plain["data"]["sources"] = {
        "large": {"paths": [str(large)], "weight": 3, "held_out_fraction": 0.1},
        "small": {"paths": [str(small)], "weight": 1, "held_out_fraction": 0.1},
    }
    plain["data"]["stages"] = [
        {"until_step": CHANGE},
        {"weights": {"large": 0.2, "small": 0.8}, "sequence_length": 32},
    ]
    return from_plain(RunConfig, plain)


def steps_of(run):
    return step_curve(read_events(run.events))


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_mixture_in_stages_is_trained_as_planned_and_goes_on_elsewhere(tmp_path, monkeypatch):
    monkeypatch.setenv("TRAINCTL_CACHE_DIR", str(tmp_path / "cache"))
    folder = tmp_path / "texts"
    texts(folder)
    plan = tiny_plan(mixed(folder), 2)
    whole, stopped = RunPaths(tmp_path / "whole"), RunPaths(tmp_path / "stopped")
    train_cases(2, [Case(plan, whole), Case(with_stop(plan, STOP), stopped)], together=True)

    tokens = {
        name: corpus.train.tokens for name, corpus in load_recorded_corpora(whole.corpus).items()
    }
    planned = plan_data(plan, {name: SourceLength(tokens=count) for name, count in tokens.items()})
    assert not planned.problems and 2 <= planned.run["small"].epochs < 3
    steps = steps_of(whole)
    for stage in planned.stages:
        mine = [steps[number + 1] for number in range(stage.first_step, stage.end_step)]
        for name, use in stage.sources.items():
            assert sum(step["sources"][name] for step in mine) == use.samples
        assert {step["samples"][1] - step["samples"][0] for step in mine} == {
            stage.global_batch_size
        }
    assert [step["tokens"] for step in steps.values()] == [1024 * n for n in range(1, STEPS + 1)]
    first, last = read_events(whole.events, "evaluation")
    assert set(first["sources"]) == set(last["sources"]) == {"large", "small"}
    assert min(last["sources"].values()) <= last["loss"] <= max(last["sources"].values())

    # Interrupted beyond a checkpoint in the second stage: on the same layout bit for bit, on others
    # within rounding.
    layouts = {
        "same": plan,
        "ZeRO 3": tiny_plan(mixed(folder, 3), 1),
        "pipeline": tiny_plan(mixed(folder, 1, parallelism__pipeline=2), 2),
    }
    resumed = {
        name: Case(other, RunPaths(tmp_path / name), attempt=2) for name, other in layouts.items()
    }
    for case in resumed.values():
        shutil.copytree(stopped.root, case.run.root)
    train_cases(1, [resumed["ZeRO 3"]])
    train_cases(2, [resumed["same"], resumed["pipeline"]], together=True)
    for name, case in resumed.items():
        run = case.run
        for field in ("samples", "tokens", "sources"):
            assert [step[field] for step in steps_of(run).values()] == [
                step[field] for step in steps.values()
            ]
        assert sum(event["event"] == "replay" for event in read_events(run.events)) == 1
        if name == "same":
            assert curve(run) == curve(whole)
        for step, (loss, _) in curve(whole).items():
            assert curve(run)[step][0] == pytest.approx(loss, rel=1e-5), (name, step)
