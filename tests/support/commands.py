"""Helpers that run the real command as a user does, and read what it left."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from trainctl.runs.directory import read_record
from trainctl.runs.layout import RunPaths
from trainctl.runs.processes import RunTag, processes_of
from trainctl.runs.records import Event, read_events, step_curve

TINY = (
    "recipe=tiny",
    "training.sequence_length=64",
    "training.global_batch_size=8",
    "training.micro_batch_size=2",
    "training.evaluation_samples=4",
    "training.evaluate_every_steps=null",
    "training.sample_tokens=0",
    "checkpoint.every_steps=null",
    "data.max_bytes=1000000",
    "model.num_layers=2",
    "model.hidden_size=32",
    "model.head_dim=8",
    "model.intermediate_size=64",
)
"""Overrides that make a run of `recipe=tiny` take seconds."""


def start(*arguments: str, cwd: Path, **variables: str) -> subprocess.Popen[str]:
    """Start `trainctl ARGUMENTS` in a folder with its output captured."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    return subprocess.Popen(
        [sys.executable, "-m", "trainctl", *arguments],
        cwd=cwd,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str], timeout: float = 240) -> tuple[int, str, str]:
    """Wait for the process to end; return exit code, stdout and stderr."""
    out, err = process.communicate(timeout=timeout)
    return process.returncode, out, err


def trainctl(*arguments: str, cwd: Path, code: int = 0, **variables: str) -> str:
    """Run a command to its end and check the exit code; return stdout and stderr together."""
    exit_code, out, err = finish(start(*arguments, cwd=cwd, **variables))
    assert exit_code == code, f"exit code {exit_code}\n{out}\n{err}"
    assert "Traceback" not in out + err
    return out + err


def events(run: Path, kind: str) -> list[Event]:
    """Return the records of one kind."""
    return [event for event in read_events(run / "events.jsonl") if event["event"] == kind]


def curve(run: Path) -> dict[int, tuple[float, float]]:
    """Return loss and gradient norm by step, after all rewinds."""
    steps = step_curve(read_events(run / "events.jsonl"))
    return {step: (event["loss"], event["grad_norm"]) for step, event in steps.items()}


def live_processes(run: Path) -> set[int]:
    """Return the processes that carry the run's id."""
    paths = RunPaths(run)
    return processes_of(RunTag(str(read_record(paths)["id"]), run.resolve()))
