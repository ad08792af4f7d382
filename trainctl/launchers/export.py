"""Exports of a run's checkpoint, each made in a process of its own, which loads torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from trainctl.config.extras import install_command
from trainctl.config.store import load_config
from trainctl.config.suggest import did_you_mean, nearest_names
from trainctl.errors import ExitCode, TrainctlError
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
    check: str = ""
    """`module:function` of `--check`, called as `function` is, but without `progress` and
    `shard_bytes`; it returns a `CheckedExport`. Empty if there is none.
    """
    takes: frozenset[str] = frozenset()
    """Options that the functions take: `dtype` (a torch type, or a name of `types` that torch does
    not have), `weights` (name of a state), `shard_bytes`.
    """
    types: tuple[str, ...] = ("fp32", "bf16", "fp16")
    """Number formats that `dtype` can be."""
    packages: tuple[str, ...] = ()
    """Modules that the format needs."""
    check_packages: tuple[str, ...] = ()
    """Modules that `check` needs."""
    is_file: bool = False
    """Whether the output is a file, and not a folder."""


MODEL = frozenset({"dtype", "weights"})

TARGETS = {
    "transformers": ExportTarget(
        function="trainctl.train.export.directory:export",
        check="trainctl.train.export.check:check_directory",
        takes=MODEL | {"shard_bytes"},
    ),
    "gguf": ExportTarget(
        function="trainctl.train.export.gguf_file:export_gguf",
        check="trainctl.train.export.check:check_gguf",
        takes=MODEL,
        types=("fp32", "bf16", "fp16", "q8_0"),
        packages=("gguf",),
        check_packages=("xllamacpp",),
        is_file=True,
    ),
    "trainer": ExportTarget(function="trainctl.migration.checkpoints.to_trainer:export_trainer"),
    "dcp": ExportTarget(function="trainctl.migration.checkpoints.to_dcp:export_dcp"),
    "deepspeed-universal": ExportTarget(
        function="trainctl.migration.checkpoints.to_universal:export"
    ),
}
"""Formats by the name that `--to` takes."""

ADAPTER = ExportTarget(
    function="trainctl.train.export.adapter:export_adapter",
    check="trainctl.train.export.check:check_adapter",
    takes=MODEL,
    check_packages=("peft",),
)
"""PEFT's directory, which `--adapter` chooses."""


def export(
    choice: WeightsChoice,
    out: Path,
    *,
    to: str = "transformers",
    dtype: str | None = None,
    adapter: bool | None = None,
    shard_bytes: int | None = None,
    check: bool = False,
) -> dict[str, Any]:
    """Write a checkpoint in another format.

    Args:
        out: A new or empty folder; a new file if the format is one.
        to: Name in `TARGETS`.
        dtype: Number format of the weights; None takes the one that the run trains in.
        adapter: True writes the adapter alone, False requires one to merge; None merges any.
        shard_bytes: Largest file of weights.
        check: Load the export by the library that it is for, and compare it with the checkpoint.

    Returns:
        Fields of the export; `check` has those of a `CheckedExport`.

    Raises:
        TrainctlError: The output exists, the run has no adapter, the format is unknown or does not
            have one of the options, or a package is missing (exit code 4).
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
    if dtype is not None and dtype not in target.types:
        raise TrainctlError(f"dtype={dtype!r} is none of {', '.join(target.types)}")
    if check and not target.check:
        raise TrainctlError(f"--check is not an option of --to {to}", hint="leave it out")
    _require_packages(target.packages + (target.check_packages if check else ()))
    require_new(out, is_file=target.is_file)
    given = {"dtype": dtype, "weights": choice.weights, "shard_bytes": shard_bytes}
    taken = {name: value for name, value in given.items() if name in target.takes}
    options = ["--function", target.function, "--options", json.dumps(taken)]
    options += ["--check", target.check] if check else []
    return run_task("export", choice, options, positional=[out], has_device=False)


def _require_packages(modules: Sequence[str]) -> None:
    """Refuse to begin without packages, before any work.

    Raises:
        TrainctlError: One is not installed (exit code 4).
    """
    missing = [module for module in modules if find_spec(module) is None]
    if missing:
        raise TrainctlError(
            f"this export needs a package that is missing ({', '.join(missing)})",
            hint=install_command(*missing),
            exit_code=ExitCode.environment,
        )


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
