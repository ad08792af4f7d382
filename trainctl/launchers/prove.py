"""Proof of a change: steps of a run are replayed as recorded and with the change, and compared.

Each replay is a launch in a directory beside the run's, which reads the checkpoint through hard
links. The run itself gets nothing but the result, a file in `proofs/`.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from trainctl.config.compose import ComposedConfig, recompose
from trainctl.config.registry import list_shipped
from trainctl.config.schema import DataType, RunConfig
from trainctl.config.schema.alerts import AlertsConfig
from trainctl.config.store import dump_config
from trainctl.errors import ExitCode, RunFailed, TrainctlError
from trainctl.launchers.comparison import (
    FACTOR,
    Comparison,
    StepComparison,
    TensorDifference,
    Verdict,
    compare,
    to_json,
)
from trainctl.launchers.interface import has_scheduler
from trainctl.launchers.planning import plan_config
from trainctl.launchers.processes import start_in_background
from trainctl.launchers.rank_command import user_code_folder
from trainctl.launchers.start import outcome_of
from trainctl.options.precision import precision_of
from trainctl.plans.shapes import head_dim
from trainctl.plans.types import RunPlan
from trainctl.runs.attempts import config_of
from trainctl.runs.checkpoints import CheckpointInfo, checkpoint_name, list_checkpoints
from trainctl.runs.directory import new_attempt
from trainctl.runs.files import ensure_folder, write_json, write_text
from trainctl.runs.layout import RunPaths
from trainctl.runs.lock import hold_lock
from trainctl.runs.recording import (
    Recording,
    RecordingSettings,
    read_recording,
    request_recording,
)
from trainctl.runs.records import number, steps_from_end

Say = Callable[[str], None]
"""Called with a sentence as each replay begins."""

UNITS = {DataType.fp32: 2.0**-23, DataType.fp16: 2.0**-10, DataType.bf16: 2.0**-7}
"""Spacing of the numbers of a format next to 1."""
_FP8_UNIT = 2.0**-3
"""Spacing of float8_e4m3, which has three bits of mantissa."""

PACKAGES = ("trainctl", "torch", "deepspeed", "transformers")

SCHEMA = 1
"""Version of a result's file."""


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
class Proof:
    """Result of a proof."""

    run: str
    checkpoint: int
    """Step of the checkpoint that was replayed."""
    changes: tuple[str, ...]
    """Overrides of the second replay; empty if the same was replayed again."""
    verdict: Verdict
    first: TensorDifference | None
    """First difference above rounding in the order of computation; None without one."""
    steps: tuple[StepComparison, ...]
    """Comparison of each replayed step."""
    tensors: int
    """Number of tensors compared."""
    record: tuple[RecordedStep, ...] = ()
    """Steps that the run's records have too."""
    versions: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Packages of the two replays whose versions differ."""
    file: str = ""
    """The file with this result; empty if the run's directory cannot be written."""

    @property
    def reproduces(self) -> bool | None:
        """Whether the replay as recorded has the recorded losses; None if there are none."""
        return all(each.is_reproduced for each in self.record) if self.record else None

    @property
    def exit_code(self) -> ExitCode:
        is_good = self.verdict is not Verdict.differs and self.reproduces is not False
        return ExitCode.success if is_good else ExitCode.training_failed

    @property
    def sentence(self) -> str:
        """The verdict in words."""
        if self.first is not None:
            return f"differs, first in the {self.first}"
        what = f"{self.tensors:,} tensors of {_count_steps(len(self.steps))}"
        if self.verdict is Verdict.equal:
            return f"equal bit for bit: {what}"
        return f"within rounding: {what}"

    def to_dict(self) -> dict[str, Any]:
        """Return the result as plain data, for JSON; numbers that are not finite are null."""
        plain: dict[str, Any] = to_json(asdict(self))
        return {
            "schema": SCHEMA,
            **plain,
            "sentence": self.sentence,
            "reproduces": self.reproduces,
            "exit_code": int(self.exit_code),
        }


