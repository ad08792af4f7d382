"""`trainctl.records.log`: what programs of the user's record."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from trainctl import records
from trainctl.cli.record_lines import record_lines
from trainctl.config.schema import LoggingConfig, RunConfig
from trainctl.launchers.processes import send_rest
from trainctl.runs.directory import create_run
from trainctl.runs.layout import RunPaths
from trainctl.runs.records import read_events


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunPaths:
    made = create_run(RunConfig(logging=LoggingConfig(to=[])), run_dir=tmp_path / "run")
    monkeypatch.setenv("TRAINCTL_RUN_DIR", str(made.root))
    monkeypatch.setenv("TRAINCTL_ATTEMPT", "2")
    monkeypatch.delenv("RANK", raising=False)
    return made


@pytest.mark.usefixtures("own_options")
def test_a_step_is_a_record_as_the_trainer_writes_it(run: RunPaths) -> None:
    assert records.log(step=1, loss=torch.tensor(2.5), learning_rate=1e-3, accuracy=np.float32(0.5))
    assert records.log(step=2, loss=float("nan"), seconds={"data": 0.25})
    assert records.log(step=2, kind="evaluation", f1=0.75)
    first, second, evaluation = read_events(run.events)
    assert (first["event"], first["attempt"], first["loss"]) == ("step", 2, 2.5)
    assert first["values"] == {"accuracy": 0.5} and second["loss"] == "NaN"
    assert evaluation["event"] == "evaluation" and evaluation["values"] == {"f1": 0.75}
    assert [line for each in (first, evaluation) for line in record_lines(each, stop_step=9)] == [
        "step 1/9 loss 2.5000 lr 1.0e-03 accuracy 0.5",
        "evaluation at step 2: f1 0.75",
    ]
    assert send_rest(run, "table", RunConfig()) == 0
    with (run.root / "table" / "train.csv").open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert [row["train/accuracy"] for row in rows] == ["0.5", ""]
    assert rows[1]["seconds/data"] == "0.25"


def test_other_ranks_and_programs_outside_a_run_record_nothing(
    run: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    assert not records.log(step=1, loss=1.0)
    assert records.log(step=1, rank=1, loss=1.0)
    monkeypatch.delenv("TRAINCTL_RUN_DIR")
    assert not records.log(step=2, rank=1, loss=1.0)
    assert [event["step"] for event in read_events(run.events)] == [1]
    with pytest.raises(TypeError):
        monkeypatch.setenv("TRAINCTL_RUN_DIR", str(run.root))
        records.log(step=3, rank=1, done=True)


def test_what_no_reader_would_take_is_refused(run: RunPaths) -> None:
    for value in ("abc", torch.zeros(2), np.zeros(3), {"a": 1.0}):
        with pytest.raises(TypeError):
            records.log(step=1, loss=value)
    with pytest.raises(ValueError, match="step, evaluation"):
        records.log(step=1, kind="train", loss=1.0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no step -1"):
        records.log(step=-1, loss=1.0)
    assert not run.events.exists()
    assert records.log(step=0, seconds=0.5, count=10**400)
    (first,) = read_events(run.events)
    assert first["seconds"] == {"total": 0.5}
    assert record_lines(first, stop_step=9) == ["step 0/9 count inf"]
    assert send_rest(run, "tensorboard", RunConfig()) == 0


def test_a_run_that_cannot_be_written_ends_no_program(
    run: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAINCTL_RUN_DIR", str(run.root / "gone"))
    with pytest.warns(UserWarning, match="No such file"):
        assert not records.log(step=1, loss=1.0)


def test_processes_that_record_at_once_do_not_mix_and_need_no_torch(run: RunPaths) -> None:
    code = "import sys\nfrom trainctl.records import log\n"
    code += "for step in range(1, 201): log(step=step, **{sys.argv[1]: step})\n"
    code += "assert not {'torch', 'deepspeed', 'hydra', 'yaml'} & set(sys.modules)"
    both = [subprocess.Popen([sys.executable, "-c", code, name]) for name in ("a", "b")]
    assert [process.wait() for process in both] == [0, 0]
    found = [next(iter(event["values"].items())) for event in read_events(run.events)]
    assert sorted(found) == sorted((name, step) for name in "ab" for step in range(1, 201))
