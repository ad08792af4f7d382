"""Exports of a run's checkpoint, each made in a process of its own, which loads torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from trainctl.config.extras import install_command
from trainctl.config.store import load_config
from trainctl.config.suggest import did_you_mean, nearest_names
from trainctl.errors import MachineError, TrainctlError
from trainctl.launchers import hub
from trainctl.launchers.offline import WeightsChoice, require_new, run_task
from trainctl.monitor.card import write_card
from trainctl.options.adapter import low_rank
from trainctl.runs.files import temporary_folder


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
    has_card: bool = False
    """Whether a model card can stand in the folder."""


MODEL = frozenset({"dtype", "weights"})

TARGETS = {
    "transformers": ExportTarget(
        function="trainctl.train.export.directory:export",
        check="trainctl.train.export.check:check_directory",
        takes=MODEL | {"shard_bytes"},
        has_card=True,
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
    "trainer": ExportTarget(
        function="trainctl.migration.checkpoints.to_trainer:export_trainer",
        check="trainctl.migration.checkpoints.check:check_trainer",
    ),
    "dcp": ExportTarget(
        function="trainctl.migration.checkpoints.to_dcp:export_dcp",
        check="trainctl.migration.checkpoints.check:check_dcp",
    ),
    "deepspeed-universal": ExportTarget(
        function="trainctl.migration.checkpoints.to_universal:export",
        check="trainctl.migration.checkpoints.check:check_universal",
    ),
}
"""Formats by the name that `--to` takes."""

ADAPTER = ExportTarget(
    function="trainctl.train.export.adapter:export_adapter",
    check="trainctl.train.export.check:check_adapter",
    takes=MODEL,
    check_packages=("peft",),
    has_card=True,
)
"""PEFT's directory, which `--adapter` chooses."""


def export(
    choice: WeightsChoice,
    out: Path | None,
    *,
    to: str = "transformers",
    public: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Write a checkpoint in another format, or upload it to the hub.

    Args:
        out: A new or empty folder; a new file if the format is one. None, for an upload alone,
            uploads from a temporary folder.
        to: Name in `TARGETS`; or `hub:USER/NAME`, which is a directory for transformers or PEFT
            with its card.
        public: Whether a repository that an upload makes is public.
        options: As of `export_files`.

    Returns:
        Fields of the export; `hub` has those of `hub.upload`, unless the check found a difference.

    Raises:
        TrainctlError: As of `export_files`; the hub refuses or cannot be reached (exit code 4).
    """
    if not to.startswith(hub.PREFIX):
        if out is None or public:
            what = "names no OUT" if out is None else "is no upload, so that --public means nothing"
            raise TrainctlError(f"--to {to} {what}")
        return export_files(choice, out, to=to, **options)
    name = hub.check_repository(to, public=public)
    with temporary_folder() as temporary:
        folder = temporary / "model" if out is None else out
        made = export_files(choice, folder, **{**options, "card": True})
        if not made.get("check", {"equal": True})["equal"]:
            return made
        choice.progress("uploading", 0, 1)
        message = f"{made['checkpoint']} of {choice.run.root.name}"
        return {**made, "hub": hub.upload(folder, name, public=public, message=message)}


def export_files(
    choice: WeightsChoice,
    out: Path,
    *,
    to: str = "transformers",
    dtype: str | None = None,
    adapter: bool | None = None,
    shard_bytes: int | None = None,
    check: bool = False,
    card: bool = False,
) -> dict[str, Any]:
    """Write a checkpoint in another format.

    Args:
        out: A new or empty folder; a new file if the format is one.
        to: Name in `TARGETS`.
        dtype: Number format of the weights; None takes the one that the run trains in.
        adapter: True writes the adapter alone, False requires one to merge; None merges any.
        shard_bytes: Largest file of weights.
        check: Load the export by the library that it is for, and compare it with the checkpoint.
        card: Also write a model card.

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
    given = {"dtype": dtype, "weights": choice.weights, "shard_bytes": shard_bytes}
    wanted = {**given, "check": check or None, "card": card or None}
    _check_options(target, to, wanted | ({"weights": None} if choice.weights == "raw" else {}))
    _require_packages(target.packages + (target.check_packages if check else ()))
    require_new(out, is_file=target.is_file)
    taken = {name: value for name, value in given.items() if name in target.takes}
    checked = target.check if check else ""
    options = {"out": out, "function": target.function, "options": taken, "check": checked}
    made = run_task("export", choice, options)
    if card:
        checkpoint = choice.run.checkpoints / made["checkpoint"]
        write_card(choice.run, checkpoint, out, adapter=bool(adapter))
        made["files"] = sorted(path.name for path in out.iterdir())
    return made


def _check_options(target: ExportTarget, to: str, wanted: Mapping[str, Any]) -> None:
    """Refuse options that a format does not have; None is an option that was not given.

    Raises:
        TrainctlError: The format does not have one, or not this number format.
    """
    has = {*target.takes, *(["check"] if target.check else []), *(["card"] * target.has_card)}
    for name, value in wanted.items():
        if value is not None and name not in has:
            option = name.replace("_bytes", "_size").replace("_", "-")
            raise TrainctlError(f"--{option} is not an option of --to {to}", hint="leave it out")
    if wanted["dtype"] not in (None, *target.types):
        raise TrainctlError(f"dtype={wanted['dtype']!r} is none of {', '.join(target.types)}")


def _require_packages(modules: Sequence[str]) -> None:
    """Refuse to begin without packages, before any work.

    Raises:
        TrainctlError: One is not installed (exit code 4).
    """
    missing = [module for module in modules if find_spec(module) is None]
    if missing:
        raise MachineError(
            f"this export needs a package that is missing ({', '.join(missing)})",
            hint=install_command(*missing),
        )


def _target_of(to: str, adapter: bool | None) -> ExportTarget:
    """Return the target that the options choose.

    Raises:
        TrainctlError: There is no such target, or it has no adapters.
    """
    if to not in TARGETS:
        raise TrainctlError(
            f"--to {to} is none of {', '.join(TARGETS)}, hub:USER/NAME",
            hint=did_you_mean(nearest_names(to, TARGETS)),
        )
    if not adapter:
        return TARGETS[to]
    if to != "transformers":
        raise TrainctlError(
            f"--adapter is not an option of --to {to}", hint="leave it out: the adapter is merged"
        )
    return ADAPTER
