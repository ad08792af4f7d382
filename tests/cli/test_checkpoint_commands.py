"""`checkpoint ls|verify|rm|now` and the choice of a checkpoint, on small folders: no training."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import small_checkpoints

from trainctl.cli.console import Meter, print_warning
from trainctl.cli.main import run
from trainctl.config.schema import RunConfig
from trainctl.errors import ExitCode, TrainctlError
from trainctl.runs import checkpoints
from trainctl.runs.checkpoint_selection import choose_checkpoint
from trainctl.runs.directory import create_run
from trainctl.runs.layout import RunPaths
from trainctl.runs.records import EventWriter
from trainctl.runs.status import Request, pending_requests, withdraw_request

FILE_BYTES = 8 + 992 + 4 * 1500


def save(paths: RunPaths, step: int, loss: float | None = None, **facts: Any) -> Path:
    metrics = {} if loss is None else {"loss": loss}
    return small_checkpoints.save(
        paths, step, files=2, numel=1500, width=992, metrics=metrics, **facts
    )


def flip_a_byte(checkpoint: Path) -> None:
    file = checkpoint / "rank-00001.safetensors"
    content = bytearray(file.read_bytes())
    content[5] ^= 1
    file.write_bytes(content)


@pytest.fixture
def paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunPaths:
    """Paths of a run with checkpoints of steps 10, 20 and 30; step 20 is the best."""
    monkeypatch.chdir(tmp_path)
    paths = create_run(RunConfig(), run_dir=tmp_path / "runs" / "r")
    for step, loss in ((10, 3.0), (20, 1.5), (30, 2.0)):
        save(paths, step, loss)
    return paths


def read_json(capsys: pytest.CaptureFixture[str]) -> Any:
    return json.loads(capsys.readouterr().out)


def steps(paths: RunPaths) -> list[int]:
    return [info.step for info in checkpoints.list_checkpoints(paths)]


def test_ls_shows_sizes_metrics_marks_and_damage(
    paths: RunPaths, capsys: pytest.CaptureFixture[str]
) -> None:
    (checkpoints.temporary_path(paths, 40)).mkdir()  # being written: not there yet
    (paths.checkpoints / "step-00000010" / "rank-00000.safetensors").write_bytes(b"cut")
    assert run(["checkpoint", "ls"]) == 0  # the newest run
    captured = capsys.readouterr()
    head, *lines = (line.rstrip() for line in captured.out.splitlines())
    assert head.split() == ["step", "saved", "size", "metrics"]
    assert [line.split()[0] for line in lines] == ["10", "20", "30"]
    assert lines[0].endswith("damaged") and "has 3 bytes, not 7000" in captured.err
    assert "13.7 KiB" in lines[1] and "loss 1.5000" in lines[1] and lines[1].endswith("best")
    assert lines[2].endswith("newest")
    assert run(["checkpoint", "ls", str(paths.root), "--json"]) == 0
    rows = read_json(capsys)["checkpoints"]
    assert [(row["step"], row["bytes"], row["newest"], row["best"]) for row in rows] == [
        (10, None, False, False),
        (20, 2 * FILE_BYTES, False, True),
        (30, 2 * FILE_BYTES, True, False),
    ]
    assert "has 3 bytes" in rows[0]["problem"] and rows[1]["problem"] == ""


def test_ls_of_a_run_without_any(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    create_run(RunConfig(), run_dir=tmp_path / "r")
    assert run(["checkpoint", "ls", str(tmp_path / "r")]) == 0
    captured = capsys.readouterr()
    assert captured.out == "" and "no checkpoint yet" in captured.err
    assert run(["checkpoint", "verify", str(tmp_path / "r")]) == ExitCode.run_state
    assert run(["checkpoint", "ls", str(tmp_path)]) == ExitCode.run_state  # not a run


def test_verify_names_the_damaged_file(paths: RunPaths, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["checkpoint", "verify", str(paths.root)]) == 0
    assert capsys.readouterr().out.count("intact") == 3
    flip_a_byte(paths.checkpoints / "step-00000020")
    assert run(["checkpoint", "verify", str(paths.root)]) == ExitCode.run_state
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "step-00000010: intact" and lines[2] == "step-00000030: intact"
    assert "step-00000020" in lines[1] and "rank-00001.safetensors is damaged" in lines[1]
    assert run(["checkpoint", "verify", str(paths.root), "--step", "30"]) == 0
    capsys.readouterr()
    assert run(["checkpoint", "verify", str(paths.root), "--json"]) == ExitCode.run_state
    rows = read_json(capsys)["checkpoints"]
    assert [len(row["problems"]) for row in rows] == [0, 1, 0]
    assert run(["checkpoint", "verify", str(paths.root), "--step", "11"]) == ExitCode.run_state
    assert "steps with a checkpoint: 10, 20, 30" in capsys.readouterr().err


def test_rm_removes_and_moves_the_pointer(
    paths: RunPaths, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["checkpoint", "rm", str(paths.root), "10", "30"]) == 0
    assert steps(paths) == [20]
    assert (paths.checkpoints / "latest").read_text() == "step-00000020\n"
    assert sorted(path.name for path in paths.checkpoints.iterdir()) == ["latest", "step-00000020"]
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_rm_refuses_the_last_intact_one(
    paths: RunPaths, capsys: pytest.CaptureFixture[str]
) -> None:
    """A damaged checkpoint with complete files does not count as intact."""
    flip_a_byte(paths.checkpoints / "step-00000030")
    remove = ["checkpoint", "rm", str(paths.root), "10", "20"]
    assert run(remove) == ExitCode.run_state
    assert "step-00000020 is the last intact checkpoint" in capsys.readouterr().err
    assert steps(paths) == [10, 20, 30]
    assert run(["checkpoint", "rm", str(paths.root), "30", "--json"]) == 0  # damaged: may go
    assert len(read_json(capsys)["removed"]) == 1
    assert run([*remove, "--force"]) == 0
    assert steps(paths) == [] and list(paths.checkpoints.iterdir()) == []


def test_rm_keeps_out_of_a_training_run(
    paths: RunPaths, capsys: pytest.CaptureFixture[str]
) -> None:
    with holding(paths):
        assert run(["checkpoint", "rm", str(paths.root), "10"]) == ExitCode.run_state
    assert "in use" in capsys.readouterr().err
    assert steps(paths) == [10, 20, 30]


class holding:
    """The run's lock, held by another process as a launch does, ready when entered."""

    def __init__(self, paths: RunPaths) -> None:
        script = (
            "import sys, time\nfrom pathlib import Path\n"
            "from trainctl.runs.layout import RunPaths\nfrom trainctl.runs.lock import hold_lock\n"
            "with hold_lock(RunPaths(Path(sys.argv[1]))):\n"
            "    print('held', flush=True)\n    sys.stdin.read()\n"
        )
        self._process = subprocess.Popen(
            [sys.executable, "-c", script, str(paths.root)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def __enter__(self) -> None:
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == b"held\n"

    def __exit__(self, *_: object) -> None:
        self._process.communicate()

    def release(self) -> None:
        """End the launch."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdin = None


def test_now_needs_a_run_that_trains(paths: RunPaths, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["checkpoint", "now", str(paths.root)]) == ExitCode.run_state
    assert "is not training" in capsys.readouterr().err
    assert pending_requests(paths) == set()


def test_now_waits_for_the_save_that_follows(
    paths: RunPaths, capsys: pytest.CaptureFixture[str]
) -> None:
    """A save already under way at the request holds an older state and does not answer it."""

    def train() -> None:
        while Request.checkpoint not in pending_requests(paths):
            time.sleep(0.01)
        withdraw_request(paths, Request.checkpoint)
        events.write("checkpoint", step=40, path="checkpoints/step-00000040")
        time.sleep(0.3)
        events.write("checkpoint", step=43, path="checkpoints/step-00000043")

    with EventWriter(paths.events, 1) as events, holding(paths):
        events.write("step", step=42)
        trainer = threading.Thread(target=train)
        trainer.start()
        assert run(["checkpoint", "now", str(paths.root), "--json"]) == 0
        trainer.join()
    assert read_json(capsys)["step"] == 43


def test_now_says_when_the_run_ends_first(
    paths: RunPaths, capsys: pytest.CaptureFixture[str]
) -> None:
    launch = holding(paths)
    with launch:
        ending = threading.Timer(0.5, launch.release)
        ending.start()
        assert run(["checkpoint", "now", str(paths.root)]) == ExitCode.run_state
        ending.join()
    assert "ended before it saved" in capsys.readouterr().err
    assert pending_requests(paths) == set()


def choose(paths: RunPaths, step: int | None = None, best: bool = False) -> str:
    return choose_checkpoint(paths, Meter(), print_warning, step=step, best=best).name


def test_the_choice_is_the_newest_the_best_or_the_named_one(paths: RunPaths) -> None:
    assert choose(paths) == "step-00000030"
    assert choose(paths, best=True) == "step-00000020"
    assert choose(paths, step=10) == "step-00000010"
    with pytest.raises(TrainctlError, match="no checkpoint of step 11"):
        choose(paths, step=11)
    with pytest.raises(TrainctlError, match="two checkpoints"):
        choose(paths, step=10, best=True)


def test_damaged_ones_are_passed_over_unless_named(
    paths: RunPaths, capsys: pytest.CaptureFixture[str]
) -> None:
    flip_a_byte(paths.checkpoints / "step-00000030")
    flip_a_byte(paths.checkpoints / "step-00000020")
    assert choose(paths) == choose(paths, best=True) == "step-00000010"
    error = capsys.readouterr().err
    assert error.count("passed over: step-00000030: rank-00001.safetensors is damaged") == 2
    with pytest.raises(TrainctlError, match="step-00000030: rank-00001") as caught:
        choose(paths, step=30)
    assert caught.value.exit_code == ExitCode.run_state
    flip_a_byte(paths.checkpoints / "step-00000010")
    with pytest.raises(TrainctlError, match="no intact checkpoint"):
        choose(paths)


def test_without_an_evaluation_there_is_no_best(tmp_path: Path) -> None:
    paths = create_run(RunConfig(), run_dir=tmp_path / "r")
    save(paths, 10)
    with pytest.raises(TrainctlError, match="none is the best by loss"):
        choose(paths, best=True)
