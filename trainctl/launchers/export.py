"""Exports of a run's checkpoint, each made in a process of its own, which loads torch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainctl.config.store import load_config
from trainctl.config.suggest import did_you_mean, nearest_names
from trainctl.errors import TrainctlError
from trainctl.launchers.offline import WeightsChoice, require_new, run_task
from trainctl.options.adapter import low_rank


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportTarget:
    """Format that a checkpoint can be exported to."""

    function: str
    """`module:function`, called with the configuration, the checkpoint and the output's path, and
    by keyword with `progress(done, total)` and the options in `takes`; it returns an
    `ExportedCheckpoint`. The output appears only when it is complete.
    """
    takes: frozenset[str] = frozenset()
    """Options that the function takes: `dtype` (a torch type), `weights` (name of a state),
    `shard_bytes`.
    """


MODEL = frozenset({"dtype", "weights"})

TARGETS = {
    "transformers": ExportTarget(
        function="trainctl.train.export.directory:export", takes=MODEL | {"shard_bytes"}
    ),
    "trainer": ExportTarget(function="trainctl.migration.checkpoints.to_trainer:export_trainer"),
    "dcp": ExportTarget(function="trainctl.migration.checkpoints.to_dcp:export_dcp"),
}
"""Formats by the name that `--to` takes."""

ADAPTER = ExportTarget(function="trainctl.train.export.adapter:export_adapter", takes=MODEL)
"""PEFT's directory, which `--adapter` chooses."""


def export(
    choice: WeightsChoice,
    out: Path,
    *,
    to: str = "transformers",
    dtype: str | None = None,
    adapter: bool | None = None,
    shard_bytes: int | None = None,
) -> dict[str, Any]:
    """Write a checkpoint in another format.

    Args:
        out: A new or empty folder.
        to: Name in `TARGETS`.
        dtype: Number format of the weights; None takes the one that the run trains in.
        adapter: True writes the adapter alone, False requires one to merge; None merges any.
        shard_bytes: Largest file of weights.

    Raises:
        TrainctlError: The folder is not empty, the run has no adapter, or the format is unknown or
            does not have one of the options.
    """
    run = choice.run
    if adapter is not None and low_rank(load_config(run.config).adapter) is None:
        raise TrainctlError(
            f"{run.root} has no adapter: its checkpoints hold the model's own weights",
            hint="leave the option out",
        )
    target = _target_of(to, adapter)
    average = None if choice.weights == "raw" else choice.weights
    for name, value in (("dtype", dtype), ("weights", average), ("shard_bytes", shard_bytes)):
        if value is not None and name not in target.takes:
            option = name.replace("_bytes", "_size").replace("_", "-")
            raise TrainctlError(f"--{option} is not an option of --to {to}", hint="leave it out")
    require_new(out)
    given = {"dtype": dtype, "weights": choice.weights, "shard_bytes": shard_bytes}
    taken = {name: value for name, value in given.items() if name in target.takes}
    options = ["--function", target.function, "--options", json.dumps(taken)]
    return run_task("export", choice, options, positional=[out], has_device=False)


def _target_of(to: str, adapter: bool | None) -> ExportTarget:
    """Return the target that the options choose.

    Raises:
        TrainctlError: There is no such target, or it has no adapters.
    """
    if to not in TARGETS:
        raise TrainctlError(
            f"--to {to} is none of {', '.join(TARGETS)}",
            hint=did_you_mean(nearest_names(to, TARGETS)),
        )
    if not adapter:
        return TARGETS[to]
    if to != "transformers":
        raise TrainctlError(
            f"--adapter is not an option of --to {to}", hint="leave it out: the adapter is merged"
        )
    return ADAPTER
