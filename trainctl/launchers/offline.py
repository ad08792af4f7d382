"""Work on the weights of a run outside training, and the import of checkpoints.

Each function runs a task of `trainctl.train.offline` or `trainctl.migration` in a process of its
own, because the command line loads no torch.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from trainctl.config.codec import to_plain
from trainctl.config.compose import ComposedConfig
from trainctl.config.extras import install_command
from trainctl.config.store import diff_configs, load_config
from trainctl.errors import ExitCode, MachineError, TrainctlError
from trainctl.launchers.planning import compose_target, plan_config
from trainctl.runs.attempts import effective_attempt
from trainctl.runs.checkpoint_selection import Warn, choose_checkpoint
from trainctl.runs.directory import is_run, open_run
from trainctl.runs.files import temporary_folder, write_json
from trainctl.runs.layout import RunPaths
from trainctl.runs.processes import PARENT_VARIABLE
from trainctl.runs.records import EventWriter, Progress, ignore_progress

MIGRATION = "trainctl.migration"
"""Module with the tasks on checkpoints of other trainers."""
ARGUMENT_BYTES = 100_000
"""Bytes in one argument of a command; Linux takes 128 KiB in one, and more in all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsChoice:
    """Weights of a run to work on."""

    run: RunPaths
    step: int | None = None
    """Step of the checkpoint; None takes the newest that is intact."""
    best: bool = False
    """Whether to take the checkpoint with the lowest `checkpoint.best_of` metric."""
    weights: str = "raw"
    """`raw`: the trained weights; `ema`: their moving average."""
    device: str = "auto"
    """`cpu`, `cuda`, or `auto`: an accelerator with room for the model, else the CPU."""
    progress: Progress = field(default=ignore_progress, repr=False)
    warn: Warn = field(default=ignore_progress, repr=False)
    """Called for each damaged checkpoint that is passed over."""

    def checkpoint(self) -> Path:
        """Return the checkpoint, with every byte verified.

        Raises:
            TrainctlError: There is no such checkpoint that is intact (exit code 5).
        """
        return choose_checkpoint(self.run, self.progress, self.warn, step=self.step, best=self.best)


