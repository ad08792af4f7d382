"""Losses that a real Trainer logged are reproduced from its checkpoint, or the cause is named."""

import json
from pathlib import Path

import pytest
from commands import TINY, trainctl
from foreign_tools import Leg, Training, train
from rank_processes import Case, tiny_plan

import trainctl as library
from trainctl.launchers.migration_proof import MigrationVerdict
from trainctl.launchers.planning import compose_config
from trainctl.runs.layout import RunPaths

pytestmark = pytest.mark.slow

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
    folder = tmp_path_factory.mktemp("trainer")
    case = Case(tiny_plan(compose_config(SETTINGS, None).config, 1), RunPaths(folder / "samples"))
    out = folder / "out"
    legs = (Leg(3, save=out), Leg(6, load=out / "checkpoint-3", save=out))
    train(1, [Training(case, "trainer", legs)])
    return out


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