def prove(
    run: RunPaths,
    configure: Callable[[RunConfig], ComposedConfig],
    *,
    changes: Sequence[str],
    steps: int,
    checkpoint: int | None,
    say: Say,
    python: Path | None = None,
    attempt: int | None = None,
) -> Proof:
    """Replay steps of a run as recorded and with a change, compare, and write the result.

    Args:
        configure: Makes the changed configuration from the run's.
        changes: The overrides that it applies, for the result.
        steps: Number of steps to replay.
        checkpoint: Step of the checkpoint; None takes the newest that has as many steps left.
        python: Interpreter of another environment for the second replay.
        attempt: Attempt whose configuration is replayed; None takes the one that stands for the
            run.

    Raises:
        TrainctlError: There is no such checkpoint, the change is not legal or changes which samples
            a step has, or a replay failed.
    """
    before = config_of(run, attempt)
    plan = plan_replay(recompose(before, []), run)
    changed = plan_replay(configure(before), run)
    _check_comparable(plan, changed)
    found = _choose_checkpoint(run, plan, steps, checkpoint)
    versions = _differing_versions(python) if python is not None else {}
    with Replays(run, found, steps, say) as replays:
        recorded = replays.replay("as recorded", plan)
        reordered = [(recorded, replays.replay("in another order of sums", plan, reorder=True))]
        other = replays.replay("with the change" if changes else "again", changed, python=python)
        formats = [precision_of(each.config.precision).format for each in (plan, changed)]
        if formats[0] is not formats[1]:
            again = replays.replay(
                "with the change, in another order of sums", changed, python=python, reorder=True
            )
            reordered.append((other, again))
    comparison = compare(
        recorded,
        other,
        reordered,
        unit=max(UNITS.get(each, _FP8_UNIT) for each in formats),
        head_dim=None if before.model.is_module else head_dim(before.model),
        tokens=plan.batch.tokens_per_step,
    )
    return _written(run, _proof(run, found, changes, comparison, versions))


def require_proof(
    run: RunPaths,
    configure: Callable[[RunConfig], ComposedConfig],
    *,
    changes: Sequence[str],
    place: tuple[int | None, int | None] | None,
    say: Say,
) -> None:
    """Prove one step before a resume; see `prove`.

    Args:
        place: Step of the checkpoint and number of the attempt, as of `prove`; None begins again.

    Raises:
        TrainctlError: It differs by more than rounding (exit code 6), or cannot be replayed.
    """
    if place is None:
        raise TrainctlError(
            "--prove replays a step from a checkpoint, and --from-start leaves all of them behind",
            hint="leave one of them out",
        )
    checkpoint, attempt = place
    proof = prove(
        run,
        configure,
        changes=changes,
        steps=1,
        checkpoint=checkpoint,
        attempt=attempt,
        say=say,
    )
    say(proof.sentence)
    if proof.exit_code:
        what = proof.sentence if proof.first else "it does not reproduce its recorded losses"
        raise TrainctlError(
            f"{run.root} was not resumed: {what}",
            hint=f"{proof.file or 'the result'} has every step; resume without --prove goes on",
            exit_code=proof.exit_code,
        )


def _proof(
    run: RunPaths,
    checkpoint: CheckpointInfo,
    changes: Sequence[str],
    found: Comparison,
    versions: Mapping[str, tuple[str, str]],
) -> Proof:
    curve = steps_from_end(run.events, [each.step for each in found.steps])
    record = tuple(
        RecordedStep(
            each.step,
            number(curve[each.step]["loss"]),
            each.loss,
            each.differences["loss"].expected,
        )
        for each in found.steps
        if each.step in curve and not curve[each.step].get("intervention")
    )
    return Proof(
        run=str(run.root),
        checkpoint=checkpoint.step,
        changes=tuple(changes),
        verdict=found.verdict,
        first=found.first,
        steps=found.steps,
        tensors=found.tensors,
        record=record,
        versions=versions,
    )


