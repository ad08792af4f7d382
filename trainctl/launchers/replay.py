"""Replays of a run's steps, each a launch in a directory beside the run's.

A replay reads the run's checkpoint through hard links. The run itself gets nothing but the result
of the command, a file in `proofs/`.
"""

from __future__ import annotations

import math
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

from trainctl.config.compose import ComposedConfig
from trainctl.config.registry import list_shipped
from trainctl.config.schema import RunConfig
from trainctl.config.schema.alerts import AlertsConfig
from trainctl.config.store import dump_config
from trainctl.errors import ExitCode, RunFailed, TrainctlError
from trainctl.launchers.comparison import FACTOR
from trainctl.launchers.interface import has_scheduler
from trainctl.launchers.planning import plan_config
from trainctl.launchers.processes import signals_raise, start_in_background
from trainctl.launchers.rank_command import user_code_folder
from trainctl.launchers.start import outcome_of
from trainctl.options.data import SampleKind
from trainctl.options.objective import objective_of
from trainctl.plans.types import RunPlan
from trainctl.runs.checkpoints import CheckpointInfo, checkpoint_name, list_checkpoints
from trainctl.runs.directory import new_attempt
from trainctl.runs.files import ensure_folder, write_json, write_text
from trainctl.runs.layout import RunPaths
from trainctl.runs.lock import find_holder, hold_lock
from trainctl.runs.records import number, steps_from_end
from trainctl.runs.replays import RecordingSettings, SearchSettings, TrialSettings, request_replay

Say = Callable[[str], None]
"""Called with a sentence as each replay begins."""

_PREFIX = ".replay-"
_LEFT_SECONDS = 3600.0
"""Age from which a folder without a launch is a leftover: commands plan between launches."""
SCHEMA = 1
"""Version of a result's file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayResult:
    """Result of a command that replays steps, with the command's exit code."""

    checkpoint: int
    """Step of the checkpoint that was replayed from; 0 is the start of the run."""

    @property
    def is_good(self) -> bool:
        """Whether nothing was found to be wrong."""
        raise NotImplementedError

    @property
    def sentence(self) -> str:
        """The result in words."""
        raise NotImplementedError

    @property
    def exit_code(self) -> ExitCode:
        return ExitCode.success if self.is_good else ExitCode.training_failed

    def to_dict(self) -> dict[str, Any]:
        """Return the result as plain data, for JSON; numbers that are not finite are null."""
        plain: dict[str, Any] = _finite(asdict(self))
        verdict = {"sentence": self.sentence, "exit_code": int(self.exit_code)}
        return {"schema": SCHEMA, **plain, **verdict}


def _finite(value: Any) -> Any:
    """Return plain data with null in place of numbers that are not finite."""
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """Loss of a step that the run had already made after the checkpoint."""

    step: int
    recorded: float
    """Loss in the run's records, in nats."""
    replayed: float
    expected: float
    """Relative rounding expected; up to eight times as much is allowed."""

    @property
    def is_reproduced(self) -> bool:
        difference = abs(self.replayed - self.recorded)
        return difference <= FACTOR * self.expected * abs(self.recorded)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedResult(ReplayResult):
    """Result of a replay whose losses are compared with the run's records too."""

    record: tuple[RecordedStep, ...] = ()
    """Steps that the run's records have too."""

    @property
    def reproduces(self) -> bool | None:
        """Whether the replay as recorded has the recorded losses; None if there are none."""
        return all(each.is_reproduced for each in self.record) if self.record else None

    def to_dict(self) -> dict[str, Any]:
        """Return the result as plain data, for JSON; numbers that are not finite are null."""
        return {**ReplayResult.to_dict(self), "reproduces": self.reproduces}


