"""A run with a stable phase, finished, and made longer by the commands that its messages name."""

import re
import shlex

import pytest
from commands import TINY, curve, events, trainctl

from trainctl.errors import ExitCode
from trainctl.runs.checkpoints import list_checkpoints
from trainctl.runs.layout import RunPaths

WSD = (
    *TINY,
    "hardware.devices_per_node=1",  # on others: tests/train/test_settings_on_layouts.py
    "schedule=wsd",
    "schedule.warmup_steps=1",
    "schedule.decay_steps=2",
)


@pytest.mark.slow
@pytest.mark.usefixtures("preloaded")
def test_a_finished_run_is_made_longer_as_its_refusal_says(tmp_path):
    run = tmp_path / "run"
    options = ("checkpoint.keep=1", "training.stop_patience=3", "training.evaluate_every_steps=2")
    trainctl("launch", *WSD, *options, "training.steps=6", "--run-dir", "run", cwd=tmp_path)
    assert [info.step for info in list_checkpoints(RunPaths(run))] == [4, 6]
    longer = ("training.steps=9",)
    said = trainctl("resume", "run", *longer, cwd=tmp_path, code=ExitCode.run_state)
    (command,) = re.findall(r"hint: trainctl (resume .*--step 4) with the same", said)
    said = trainctl(*shlex.split(command), *longer, cwd=tmp_path)
    assert "left behind" in said and "before-attempt-2" in said
    trainctl("launch", *WSD, *options, *longer, "--run-dir", "other", cwd=tmp_path)
    assert len(curve(run)) == 9 and curve(run) == curve(tmp_path / "other")
    replayed = [event["step"] for event in events(run, "replay")]
    assert replayed == [5]  # step 6 had another learning rate before it
    assert "nothing to do" in trainctl("resume", "run", cwd=tmp_path)
