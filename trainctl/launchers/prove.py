"""Proof of a change: steps of a run are replayed as recorded and with the change, and compared."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from trainctl.config.compose import ComposedConfig, recompose
from trainctl.config.schema import DataType, RunConfig
from trainctl.errors import MachineError, RunStateError, TrainctlError
from trainctl.launchers.comparison import (
    Comparison,
    StepComparison,
    TensorDifference,
    Verdict,
    compare,
)
from trainctl.launchers.replay import (
    RecordedResult,
    Replays,
    Say,
    count_steps,
    plan_replay,
    recorded_steps,
    write_result,
)
from trainctl.options.precision import precision_of
from trainctl.plans.shapes import head_dim
from trainctl.plans.types import RunPlan
from trainctl.runs.attempts import config_of
from trainctl.runs.checkpoints import CheckpointInfo, list_checkpoints
from trainctl.runs.layout import RunPaths
from trainctl.runs.recording import Recording, read_recording
from trainctl.runs.replays import RecordingSettings

UNITS = {DataType.fp32: 2.0**-23, DataType.fp16: 2.0**-10, DataType.bf16: 2.0**-7}
"""Spacing of the numbers of a format next to 1."""
_FP8_UNIT = 2.0**-3
"""Spacing of float8_e4m3, which has three bits of mantissa."""

PACKAGES = ("trainctl", "torch", "deepspeed", "transformers")


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof(RecordedResult):
    """Result of a proof."""

    run: str
    changes: tuple[str, ...]
    """Overrides of the second replay; empty if the same was replayed again."""
    verdict: Verdict
    first: TensorDifference | None
    """First difference above rounding in the order of computation; None without one."""
    steps: tuple[StepComparison, ...]
    """Comparison of each replayed step."""
    tensors: int
    """Number of tensors compared."""
    versions: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Packages of the two replays whose versions differ."""
    file: str = ""
    """The file with this result; empty if the run's directory cannot be written."""

    @property
    def is_good(self) -> bool:
        return self.verdict is not Verdict.differs and self.reproduces is not False

    @property
    def sentence(self) -> str:
        """The verdict in words."""
        if self.first is not None:
            return f"differs, first in the {self.first}"
        what = f"{self.tensors:,} tensors of {count_steps(len(self.steps))}"
        if self.verdict is Verdict.equal:
            return f"equal bit for bit: {what}"
        return f"within rounding: {what}"


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
    comparison = _compare_replays(
        run, found, (plan, changed), steps=steps, is_again=not changes, say=say, python=python
    )
    made = {each.step: each for each in comparison.steps}
    proof = Proof(
        run=str(run.root),
        checkpoint=found.step,
        changes=tuple(changes),
        verdict=comparison.verdict,
        first=comparison.first,
        steps=comparison.steps,
        tensors=comparison.tensors,
        record=recorded_steps(
            run,
            {step: each.loss for step, each in made.items()},
            lambda step: made[step].differences["loss"].expected,
        ),
        versions=versions,
    )
    return replace(proof, file=write_result(run, proof.to_dict()))


def _compare_replays(
    run: RunPaths,
    checkpoint: CheckpointInfo,
    plans: tuple[RunPlan, RunPlan],
    *,
    steps: int,
    is_again: bool,
    say: Say,
    python: Path | None,
) -> Comparison:
    """Replay the steps by both plans and in other orders of sums, and compare what was recorded.

    Args:
        plans: As recorded, and with the change.
        is_again: Whether there is no change.
        python: Interpreter of another environment for the second plan.
    """
    plan, changed = plans
    with Replays(run, checkpoint) as replays:

        def replay(what: str, plan: RunPlan, **how: Any) -> Recording:
            say(f"replaying {count_steps(steps)} {what}")
            request = RecordingSettings(reorder=how.pop("reorder", False))
            stop = checkpoint.step + steps
            return read_recording(replays.launch(what, plan, request, stop_step=stop, **how))

        recorded = replay("as recorded", plan)
        reordered = [(recorded, replay("in another order of sums", plan, reorder=True))]
        other = replay("again" if is_again else "with the change", changed, python=python)
        formats = [precision_of(each.config.precision).format for each in plans]
        if formats[0] is not formats[1]:
            what = "with the change, in another order of sums"
            reordered.append((other, replay(what, changed, python=python, reorder=True)))
    model = plan.config.model
    return compare(
        recorded,
        other,
        reordered,
        unit=max(UNITS.get(each, _FP8_UNIT) for each in formats),
        head_dim=None if model.is_module else head_dim(model),
        tokens=plan.batch.tokens_per_step,
    )


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
        run, configure, changes=changes, steps=1, checkpoint=checkpoint, attempt=attempt, say=say
    )
    say(proof.sentence)
    if proof.exit_code:
        what = proof.sentence if proof.first else "it does not reproduce its recorded losses"
        raise TrainctlError(
            f"{run.root} was not resumed: {what}",
            hint=f"{proof.file or 'the result'} has every step; resume without --prove goes on",
            exit_code=proof.exit_code,
        )


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
        f"{run.root} has no checkpoint with {count_steps(steps)} left before step {last + steps:,}"
    )
    if wanted is not None and wanted not in {info.step for info in there}:
        message = f"{run.root} has no complete checkpoint of step {wanted}"
    raise RunStateError(
        message, hint=f"steps with a checkpoint: {known or 'none'}; --steps replays fewer of them"
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
            raise MachineError(
                f"{each} cannot be used for a replay: {said[-1] if said else error}",
                hint="name the Python of an environment in which trainctl is installed",
            ) from None
        found.append(json.loads(answer.stdout))
    return {n: (a, b) for n, a, b in zip(PACKAGES, *found, strict=True) if a != b}
