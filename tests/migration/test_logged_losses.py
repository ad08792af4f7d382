"""Logs of other trainers, and the checkpoint from which logged steps can be made again."""

import json

import pytest

from trainctl.errors import TrainctlError
from trainctl.migration.logged_losses import find_logged_checkpoint, read_logged_losses

HISTORY = [
    {"step": 5, "loss": 2.5, "learning_rate": 0.001, "grad_norm": 1.25, "epoch": 0.1},
    {"step": 5, "eval_loss": 2.4},
    {"step": 10, "loss": 2.1234},
    {"step": 20, "loss": 2.0},
    {"step": 20, "train_runtime": 3.5, "train_loss": 2.2},
]


def write_state(folder, history=HISTORY):
    folder.mkdir(parents=True)
    state = {"global_step": history[-1]["step"], "log_history": history}
    (folder / "trainer_state.json").write_text(json.dumps(state))


def test_a_logged_loss_is_a_mean_since_the_last_one(tmp_path):
    write_state(tmp_path / "out")
    found = read_logged_losses(tmp_path / "out" / "trainer_state.json")
    assert [(each.first, each.last, each.loss) for each in found] == [
        (1, 5, 2.5),
        (6, 10, 2.1234),
        (11, 20, 2.0),
    ]
    assert (found[0].learning_rate, found[0].grad_norm) == (0.001, 1.25)
    assert found[1].learning_rate is None
    assert found[1].rounding == pytest.approx(5e-5)  # older versions print four digits


def test_a_csv_names_its_columns(tmp_path):
    log = tmp_path / "log.csv"
    log.write_text("loss, step,learning_rate\n3.5,2,\n3.25,1,1e-4\n3.125,2,1e-4\n")
    found = read_logged_losses(log)
    assert [(each.first, each.last, each.loss) for each in found] == [(1, 1, 3.25), (2, 2, 3.125)]
    log.write_text("first_step,step,loss\n11,20,3.5\n")
    assert [(each.first, each.last) for each in read_logged_losses(log)] == [(11, 20)]
    for text in ("step,loss\n", "step,loss\n1,many\n", "time\n1\n"):
        log.write_text(text)
        with pytest.raises(TrainctlError, match=r"log\.csv") as caught:
            read_logged_losses(log)
        assert caught.value.exit_code == 5


@pytest.mark.parametrize(("wanted", "step"), [(1, 10), (2, 5), (3, 5)])
def test_the_newest_checkpoint_with_losses_after_it_is_taken(tmp_path, wanted, step):
    """After 10 steps one loss was logged, after 5 two; no mean of 16 to 20 is there."""
    out = tmp_path / "out"
    for number in (5, 10, 15):
        (out / f"checkpoint-{number}").mkdir(parents=True)
    write_state(out / "checkpoint-20")
    found = find_logged_checkpoint(out, None, wanted)
    assert (found.step, found.path) == (step, out / f"checkpoint-{step}")
    assert [each.first for each in found.after(5)] == [6, 11]


def test_losses_before_the_only_checkpoint_prove_nothing(tmp_path):
    write_state(tmp_path / "out" / "checkpoint-20")
    for folder in (tmp_path / "out", tmp_path / "out" / "checkpoint-20"):
        with pytest.raises(TrainctlError, match="no loss of steps that all come after") as caught:
            find_logged_checkpoint(folder, None, 2)
        assert "--losses" in caught.value.hint
    later = tmp_path / "later.csv"
    later.write_text("step,loss\n20,2.0\n21,1.5\n")
    assert find_logged_checkpoint(tmp_path / "out", later, 2).step == 20


def test_a_folder_without_a_log_is_refused(tmp_path):
    (tmp_path / "global_step4").mkdir()
    with pytest.raises(TrainctlError, match=r"no trainer_state\.json"):
        find_logged_checkpoint(tmp_path, None, 1)
    with pytest.raises(TrainctlError, match="no directory"):
        find_logged_checkpoint(tmp_path / "none", None, 1)
