"""A run of an earlier version is read, resumed and sent on.

It has two attempts, and the second begins at a checkpoint before the end of the first. The run in
`former_run/` was made on two CPU processes by the last version that packed steps into
`events.jsonl`; paths and names of its machine were replaced. `LATER` are the losses that this
version had after step 8.
"""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path

import pytest
from commands import trainctl

from trainctl.runs.records import read_events, step_curve

pytestmark = pytest.mark.usefixtures("own_options")

FORMER = Path(__file__).with_name("former_run")
LOSSES = {
    4: 5.409223914146423,
    5: 5.334120750427246,
    6: 5.263716816902161,
    7: 5.1562659740448,
    8: 5.132728934288025,
}
LATER = {
    9: 5.088968992233276,
    10: 5.063663721084595,
    11: 5.033814549446106,
    12: 5.038164496421814,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(shutil.copytree(FORMER, tmp_path_factory.mktemp("former") / "work"))


def reported_losses(folder: Path) -> dict[int, float]:
    table = trainctl("report", "run", "--csv", "--buckets", "0", cwd=folder)
    return {
        int(row["first_step"]): float(row["loss_mean"])
        for row in csv.DictReader(table.splitlines())
    }


def sent_to_table(folder: Path) -> dict[int, float]:
    trainctl("runs", "sync", "run", "--to", "table", cwd=folder)
    with (folder / "run" / "table" / "train.csv").open(newline="") as stream:
        return {int(row["step"]): float(row["train/loss"]) for row in csv.DictReader(stream)}


def test_a_run_of_an_earlier_version_is_reported(folder: Path) -> None:
    status = json.loads(trainctl("runs", "status", "run", "--json", cwd=folder))
    assert (status["state"], status["step"], status["attempt"]) == ("finished", 8, 2)
    assert status["loss"] == LOSSES[8] and not status["missing_records"]
    steps = step_curve(read_events(folder / "run" / "events.jsonl"))
    assert list(steps) == list(range(1, 9)) and [steps[s]["attempt"] for s in (4, 5)] == [1, 2]
    assert {step: steps[step]["loss"] for step in LOSSES} == LOSSES
    assert steps[5]["learning_rates"] == dict.fromkeys(
        ("decayed", "undecayed"), steps[5]["learning_rate"]
    )
    assert steps[8]["samples"] == [28, 32] and steps[8]["seconds"]["forward"] == 0.005973
    assert {step: loss for step, loss in sent_to_table(folder).items() if step > 3} == LOSSES
    assert "step 8/8 loss 5.1327" in trainctl("runs", "logs", "run", cwd=folder)
    assert reported_losses(folder) == {step: event["loss"] for step, event in steps.items()}


@pytest.mark.usefixtures("preloaded")
def test_a_run_of_an_earlier_version_is_resumed(folder: Path) -> None:
    variables = {"TRAINCTL_CACHE_DIR": str(folder / "cache")}
    trainctl("resume", "run", "training.stop_after_steps=null", cwd=folder, **variables)
    events = folder / "run" / "events.jsonl"
    steps = step_curve(read_events(events))
    wanted = {**LOSSES, **LATER}
    assert list(steps) == list(range(1, 13))
    for step, loss in wanted.items():
        assert steps[step]["loss"] == pytest.approx(loss, rel=1e-5)
    assert {steps[step]["attempt"] for step in LATER} == {3}
    packed = [json.loads(line) for line in events.read_text().splitlines()]
    assert {each["attempt"] for each in packed if "row" in each} == {1, 2}, "as they were"
    with (folder / "run" / "steps" / "attempt-3.csv").open(newline="") as stream:
        assert [int(row["step"]) for row in csv.DictReader(stream)] == list(LATER)
    assert sent_to_table(folder) == {step: event["loss"] for step, event in steps.items()}
    cursor = json.loads((folder / "run" / "loggers" / "tensorboard.json").read_text())
    assert cursor["step"] == 12 and cursor["points"] == 13 + 4 + 1 and not cursor["problem"]
    assert reported_losses(folder) == {step: event["loss"] for step, event in steps.items()}
