"""The profiler's window: which steps are in it, and that its files are whole or not there."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import profile, record_function

from trainctl.config.schema import LoggingConfig
from trainctl.train.callbacks.profile import Profiler


def run(folder: Path, window: list[int], steps: Iterable[int], *, rank: int = 0) -> Profiler:
    """Steps that each do one matrix product under a name of their own."""
    config = LoggingConfig(profile_steps=window, profile_ranks=[0])
    made = Profiler(config, rank=rank, folder=folder, device=torch.device("cpu"))
    with made as profiler:
        for number in steps:
            with profiler.step(number), record_function(f"of step {number}"):
                torch.ones(8, 8) @ torch.ones(8, 8)
    return made


def recorded(folder: Path) -> list[int]:
    """Numbers of the steps in the trace."""
    with gzip.open(folder / "rank-0.trace.json.gz") as stream:
        events: list[dict[str, Any]] = json.load(stream)["traceEvents"]
    names = {event["name"] for event in events if event["name"].startswith("of step ")}
    return sorted(int(name.split()[-1]) for name in names)


@pytest.mark.parametrize(
    ("window", "steps", "expected"),
    [
        ([3, 4], range(1, 7), [3, 4]),
        ([1, 1], range(1, 4), [1]),
        ([4, 9], range(1, 6), [4, 5]),  # the run ends within the window
        ([4, 6], range(5, 9), [5, 6]),  # it begins there
    ],
)
def test_the_steps_of_the_window_are_recorded(
    tmp_path: Path, window: list[int], steps: range, expected: list[int]
) -> None:
    profiler = run(tmp_path / "profile", window, steps)
    assert recorded(tmp_path / "profile") == expected
    assert "aten::mm" in (tmp_path / "profile/rank-0.txt").read_text()
    assert profiler.take_written() and not profiler.take_written()
    assert {path.name for path in (tmp_path / "profile").iterdir()} == {
        "rank-0.trace.json.gz",
        "rank-0.txt",
    }


@pytest.mark.parametrize(
    ("window", "steps", "rank"),
    [([], range(1, 4), 0), ([2, 3], range(1, 4), 1), ([2, 3], range(4, 7), 0), ([3, 4], [1, 2], 0)],
    ids=["no window", "another rank", "behind it", "only warmed up"],
)
def test_nothing_is_written_without_a_recorded_step(
    tmp_path: Path, window: list[int], steps: Iterable[int], rank: int
) -> None:
    assert not run(tmp_path / "profile", window, steps, rank=rank).take_written()
    assert not (tmp_path / "profile").exists()


def test_a_step_that_fails_leaves_nothing(tmp_path: Path) -> None:
    config = LoggingConfig(profile_steps=[1, 3])
    with pytest.raises(ValueError, match="step 2"):
        with Profiler(config, rank=0, folder=tmp_path / "p", device=torch.device("cpu")) as made:
            for number in range(1, 4):
                with made.step(number):
                    if number == 2:
                        raise ValueError("step 2")
    assert not (tmp_path / "p").exists()
    run(tmp_path / "again", [1, 1], [1])  # torch's profiler is free again
    assert recorded(tmp_path / "again") == [1]


def test_a_full_disk_ends_the_profile_and_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def export(self: profile, path: str) -> None:
        Path(path).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(profile, "export_chrome_trace", export)
    assert not run(tmp_path / "profile", [1, 1], range(1, 4)).take_written()
    assert "No space left" in capsys.readouterr().err
    assert list((tmp_path / "profile").iterdir()) == []


@pytest.mark.gpu
def test_the_device_s_operations_are_recorded(tmp_path: Path) -> None:
    device = torch.device("cuda")
    config = LoggingConfig(profile_steps=[2, 2])
    with Profiler(config, rank=0, folder=tmp_path, device=device) as profiler:
        for number in (1, 2, 3):
            with profiler.step(number):
                torch.ones(512, 512, device=device) @ torch.ones(512, 512, device=device)
    with gzip.open(tmp_path / "rank-0.trace.json.gz") as stream:
        kinds = {event.get("cat") for event in json.load(stream)["traceEvents"]}
    assert "kernel" in kinds
    assert "Self CUDA" in (tmp_path / "rank-0.txt").read_text()