class Replays(ExitStack):
    """Replays of a run from one checkpoint, in a temporary folder beside the run.

    Args:
        checkpoint: Checkpoint that they begin at; None begins with the first step.
    """

    def __init__(self, run: RunPaths, checkpoint: CheckpointInfo | None) -> None:
        super().__init__()
        self._run, self._checkpoint = run, checkpoint

    def __enter__(self) -> Self:
        super().__enter__()
        self.enter_context(signals_raise())
        beside = self._run.root.parent
        where = beside if os.access(beside, os.W_OK) else None  # links need the same file system
        _remove_leftovers(beside)
        self._folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=where))
        self.callback(shutil.rmtree, self._folder, ignore_errors=True)
        return self

    def launch(
        self,
        what: str,
        plan: RunPlan,
        request: RecordingSettings | TrialSettings | SearchSettings,
        *,
        stop_step: int,
        python: Path | None = None,
    ) -> RunPaths:
        """Replay the steps up to `stop_step`, and return the directory of the replay.

        Args:
            what: How they are replayed, for the error.
            request: What the ranks do besides.
            python: Interpreter of another environment.

        Raises:
            RunFailed: The replay failed.
        """
        folder = self._folder / str(len(list(self._folder.iterdir())))
        plan = replace(plan, stop_step=stop_step)
        copy = copy_run(self._run, self._checkpoint, folder, plan.config)
        request_replay(copy, request)
        run_replay(copy, plan, what, of=self._run.root, python=python)
        os.utime(self._folder)  # or what reads the result for an hour would be a leftover
        return copy


def _remove_leftovers(folder: Path) -> None:
    """Remove what replays of killed commands left beside runs: links keep checkpoints on disk."""
    for old in folder.glob(f"{_PREFIX}*"):
        with suppress(OSError):
            used = max(path.stat().st_mtime for path in (old, *old.glob("*/lock")))
            is_held = any(find_holder(RunPaths(replay)) for replay in old.iterdir())
            if not is_held and time.time() - used > _LEFT_SECONDS:
                shutil.rmtree(old, ignore_errors=True)


def plan_replay(composed: ComposedConfig, run: RunPaths) -> RunPlan:
    """Return the plan of a replay: without saves, mirror, loggers, samples and shipped callbacks.

    Shipped callbacks only watch; a user's may do anything, and stay. Nothing but its last step ends
    a replay early, and a signal ends it at once.

    Raises:
        TrainctlError: The configuration is not legal, or a scheduler would have to run it.
    """
    config = composed.config
    if not config.trains_itself:
        raise TrainctlError(
            f"{run.root} trains by a program of its own, whose tensors trainctl does not see",
            hint="only runs of trainctl's own trainer are replayed",
        )
    if has_scheduler(config):
        raise TrainctlError(
            f"launcher.kind={config.launcher.kind} hands launches to a scheduler, and this command "
            "waits for its replays",
            hint="run it inside a job, or on one machine with launcher=local",
        )
    shipped = list_shipped("callbacks")
    quiet = replace(
        config,
        callbacks={n: keys for n, keys in config.callbacks.items() if n not in shipped},
        training=replace(
            config.training,
            sample_tokens=0,
            stop_after_steps=None,
            stop_patience=None,
            time_limit_minutes=None,
        ),
        checkpoint=replace(
            config.checkpoint,
            every_steps=None,
            every_minutes=None,
            at_end=False,
            best_of=None,
            weights_only_every_steps=None,
            compare_replay=False,
            mirror=None,
            mirror_bandwidth=None,
        ),
        logging=replace(
            config.logging, to=[], alerts=AlertsConfig(), profile_steps=[], memory_phases=False
        ),
        launcher=replace(config.launcher, max_restarts=0, stop_grace_seconds=0.0),
    )
    planned = plan_config(
        replace(composed, config=quiet),
        with_files=True,
        resumes=bool(list_checkpoints(run)),
        tokenize=True,
        folder=user_code_folder(config, run),
    )
    if planned.unforceable_errors:
        raise TrainctlError.from_findings(planned.findings)
    return planned.plan


def recorded_steps(
    run: RunPaths, replayed: Mapping[int, float], expected: Callable[[int], float]
) -> tuple[RecordedStep, ...]:
    """Return the replayed steps that the run's records have too, if they were updates.

    Args:
        replayed: Losses of the replay, by step.
        expected: Relative rounding expected of a step's loss.
    """
    curve = steps_from_end(run.events, replayed)
    return tuple(
        RecordedStep(step, number(curve[step]["loss"]), loss, expected(step))
        for step, loss in replayed.items()
        if step in curve and not curve[step].get("intervention")
    )


