"""`training.epochs`: a plan counts passes over a corpus that somebody has read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trainctl.cli.main import run
from trainctl.config.compose import compose
from trainctl.data.prepare import prepare
from trainctl.errors import TrainctlError
from trainctl.rules.resolve import resolve
from trainctl.runs.layout import RunPaths

SAMPLES = 35
"""Number of 64-token samples in the three training files; the fourth file is held out."""


@pytest.fixture
def overrides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Overrides of a run of two epochs over files of 749 bytes, each with an end-of-document
    token.
    """
    monkeypatch.setenv("TRAINCTL_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    for number in range(4):
        (tmp_path / f"{number}.txt").write_text("wxyz"[number] * 749)
    assert SAMPLES == (3 * 750 - 1) // 64
    return [
        "recipe=tiny",
        "hardware=1xcpu",
        "data=files",
        "data.paths=['*.txt']",
        "training.sequence_length=64",
        "training.global_batch_size=8",
        "training.micro_batch_size=2",
        "training.epochs=2",
    ]


def planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, object]:
    assert run([*arguments, "--json"]) == 0
    document: dict[str, object] = json.loads(capsys.readouterr().out)
    return document


def test_launch_reads_the_corpus_and_others_plan_without_it(
    overrides: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    steps = -(-2 * SAMPLES // 8)
    assert planned(capsys, "schedule", "show", *overrides)["total_steps"] == 1000
    assert run(["validate", *overrides]) == 0
    said = capsys.readouterr().err
    assert "warning[TC067]" in said and "not been read here yet: 1000 stand for it" in said
    assert run(["estimate-memory", *overrides]) == 0  # which no length changes
    assert "TC067" not in capsys.readouterr().err
    assert run(["launch", *overrides, "--dry-run"]) == 0
    shown = capsys.readouterr()
    assert "reading the corpus, to know how long training.epochs is" in shown.err
    assert f"total_steps = {steps}: training.epochs 2 x {SAMPLES} samples" in shown.out
    assert planned(capsys, "schedule", "show", *overrides)["total_steps"] == steps
    assert run(["config", "why", "training.epoch_tokens", *overrides]) == 0
    assert "2250" in (said := capsys.readouterr().out) and "counted in the corpus" in said
    typed = [*overrides, "training.epoch_tokens=1025"]  # counted by somebody else: 16 samples
    assert planned(capsys, "schedule", "show", *typed)["total_steps"] == 4


def test_a_corpus_of_another_length_is_not_trained_on(overrides: list[str], tmp_path: Path) -> None:
    config = compose([*overrides, "training.epoch_tokens=1025"]).config
    from trainctl.hardware import resolve_hardware

    plan = resolve(config, resolve_hardware(config.hardware)).plan
    assert plan is not None
    paths = RunPaths(tmp_path / "run")
    paths.root.mkdir()
    with pytest.raises(TrainctlError, match="the corpus has 2250 tokens to train on"):
        prepare(plan, paths)