def evaluate_tasks(
    choice: WeightsChoice,
    names: Sequence[str],
    *,
    include: Path | None = None,
    keep: Path | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Evaluate tasks of lm-eval, append the results to the run's records, and return them.

    Args:
        include: Folder of the user's own tasks in lm-eval's YAML.
        keep: New folder for the export that the tasks run on; None removes it afterwards.
        options: Other arguments of the task `tasks` of `trainctl.train.offline`.

    Raises:
        TrainctlError: lm-eval is not installed (exit code 4), the folder of tasks does not exist,
            the folder to keep is not empty, or the evaluation failed.
    """
    require_harness()
    if include is not None and not include.is_dir():
        raise TrainctlError(f"--include-path {include} is no folder")
    if keep is not None:
        require_new(keep)
    places = {"include": include and include.resolve(), "keep": keep and keep.resolve()}
    chat = options.get("chat", False)
    found = run_task("tasks", choice, {"names": names, **places, **options}, chat=chat)
    record = {name: value for name, value in found.items() if name != "run"}
    try:
        with EventWriter(choice.run.events, effective_attempt(choice.run).number) as writer:
            writer.write("tasks", **record)
    except OSError as error:  # another user's run, which is read-only
        choice.warn(f"not added to the run's records: {error.strerror}")
    return found


def require_harness() -> None:
    """Refuse to begin without lm-eval.

    Raises:
        TrainctlError: lm-eval is not installed (exit code 4).
    """
    if find_spec("lm_eval") is None:
        raise MachineError(
            "--tasks needs a package that is missing (lm_eval)", hint=install_command("lm_eval")
        )


def import_checkpoint(
    directory: Path,
    run_dir: Path,
    composed: ComposedConfig | None,
    *,
    format: str | None = None,
    argv: Sequence[str] = (),
    progress: Progress,
) -> dict[str, Any]:
    """Make a run whose first checkpoint has the state of another trainer's checkpoint.

    Args:
        run_dir: Directory of the run to make, or of a run without checkpoints.
        composed: The run's configuration; None takes that of the run in `run_dir`.
        format: Format of the checkpoint; None detects it.
        argv: Command line for the run's record.

    Raises:
        TrainctlError: The configuration is wrong; or the checkpoint is damaged, or of another model
            or optimizer.
    """
    is_named = composed is None
    composed = composed or compose_target(str(run_dir), (), None)
    planned = plan_config(composed, with_files=True, tokenize=True)
    if planned.unforceable_errors:
        raise TrainctlError.from_findings(planned.findings)
    if is_run(run_dir) and not is_named:  # an import that was killed, perhaps
        there = load_config(open_run(run_dir).config)
        for change in diff_configs(there, planned.plan.config):
            raise TrainctlError(
                f"{run_dir} is a run, which has its configuration: {change.key} is another",
                hint="leave the overrides out, or import into a new directory",
            )
    with temporary_folder() as temporary:
        file = temporary / "plan.json"
        write_json(file, to_plain(planned.plan))
        places = {"directory": directory.absolute(), "run_dir": run_dir.absolute(), "plan": file}
        options = {**places, "argv": argv, "format": format}
        return run_offline("import", options, progress, MIGRATION)


def require_new(out: Path, *, is_file: bool = False) -> None:
    """Refuse an output path that exists, unless it is an empty folder; called before the work.

    Args:
        is_file: Whether the output is a file, so that no folder may be there.

    Raises:
        TrainctlError: The path is a file, or a folder that is not empty.
    """
    if is_file and out.exists():
        raise TrainctlError(f"{out} exists", hint="name another file, or remove it")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise TrainctlError(
            f"{out} exists and is not an empty folder", hint="name another, or remove it"
        )


def run_task(
    task: str, choice: WeightsChoice, options: Mapping[str, Any], **settings: Any
) -> dict[str, Any]:
    """Run a task on the chosen weights; return its result after run, checkpoint and settings.

    Args:
        options: Further arguments of the task's function, by name.
    """
    checkpoint = choice.checkpoint()
    where = {"run": str(choice.run.root), "checkpoint": checkpoint, "weights": choice.weights}
    given = {**where, "device": choice.device, **options}
    result = run_offline(task, given, choice.progress)
    return {**where, "checkpoint": checkpoint.name, **settings, **result}


def run_offline(
    task: str,
    options: Mapping[str, Any],
    progress: Progress,
    module: str = "trainctl.train.offline",
) -> dict[str, Any]:
    """Run a task of a module in a process of its own and return its result.

    Args:
        options: Arguments of the task's function by name: paths, and values that JSON has.

    Raises:
        TrainctlError: The task failed with a message, or the process was killed (exit code 4).
        RuntimeError: The process ended without an answer, by a bug; its output is a note.
    """
    text = json.dumps(options, default=str)
    pieces = [text[at : at + ARGUMENT_BYTES] for at in range(0, len(text), ARGUMENT_BYTES)]
    command = [sys.executable, "-P", "-m", module, task, *pieces]
    result: dict[str, Any] | None = None
    with (
        tempfile.TemporaryFile() as talk,
        # In a session of its own: Ctrl-C reaches only this process, which then ends that one.
        subprocess.Popen(
            command,
            env={**os.environ, PARENT_VARIABLE: str(os.getpid())},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=talk,
            start_new_session=True,
        ) as process,
    ):
        assert process.stdout is not None
        try:
            for line in process.stdout:
                answer = json.loads(line)
                if "progress" in answer:
                    progress(*answer["progress"])
                elif "error" in answer:
                    raise _error_from_json(answer["error"])
                else:
                    result = answer["result"]
            code = process.wait()
        except BaseException:
            process.terminate()
            raise
        if result is None:
            talk.seek(0)
            raise _process_failure(task, code, talk.read().decode(errors="replace"))
    return result


def _error_from_json(problem: dict[str, Any]) -> TrainctlError:
    code = ExitCode(problem["exit_code"])
    return TrainctlError(problem["message"], hint=problem["hint"], exit_code=code)


def _process_failure(task: str, code: int, talk: str) -> Exception:
    """Return the error of a process that ended without a result: it was killed, or has a bug."""
    if code < 0:
        name = signal.Signals(-code).name
        hint = "the memory of this machine may not suffice" if name == "SIGKILL" else ""
        return MachineError(f"the process that was to {task} was ended by {name}", hint=hint)
    error = RuntimeError(f"the process that was to {task} failed by an error of its own")
    error.add_note(talk.rstrip())
    return error