def plan_step(composed: ComposedConfig, run: RunPaths, step: int) -> RunPlan:
    """Return the plan of a replay up to a step whose gradient is then computed again and again.

    Raises:
        TrainctlError: As `plan_replay`; or the run has no such step, or its objective or layout
            lets a sample's gradient depend on the samples of other ranks.
    """
    plan = plan_replay(composed, run)
    config, objective = plan.config, objective_of(plan.config.objective)
    reason = ""
    if objective.takes is SampleKind.prompts:
        reason = f"objective={config.objective.kind} samples the answers that a step learns from"
    elif objective.passes > 1:
        reason = f"objective={config.objective.kind} compares each sample with the whole batch"
    elif config.parallelism.expert > 1:
        reason = f"parallelism.expert={config.parallelism.expert} sends tokens to other ranks"
    if reason:
        raise TrainctlError(
            f"{reason}, so no part of a step can be computed alone",
            hint="trainctl prove replays whole steps",
        )
    if not 1 <= step <= plan.total_steps:
        raise TrainctlError(
            f"--step {step}: the run has the steps 1 to {plan.total_steps:,}",
            hint="trainctl runs status RUN names the last one",
        )
    return plan


def checkpoint_before(run: RunPaths, step: int) -> CheckpointInfo | None:
    """Return the newest checkpoint before a step; None replays from the beginning."""
    return max(
        (info for info in list_checkpoints(run) if info.step < step),
        key=lambda info: info.step,
        default=None,
    )


def announce_replay(checkpoint: CheckpointInfo | None, step: int) -> str:
    """Return a sentence about the steps that are replayed before the one in question."""
    start = 0 if checkpoint is None else checkpoint.step
    return f"replaying {count_steps(step - 1 - start)} after step {start:,}, then step {step:,}"


def run_replay(
    run: RunPaths, plan: RunPlan, what: str, *, of: Path, python: Path | None = None
) -> None:
    """Launch a plan in the directory of a replay, and wait for its end.

    Args:
        what: How steps are replayed, for the error.
        of: Directory of what is replayed, for the error.
        python: Interpreter of another environment.

    Raises:
        RunFailed: The replay failed.
    """
    with hold_lock(run) as lock:
        attempt = new_attempt(run, plan)
        process = start_in_background(
            run, attempt, lock, dies_with_parent=True, python=str(python or sys.executable)
        )
        try:
            code = process.wait()
        except BaseException:
            process.terminate()
            process.wait()
            raise
    if code:
        outcome = outcome_of(run, code)
        raise RunFailed(
            f"the replay {what} failed: {outcome.message or f'exit code {code}'}",
            hint=outcome.hint,
            exit_code=ExitCode.of(code),
            path=of,
            cause=outcome.cause,
            log=None,
            log_tail=outcome.log_tail,
        )


def copy_run(
    run: RunPaths, checkpoint: CheckpointInfo | None, folder: Path, config: RunConfig
) -> RunPaths:
    """Make a run directory that has one checkpoint of a run, or none, with its files linked.

    It keeps the run's id, which the checkpoint names.
    """
    copy = RunPaths(folder)
    for each in (copy.root, copy.checkpoints, copy.attempts):
        ensure_folder(each)
    write_text(copy.config, dump_config(config))
    for file in (run.record, run.corpus, run.teacher):
        if file.is_file():
            shutil.copy(file, copy.root)
    for file in (run.base, run.reference):
        if file.is_file():
            _link(file, copy.root / file.name)
    if checkpoint is not None:
        here = copy.checkpoints / checkpoint_name(checkpoint.step)
        ensure_folder(here)
        for file in checkpoint.path.iterdir():
            _link(file, here / file.name)
    if run.users_corpus.is_dir():
        shutil.copytree(run.users_corpus, copy.users_corpus, copy_function=_link)
    if run.callbacks.is_dir():
        shutil.copytree(run.callbacks, copy.callbacks)
    return copy


def write_result(run: RunPaths, result: Mapping[str, Any]) -> str:
    """Write a result into `proofs/`, which the report lists; return the file.

    Empty if this user cannot write the run's directory.
    """
    with suppress(OSError):
        ensure_folder(run.proofs)
        names = [int(path.stem) for path in run.proofs.glob("*.json") if path.stem.isdecimal()]
        file = run.proofs / f"{max(names, default=0) + 1}.json"
        write_json(file, {"time": time.time(), **result, "file": str(file)})
        return str(file)
    return ""


def count_steps(count: int) -> str:
    """Return a number of steps in words."""
    return "1 step" if count == 1 else f"{count:,} steps"


def _link(file: str | Path, place: str | Path) -> None:
    """Link a file. A hard link outlives the checkpoint, which a live run may rotate away."""
    try:
        Path(place).hardlink_to(file)
    except OSError:  # another file system, or another user's file
        Path(place).symlink_to(file)