def _written(run: RunPaths, proof: Proof) -> Proof:
    """Write the result into the run, if this user may."""
    with suppress(OSError):
        ensure_folder(run.proofs)
        names = [int(path.stem) for path in run.proofs.glob("*.json") if path.stem.isdecimal()]
        file = run.proofs / f"{max(names, default=0) + 1}.json"
        proof = replace(proof, file=str(file))
        write_json(file, {"time": time.time(), **proof.to_dict()})
        return proof
    return replace(proof, file="")


def plan_replay(composed: ComposedConfig, run: RunPaths) -> RunPlan:
    """Return the plan of a replay: without saves, loggers, samples and shipped callbacks.

    Shipped callbacks only watch; a user's may do anything, and stay.

    Raises:
        TrainctlError: The configuration is not legal, or a scheduler would have to run it.
    """
    config = composed.config
    if not config.trains_itself:
        raise TrainctlError(
            f"{run.root} trains by a program of its own, whose tensors trainctl does not see",
            hint="prove replays runs of trainctl's own trainer",
        )
    if has_scheduler(config):
        raise TrainctlError(
            f"launcher.kind={config.launcher.kind} hands launches to a scheduler, and a proof "
            "waits for its replays",
            hint="run it inside a job, or on one machine with launcher=local",
        )
    shipped = list_shipped("callbacks")
    quiet = replace(
        config,
        callbacks={n: keys for n, keys in config.callbacks.items() if n not in shipped},
        training=replace(config.training, sample_tokens=0, stop_after_steps=None),
        checkpoint=replace(
            config.checkpoint,
            every_steps=None,
            every_minutes=None,
            at_end=False,
            best_of=None,
            weights_only_every_steps=None,
            compare_replay=False,
        ),
        logging=replace(
            config.logging, to=[], alerts=AlertsConfig(), profile_steps=[], memory_phases=False
        ),
        launcher=replace(config.launcher, max_restarts=0),
    )
    planned = plan_config(
        replace(composed, config=quiet),
        with_files=True,
        tokenize=True,
        folder=user_code_folder(config, run),
    )
    if planned.unforceable_errors:
        raise TrainctlError.from_findings(planned.findings)
    return planned.plan


def _check_comparable(plan: RunPlan, changed: RunPlan) -> None:
    """Refuse a change of the samples of a step: then every tensor differs, and rightly.

    Raises:
        TrainctlError: The change is of the global batch or the sequence length.
    """
    for key in ("global_batch_size", "sequence_length"):
        was, now = (getattr(each.batch, key) for each in (plan, changed))
        if was != now:
            raise TrainctlError(
                f"training.{key} is {now} with the change, and it was {was}: a step has other "
                "samples, so nothing can be compared",
                hint=f"keep training.{key}={was}",
            )


def _choose_checkpoint(
    run: RunPaths, plan: RunPlan, steps: int, wanted: int | None
) -> CheckpointInfo:
    """Return the checkpoint to replay from.

    Raises:
        TrainctlError: There is none, or none with so many steps before the end (exit code 5).
    """
    there = list_checkpoints(run)
    last = plan.total_steps - steps
    fitting = [info for info in there if info.step <= last and wanted in (None, info.step)]
    if fitting:
        return fitting[-1]
    known = ", ".join(str(info.step) for info in there)
    message = (
        f"{run.root} has no checkpoint with {_count_steps(steps)} left before step {last + steps:,}"
    )
    if wanted is not None and wanted not in {info.step for info in there}:
        message = f"{run.root} has no complete checkpoint of step {wanted}"
    raise TrainctlError(
        message,
        hint=f"steps with a checkpoint: {known or 'none'}; --steps replays fewer of them",
        exit_code=ExitCode.run_state,
    )


