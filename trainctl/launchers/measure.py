"""Two real steps on this machine: their memory beside the predicted one, kept for estimates."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from trainctl.config.extras import package_version
from trainctl.config.keys import leaves
from trainctl.errors import ExitCode, Finding, TrainctlError
from trainctl.hardware.resolve import (
    Calibration,
    calibration_file,
    device_name,
    merge_calibration,
)
from trainctl.launchers.planning import compose_config, plan_config
from trainctl.launchers.processes import signals_raise
from trainctl.runs.files import temporary_folder, write_json
from trainctl.runs.processes import die_with_parent
from trainctl.runs.records import Event

STEPS = 2
"""The first step allocates persistent memory; the second runs with all of it."""

SHORT = (
    f"training.stop_after_steps={STEPS}",
    "training.evaluate_every_steps=null",
    "training.evaluation_samples=0",
    "training.sample_tokens=0",
    "checkpoint.every_steps=null",
    "checkpoint.every_minutes=null",
    "checkpoint.best_of=null",
    "checkpoint.at_end=false",
    "launcher.kind=local",
    "logging.memory_phases=true",
)
"""Overrides that limit a run to two steps, without evaluations, samples and checkpoints."""

PARTS = {
    "load": ("load",),
    "forward": ("forward_end",),
    "backward": ("backward_start", "backward_end"),
    "optimizer": ("step",),
}
"""Measured parts of a step, with the budget's phases in each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """Predicted and measured memory of two steps on this machine."""

    rows: list[dict[str, Any]]
    """Each part of a step: its phases in the budget, and the bytes predicted and measured."""
    on_device: bool
    """Whether the bytes are those in tensors on a device; else all resident memory of a process."""
    runtime_bytes: int | None
    """Memory of a process outside tensors."""
    calibration: Path
    """File that keeps the measurement for later estimates."""
    findings: tuple[Finding, ...]
    """Warnings of the configuration."""


def measure(
    overrides: Sequence[str], config_dir: Path | None, *, force: bool, say: Callable[[str], None]
) -> Measurement:
    """Train two steps in a temporary folder, and save what was measured.

    `say` is called with a sentence when the steps start. With `force` they start although the
    budget does not fit.

    Raises:
        TrainctlError: The configuration cannot be launched here; the launch has said why.
        StoppedBySignal: SIGTERM or SIGHUP came; the steps have ended.
    """
    # Find all errors before anything starts; earlier measurements do not count.
    planned = plan_config(
        compose_config(_short_run_overrides(overrides), config_dir),
        with_files=True,
        calibrated=False,
    )
    if planned.unforceable_errors or (planned.errors and not force):
        raise TrainctlError.from_findings(planned.findings)
    made = planned.assessment.plan
    assert made is not None
    say(f"training {STEPS} steps on {made.hardware.name}, in a folder that is removed afterwards")
    record = _train_short_run(overrides, config_dir, force=force)
    on_device = record["measured"]["allocated_peak_bytes"] is not None
    rows = _comparison_rows(record, on_device=on_device)
    found = _derive_calibration(record, rows, device_name(made.hardware), made.mesh.world_size)
    path = calibration_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, merge_calibration(found))
    return Measurement(
        rows=rows,
        on_device=on_device,
        runtime_bytes=found.runtime_bytes(made.mesh.world_size),
        calibration=path,
        findings=planned.findings,
    )


def _short_run_overrides(overrides: Sequence[str]) -> list[str]:
    """Return the overrides of the short run, without keys of launchers other than `local`."""
    foreign = {
        key
        for key, leaf in leaves().items()
        if key.startswith("launcher.") and leaf.kinds and "local" not in leaf.kinds
    }
    typed = (word.lstrip("+~").partition("=")[0].split(".") for word in overrides)
    pairs = zip(overrides, typed, strict=True)
    return [*(word for word, path in pairs if ".".join(path[:2]) not in foreign), *SHORT]


def _train_short_run(overrides: Sequence[str], config_dir: Path | None, *, force: bool) -> Event:
    """Train the short run and return its last `memory` record; the run's folder is removed."""
    ends_with_us = partial(die_with_parent, os.getpid(), death_signal=signal.SIGTERM)
    with temporary_folder() as folder:
        run = folder / "run"
        words = [*_short_run_overrides(overrides), "--run-dir", str(run), "--json"]
        words += ["--config-dir", str(config_dir)] if config_dir is not None else []
        words += ["--force"] if force else []
        command = [sys.executable, "-P", "-m", "trainctl", "launch", *words]
        with (
            signals_raise(),
            subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                preexec_fn=ends_with_us,
            ) as process,
        ):
            try:
                output, talk = process.communicate()
            except BaseException:
                process.terminate()
                process.communicate()  # it writes into the folder until it has ended
                raise
        if process.returncode != 0:
            sys.stderr.write(talk)
            raise TrainctlError(
                "nothing was measured: the steps were not made",
                hint="what is above says why",
                exit_code=ExitCode.of(process.returncode),
            )
        records: list[Event] = [json.loads(line) for line in output.splitlines()]
    return [record for record in records if record["event"] == "memory"][-1]


def _comparison_rows(record: Mapping[str, Any], *, on_device: bool) -> list[dict[str, Any]]:
    """Return each part of a step with its phases in the budget, and bytes predicted and measured.

    On a device these are bytes in tensors; on a CPU all resident memory, since nothing tells
    tensors apart.
    """
    kind = "allocated_bytes" if on_device else "device_bytes"
    measured, planned = record["phases"]["measured"], record["phases"]["planned"]
    return [
        {
            "part": part,
            "phases": list(phases),
            "predicted_bytes": max(planned[phase][kind] for phase in phases),
            "predicted_allocated_bytes": max(planned[phase]["allocated_bytes"] for phase in phases),
            "measured_bytes": measured[part],
        }
        for part, phases in PARTS.items()
        if part in measured and planned
    ]


def _derive_calibration(
    record: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], device: str, world_size: int
) -> Calibration:
    """Derive the memory that no formula predicts from the measured peaks."""
    peaks = record["measured"]
    allocated, reserved = peaks["allocated_peak_bytes"], peaks["reserved_peak_bytes"]
    if allocated is None:
        # On a CPU: resident memory outside tensors. Parts differ by what the C allocator keeps.
        rest = [row["measured_bytes"] - row["predicted_allocated_bytes"] for row in rows]
        outside = max(0, int(median(rest)))
    else:
        outside = peaks["device_peak_bytes"] - allocated
    alone = world_size == 1
    return Calibration(
        device=device,
        date=datetime.now(UTC).date().isoformat(),
        torch=package_version("torch"),
        runtime_bytes_alone=outside if alone else None,
        runtime_bytes_in_group=None if alone else outside,
        fragmentation=round(reserved / allocated - 1, 4) if allocated else None,
    )
