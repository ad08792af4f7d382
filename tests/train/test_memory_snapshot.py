"""Tests of the memory snapshot: its step and its file, with torch's functions replaced."""

from __future__ import annotations

import errno
import pickle
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rank_processes import Case, curve, tiny_config, tiny_plan, train_cases

from trainctl.config.schema import Accelerator, RunConfig
from trainctl.errors import TrainctlError
from trainctl.hardware import Hardware
from trainctl.options.callbacks.memory_snapshot import MemorySnapshotConfig
from trainctl.rules.resolve import resolve
from trainctl.runs.layout import RunPaths
from trainctl.train.callbacks.memory_snapshot import MemorySnapshot


@dataclass
class Allocator:
    """Torch's allocator, as far as the callback uses it."""

    peak: int = 0
    recording: list[bool] = field(default_factory=list)
    """Record each start and stop of the history."""
    is_full: bool = False

    def record(self, enabled: str | None = "all", **_: Any) -> None:
        self.recording.append(enabled is not None)

    def dump(self, filename: str) -> None:
        Path(filename).write_bytes(pickle.dumps(self.peak)[: 1 if self.is_full else None])
        if self.is_full:
            raise OSError(errno.ENOSPC, "No space left on device")


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> Allocator:
    made = Allocator()
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", made.record)
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", made.dump)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: made.peak)
    return made


class Run:
    """Steps with one callback on one rank."""

    def __init__(self, root: Path, allocator: Allocator, rank: int = 0, **keys: Any) -> None:
        self.records: list[dict[str, Any]] = []
        self.callback = MemorySnapshot(MemorySnapshotConfig(**keys))
        self.allocator = allocator
        self.folder = root / "attempts" / "1"
        self.folder.mkdir(parents=True, exist_ok=True)
        self.context: Any = SimpleNamespace(
            rank=rank,
            world_size=2,
            device=torch.device("cuda", 0),
            attempt_folder=self.folder,
            step=0,
            record=lambda name, **values: self.records.append({"step": self.context.step} | values),
        )
        self.callback.on_train_start(self.context)

    def steps(self, *peaks: int) -> Iterator[int | None]:
        """Yield the peak in the file after each step."""
        file = self.folder / "memory" / f"rank-{self.context.rank}.pickle"
        for self.allocator.peak in peaks:
            self.context.step += 1
            self.callback.before_step(self.context)
            self.callback.after_step(self.context)
            yield pickle.loads(file.read_bytes()) if file.is_file() else None


def test_a_peak_above_the_margin_replaces_the_last(tmp_path: Path, allocator: Allocator) -> None:
    run = Run(tmp_path, allocator, margin=0.1)
    assert list(run.steps(100, 105, 110, 111, 111, 130)) == [100, 100, 100, 111, 111, 130]
    assert [each["step"] for each in run.records] == [1, 4, 6]
    assert run.records[-1]["path"] == "attempts/1/memory/rank-0.pickle"
    assert run.records[-1]["allocated_peak_bytes"] == 130
    run.callback.close()
    assert allocator.recording == [True] * 6 + [False]
    assert [path.name for path in (run.folder / "memory").iterdir()] == ["rank-0.pickle"]


def test_one_step_alone_is_recorded(tmp_path: Path, allocator: Allocator) -> None:
    run = Run(tmp_path, allocator, at_step=2)
    assert list(run.steps(100, 90, 300)) == [None, 90, 90]
    run.callback.close()
    assert allocator.recording == [True, False]


def test_other_ranks_and_cpus_do_nothing(tmp_path: Path, allocator: Allocator) -> None:
    run = Run(tmp_path, allocator, rank=1)
    assert list(run.steps(100)) == [None] and not allocator.recording
    assert list(Run(tmp_path, allocator, rank=1, ranks=[0, 1]).steps(100)) == [100]
    with pytest.raises(TrainctlError, match="has 2, which is no rank"):
        Run(tmp_path, allocator, ranks=[2])
    allocator.recording.clear()
    run = Run(tmp_path / "cpu", allocator)
    on_cpu = MemorySnapshot(MemorySnapshotConfig())
    run.context.device = torch.device("cpu")
    on_cpu.on_train_start(run.context)
    on_cpu.before_step(run.context)
    on_cpu.close()
    assert not allocator.recording


def test_a_full_disk_does_not_end_the_run(
    tmp_path: Path, allocator: Allocator, capfd: pytest.CaptureFixture[str]
) -> None:
    run = Run(tmp_path, allocator)
    assert list(run.steps(100)) == [100]
    allocator.is_full = True
    assert list(run.steps(200)) == [100] and len(run.records) == 1
    assert "not written: [Errno 28] No space left" in capfd.readouterr().err
    assert [path.name for path in (run.folder / "memory").iterdir()] == ["rank-0.pickle"]


@pytest.mark.parametrize("is_memory", [True, False])
def test_a_step_without_enough_memory_is_kept(
    tmp_path: Path, allocator: Allocator, is_memory: bool
) -> None:
    run = Run(tmp_path, allocator)
    list(run.steps(100))
    run.callback.before_step(run.context)
    allocator.peak = 101
    with pytest.raises(TrainctlError):
        try:
            try:
                raise torch.OutOfMemoryError("none left") if is_memory else ValueError("other")
            except Exception as error:
                raise TrainctlError("the step failed") from error
        finally:
            run.callback.close()
    assert pickle.loads((run.folder / "memory" / "rank-0.pickle").read_bytes()) == (
        101 if is_memory else 100
    )
    assert not allocator.recording[-1]


@pytest.mark.parametrize("accelerator", [Accelerator.cpu, Accelerator.cuda])
def test_a_plan_on_cpus_says_that_it_does_nothing(accelerator: Accelerator) -> None:
    config = RunConfig(callbacks={"memory_snapshot": {}})
    hardware = Hardware(name="h", accelerator=accelerator, nodes=1, devices_per_node=1)
    said = [each.message for each in resolve(config, hardware).findings if each.rule == "TC099"]
    told = "the callback memory_snapshot has no effect on a CPU: it needs a GPU"
    assert (told in said) == (accelerator is Accelerator.cpu)


def test_a_run_on_cpus_goes_on_without_it(tmp_path: Path) -> None:
    config = tiny_config(steps=1, evaluation_samples=0, sequence_length=32)
    config.callbacks = {"memory_snapshot": {}}
    run = RunPaths(tmp_path / "run")
    train_cases(1, [Case(tiny_plan(config, 1), run)])
    assert max(curve(run)) == 1 and not (run.attempt(1).root / "memory").exists()
