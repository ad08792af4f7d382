"""Losses that a real Trainer logged are reproduced from its checkpoint, or the cause is named."""

import json
from pathlib import Path

import pytest
from commands import TINY, trainctl
from rank_processes import Case, tiny_config, tiny_plan

import trainctl as library
from trainctl.launchers.migration_proof import MigrationVerdict, judge
from trainctl.launchers.planning import compose_config
from trainctl.migration.logged_losses import LoggedCheckpoint, LoggedLoss
from trainctl.runs.layout import RunPaths

SETTINGS = (
    *TINY,
    "hardware.devices_per_node=1",
    "schedule=constant",
    "schedule.warmup_steps=0",
    "optimizer.lr=1e-3",
    "optimizer.weight_decay=0",
    "training.steps=8",
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return the folder of a Trainer that saved after 3 and after 6 steps and logged each."""
    from foreign_tools import Leg, Training, train  # imports DeepSpeed

    folder = tmp_path_factory.mktemp("trainer")
    case = Case(tiny_plan(compose_config(SETTINGS, None).config, 1), RunPaths(folder / "samples"))
    out = folder / "out"
    legs = (Leg(3, save=out), Leg(6, load=out / "checkpoint-3", save=out))
    train(1, [Training(case, "trainer", legs)])
    return out


@pytest.mark.slow
def test_logged_losses_are_reproduced(trained, preloaded):
    said = []
    proof = library.prove_migration(trained, *SETTINGS, steps=3, say=said.append)
    assert proof.verdict in (MigrationVerdict.equal, MigrationVerdict.rounding), proof
    assert (proof.format, proof.checkpoint, proof.exit_code) == ("trainer", 3, 0)
    assert [(each.first, each.last) for each in proof.steps] == [(4, 4), (5, 5), (6, 6)]
    assert max(each.difference for each in proof.steps) < 1e-5
    for each in proof.steps:
        there, here = each.grad_norms
        assert here == pytest.approx(there, rel=1e-4)
        assert each.learning_rates == (1e-3, 1e-3)
    assert said == ["replaying 3 steps after step 3"]
    assert {path.name for path in trained.iterdir()} == {"checkpoint-3", "checkpoint-6"}


@pytest.mark.slow
def test_a_wrong_hyperparameter_is_found(trained, preloaded, tmp_path):
    """The first loss after the checkpoint has no update of the wrong kind yet."""
    command = ("prove", "--json", "--from", str(trained), *SETTINGS, "optimizer.beta1=0.5")
    said = trainctl(*command, cwd=tmp_path, code=6)
    proof = json.loads(said[said.index("{") : said.rindex("}") + 1])
    assert proof["verdict"] == "differs"
    assert [each["verdict"] == "differs" for each in proof["steps"]] == [False, True]
    assert any("optimizer.beta1=0.5" in note and "0.9" in note for note in proof["notes"])
    assert "the losses up to step 4 agree" in proof["reasons"][0]
    assert not list(Path(tmp_path).iterdir())


def judged(losses, tmp_path, *, logged=(2.0, 1.9), rate=1e-3, shuffle=False, **window):
    """Judge losses of steps 5 and 6, or of other windows, against logged ones."""
    config = tiny_config(steps=9, optimizer__lr=1e-3, data__shuffle=shuffle)
    config.schedule.warmup_steps = 5
    windows = window or {"five": (5, 5), "six": (6, 6)}
    wanted = [
        LoggedLoss(first=first, last=last, loss=loss, rounding=0.0, learning_rate=rate)
        for (first, last), loss in zip(windows.values(), logged, strict=False)
    ]
    found = LoggedCheckpoint(path=tmp_path, step=4, log=tmp_path / "log.csv", losses=wanted)
    records = {5 + index: {"loss": loss, "grad_norm": 1.0} for index, loss in enumerate(losses)}
    imported = {"format": "trainer", "step": 4, "notes": []}
    return judge(found, wanted, records, tiny_plan(config, 1), imported)


def test_losses_are_judged_by_rounding(tmp_path):
    assert judged([2.0, 1.9], tmp_path).verdict is MigrationVerdict.equal
    assert judged([2.0, 1.9 + 1e-5], tmp_path).verdict is MigrationVerdict.rounding
    proof = judged([2.0, 1.91], tmp_path)
    assert (proof.verdict, proof.exit_code) == (MigrationVerdict.differs, 6)
    assert "the losses up to step 5 agree" in proof.reasons[0]
    assert "before any update" in judged([2.1, 1.9], tmp_path).reasons[0]
    proof = judged([float("nan"), 1.9], tmp_path)
    assert (proof.verdict, proof.to_dict()["steps"][0]["replayed"]) == ("differs", None)


def test_a_logged_mean_is_compared_with_the_mean_of_its_steps(tmp_path):
    proof = judged([2.1, 1.9], tmp_path, both=(5, 6))
    assert (proof.verdict, proof.steps[0].replayed) == (MigrationVerdict.equal, 2.0)
    assert "means over several steps" in proof.reasons[0]


def test_other_samples_cannot_be_compared(tmp_path):
    proof = judged([2.2, 1.7], tmp_path, shuffle=True)
    assert (proof.verdict, proof.exit_code) == (MigrationVerdict.incomparable, 6)
    assert "data.shuffle=true" in proof.reasons[0]
    assert "1.9500 here and 1.9500 there" in proof.reasons[1]
    # Equal first losses show that the samples are the same.
    assert judged([2.0, 1.7], tmp_path, shuffle=True).verdict is MigrationVerdict.differs
    (tmp_path / "config.json").write_text('{"attention_dropout": 0.1, "n_layer": 2}')
    assert "attention_dropout=0.1" in judged([2.2, 1.7], tmp_path).reasons[0]


def test_another_learning_rate_is_named_even_if_losses_agree(tmp_path):
    proof = judged([2.0, 1.9], tmp_path, rate=2e-3)
    assert proof.verdict is MigrationVerdict.differs
    assert "the learning rate of step 5" in proof.reasons[0]
