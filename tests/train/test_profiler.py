"""The profiler's window: which steps are in it, and that its files are whole or not there."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.profiler import profile, record_function

from trainctl.config.schema import LoggingConfig
from trainctl.train.callbacks.profile import Profile


class Run:
    """Steps that each do one matrix product under a name of their own."""

    def __init__(
        self, folder: Path, window: list[int], *, rank: int = 0, device: str = "cpu"
    ) -> None:
        self.records: list[dict[str, Any]] = []
        journal: Any = SimpleNamespace(
            run=SimpleNamespace(root=folder.parent),
            record=lambda event, **fields: self.records.append(fields),
        )
        config = LoggingConfig(profile_steps=window, profile_ranks=[0])
        self.device = torch.device(device)
        self._profile = Profile(config, journal, rank=rank, folder=folder, device=self.device)

    def make(self, steps: Iterable[int], failing: int | None = None) -> Run:
        context: Any = SimpleNamespace(step=0)
        try:
            for context.step in steps:
                self._profile.before_step(context)
                with record_function(f"of step {context.step}"):
                    torch.ones(512, 512, device=self.device) @ torch.ones(
                        512, 512, device=self.device
                    )
                if context.step == failing:
                    raise ValueError(f"step {failing}")
                self._profile.after_step(context)
            self._profile.on_train_end(context)
        finally:
            self._profile.close()
        return self


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
    made = Run(tmp_path / "profile", window).make(steps)
    assert recorded(tmp_path / "profile") == expected
    text = (tmp_path / "profile/rank-0.txt").read_text()
    assert f"ms a step over {len(expected)} steps" in text and "aten::mm [products]" in text
    found = {"step": window[1], "path": "profile"}
    assert made.records == ([found] if window[1] in steps else [])
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
    assert not Run(tmp_path / "profile", window, rank=rank).make(steps).records
    assert not (tmp_path / "profile").exists()


def test_a_step_that_fails_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="step 2"):
        Run(tmp_path / "p", [1, 3]).make(range(1, 4), failing=2)
    assert not (tmp_path / "p").exists()
    Run(tmp_path / "again", [1, 1]).make([1])  # torch's profiler is free again
    assert recorded(tmp_path / "again") == [1]


def test_a_full_disk_ends_the_profile_and_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def export(self: profile, path: str) -> None:
        Path(path).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(profile, "export_chrome_trace", export)
    assert not Run(tmp_path / "profile", [1, 1]).make(range(1, 4)).records
    assert "No space left" in capsys.readouterr().err
    assert list((tmp_path / "profile").iterdir()) == []


def test_a_trace_that_cannot_be_read_is_kept_without_a_summary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def export(self: profile, path: str) -> None:
        Path(path).write_bytes(gzip.compress(b'{"traceEvents": [half'))

    monkeypatch.setattr(profile, "export_chrome_trace", export)
    made = Run(tmp_path / "profile", [1, 1]).make(range(1, 4))
    assert made.records == [{"step": 1, "path": "profile"}]
    text = (tmp_path / "profile/rank-0.txt").read_text()
    assert text.startswith("the trace cannot be summarized: ")


@pytest.mark.gpu
def test_the_device_s_operations_are_recorded(tmp_path: Path) -> None:
    Run(tmp_path, [2, 2], device="cuda").make((1, 2, 3))
    with gzip.open(tmp_path / "rank-0.trace.json.gz") as stream:
        kinds = {event.get("cat") for event in json.load(stream)["traceEvents"]}
    assert "kernel" in kinds
    text = (tmp_path / "rank-0.txt").read_text()
    assert "the GPU is busy" in text and "[products]" in text