def _differing_versions(python: Path) -> dict[str, tuple[str, str]]:
    """Return the packages whose versions differ between this environment and another.

    Raises:
        TrainctlError: The interpreter cannot import trainctl and torch (exit code 4).
    """
    question = (
        "import json; from importlib import metadata\n"
        "import trainctl, torch\n"
        f"print(json.dumps([metadata.version(name) for name in {PACKAGES!r}]))"
    )
    found = []
    for each in (Path(sys.executable), python):
        try:
            answer = subprocess.run(
                [each, "-P", "-c", question], capture_output=True, text=True, check=True
            )
        except (OSError, subprocess.CalledProcessError) as error:
            said = str(getattr(error, "stderr", "") or error).strip().splitlines()
            raise TrainctlError(
                f"{each} cannot be used for a replay: {said[-1] if said else error}",
                hint="name the Python of an environment in which trainctl is installed",
                exit_code=ExitCode.environment,
            ) from None
        found.append(json.loads(answer.stdout))
    return {n: (a, b) for n, a, b in zip(PACKAGES, *found, strict=True) if a != b}


class Replays:
    """Replays of a run from one checkpoint, in a temporary folder beside the run."""

    def __init__(self, run: RunPaths, checkpoint: CheckpointInfo, steps: int, say: Say) -> None:
        self._run, self._checkpoint, self._steps, self._say = run, checkpoint, steps, say

    def __enter__(self) -> Self:
        beside = self._run.root.parent
        where = beside if os.access(beside, os.W_OK) else None  # links need the same file system
        self._folder = Path(tempfile.mkdtemp(prefix=".prove-", dir=where))
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def replay(
        self, what: str, plan: RunPlan, *, reorder: bool = False, python: Path | None = None
    ) -> Recording:
        """Replay the steps by a plan, and return what its ranks recorded.

        Args:
            what: How they are replayed, for messages.
            reorder: Add the terms of matrix products in another order.
            python: Interpreter of another environment.

        Raises:
            RunFailed: The replay failed.
        """
        self._say(f"replaying {_count_steps(self._steps)} {what}")
        folder = self._folder / str(len(list(self._folder.iterdir())))
        stop = self._checkpoint.step + self._steps
        plan = replace(plan, stop_step=stop)
        copy = copy_run(self._run, self._checkpoint, folder, plan.config)
        request_recording(copy, RecordingSettings(reorder=reorder))
        run_replay(copy, plan, what, of=self._run.root, python=python)
        return read_recording(copy)


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
            exit_code=ExitCode(code) if code in set(ExitCode) else ExitCode.training_failed,
            path=of,
            cause=outcome.cause,
            log=None,
            log_tail=outcome.log_tail,
        )


def copy_run(
    run: RunPaths, checkpoint: CheckpointInfo, folder: Path, config: RunConfig
) -> RunPaths:
    """Make a run directory that has one checkpoint of a run, with its files linked.

    It keeps the run's id, which the checkpoint names.
    """
    copy = RunPaths(folder)
    here = copy.checkpoints / checkpoint_name(checkpoint.step)
    for each in (copy.root, copy.checkpoints, here, copy.attempts):
        ensure_folder(each)
    write_text(copy.config, dump_config(config))
    for file in (run.record, run.corpus):
        if file.is_file():
            shutil.copy(file, copy.root)
    linked = [run.base, run.reference, *checkpoint.path.iterdir()]
    for file in (each for each in linked if each.is_file()):
        place = here if file.parent == checkpoint.path else copy.root
        _link(file, place / file.name)
    if run.users_corpus.is_dir():
        shutil.copytree(run.users_corpus, copy.users_corpus, copy_function=_link)
    return copy


def _count_steps(count: int) -> str:
    return "1 step" if count == 1 else f"{count} steps"


def _link(file: str | Path, place: str | Path) -> None:
    """Link a file. A hard link outlives the checkpoint, which a live run may rotate away."""
    try:
        Path(place).hardlink_to(file)
    except OSError:  # another file system, or another user's file
        Path(place).symlink_to(file)
