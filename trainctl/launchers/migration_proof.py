"""Certified migration: steps that another trainer logged are made again from its checkpoint here.

The checkpoint is imported into a temporary run, which trains as far as the losses that are
compared. Nothing is written where the other trainer saved.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

from trainctl.config.compose import ComposedConfig
from trainctl.config.reading import read_json
from trainctl.errors import TrainctlError
from trainctl.launchers.offline import import_checkpoint
from trainctl.launchers.processes import signals_raise
from trainctl.launchers.replay import ReplayResult, Say, count_steps, plan_replay, run_replay
from trainctl.migration.logged_losses import (
    LoggedCheckpoint,
    LoggedLoss,
    find_logged_checkpoint,
    no_loss_after,
)
from trainctl.plans.schedule import Curve
from trainctl.plans.settings import replay_tolerance
from trainctl.plans.types import RunPlan
from trainctl.runs.files import temporary_folder
from trainctl.runs.layout import RunPaths
from trainctl.runs.records import Progress, number, steps_from_end

_FP32_SPACING = 2.0**-23
_RATE_TOLERANCE = 1e-6
"""Relative difference of two equal learning rates, of which one may be rounded to fp32."""


class MigrationVerdict(StrEnum):
    """Verdict on logged losses that were made again."""

    equal = "equal"
    """Equal to the digits that were logged, or to the spacing of fp32."""
    rounding = "within rounding"
    differs = "differs"
    incomparable = "not comparable"
    """The first loss differs, and must: samples or dropout are not those of the other trainer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedLoss:
    """A logged loss beside that of the same steps here."""

    first: int
    last: int
    logged: float
    replayed: float
    allowed: float
    """Difference that rounding explains, in nats."""
    learning_rates: tuple[float, float] | None
    """Logged learning rate and that of the configuration; None if none was logged."""
    grad_norms: tuple[float, float] | None
    """Logged gradient norm of the last step and that of the replay; None if none was logged."""
    verdict: MigrationVerdict

    @property
    def difference(self) -> float:
        return abs(self.replayed - self.logged)

    @property
    def same_rate(self) -> bool:
        """Whether the learning rates agree, or none was logged."""
        return self.learning_rates is None or _agree(*self.learning_rates)


@dataclass(frozen=True, slots=True, kw_only=True)
class MigrationProof(ReplayResult):
    """Result of a proof of a migration."""

    source: str
    """Directory of the checkpoint that was replayed."""
    format: str
    log: str
    """File of the logged losses."""
    verdict: MigrationVerdict
    steps: tuple[ReplayedLoss, ...]
    reasons: tuple[str, ...]
    """Explanations of the differences, or where to look for one."""
    notes: tuple[str, ...]
    """Remarks of the import on what is unknown or different."""

    @property
    def is_good(self) -> bool:
        return self.verdict in (MigrationVerdict.equal, MigrationVerdict.rounding)

    @property
    def sentence(self) -> str:
        """The verdict in words."""
        count, worst = len(self.steps), max(self.steps, key=lambda each: each.difference)
        what = f"{count} logged loss{'es' if count > 1 else ''} after step {self.checkpoint:,}"
        return f"{self.verdict.value}: {what}, largest difference {worst.difference:.2g}"


def prove_migration(
    directory: Path,
    composed: ComposedConfig,
    *,
    log: Path | None,
    steps: int,
    say: Say,
    progress: Progress,
) -> MigrationProof:
    """Import a checkpoint, make the steps after it that its trainer logged, and compare losses.

    Args:
        directory: The folder that the other trainer saved in, or that of one checkpoint.
        composed: The configuration that is to continue the run.
        log: File of the logged losses; None takes the longest `trainer_state.json` there.
        steps: Number of logged losses to compare.

    Raises:
        TrainctlError: No loss was logged after a checkpoint; the checkpoint cannot be imported; or
            the configuration is not legal.
        RunFailed: The replay failed.
    """
    found = find_logged_checkpoint(directory, log, steps)
    with signals_raise(), temporary_folder() as folder:
        run = RunPaths(folder / "run")
        imported = import_checkpoint(found.path, run.root, composed, progress=progress)
        wanted = found.after(imported["step"])[:steps]
        if not wanted:
            raise no_loss_after(found.log, found.losses, f"step {imported['step']}")
        plan = _plan(composed, run, wanted[-1].last)
        count = count_steps(wanted[-1].last - imported["step"])
        say(f"replaying {count} after step {imported['step']:,}")
        run_replay(run, plan, "of logged steps", of=found.path)
        records = steps_from_end(run.events, range(imported["step"] + 1, wanted[-1].last + 1))
    return judge(found, wanted, records, plan, imported)


def _plan(composed: ComposedConfig, run: RunPaths, last: int) -> RunPlan:
    """Return the plan that trains as far as a step.

    Raises:
        TrainctlError: The configuration is not legal, or ends before.
    """
    plan = plan_replay(composed, run)
    if plan.total_steps < last:
        raise TrainctlError(
            f"the configuration ends after {plan.total_steps:,} steps, and the loss of step "
            f"{last:,} is to be compared",
            hint="training.steps is the last step of the whole run, those of the other trainer "
            "included",
        )
    return replace(plan, stop_step=last)


def judge(
    found: LoggedCheckpoint,
    wanted: Sequence[LoggedLoss],
    records: Mapping[int, Mapping[str, Any]],
    plan: RunPlan,
    imported: Mapping[str, Any],
) -> MigrationProof:
    """Compare logged losses with records of the same steps.

    Args:
        records: Records of the steps here, by step.
    """
    compared = tuple(_compared(each, records, plan) for each in wanted)
    other_samples = None
    if compared[0].verdict is MigrationVerdict.differs:  # otherwise the samples were the same
        other_samples = _other_samples(found, plan)
    return MigrationProof(
        source=str(found.path),
        format=imported["format"],
        checkpoint=imported["step"],
        log=str(found.log),
        verdict=_overall(compared, incomparable=other_samples is not None),
        steps=compared,
        reasons=tuple(_reasons(compared, found, other_samples)),
        notes=tuple(imported["notes"]),
    )


def _compared(
    logged: LoggedLoss, records: Mapping[int, Mapping[str, Any]], plan: RunPlan
) -> ReplayedLoss:
    """Compare a logged loss with the mean over the same steps here."""
    window = [records[step] for step in range(logged.first, logged.last + 1)]
    replayed = fmean(number(each["loss"]) for each in window)
    size = abs(logged.loss)
    allowed = replay_tolerance(plan.config.precision) * size + logged.rounding
    difference = abs(replayed - logged.loss)
    verdict = MigrationVerdict.differs
    if difference <= max(logged.rounding, _FP32_SPACING * size):
        verdict = MigrationVerdict.equal
    elif difference <= allowed:
        verdict = MigrationVerdict.rounding
    norms = None
    if logged.grad_norm is not None and "grad_norm" in window[-1]:
        norms = logged.grad_norm, number(window[-1]["grad_norm"])
    return ReplayedLoss(
        first=logged.first,
        last=logged.last,
        logged=logged.loss,
        replayed=replayed,
        allowed=allowed,
        learning_rates=_rates(logged, plan),
        grad_norms=norms,
        verdict=verdict,
    )


def _rates(logged: LoggedLoss, plan: RunPlan) -> tuple[float, float] | None:
    """Return the logged rate and the nearer one of the configuration's for that step and the next.

    Trainer logs the rate of the step since version 5, that of the step after it before.
    """
    if logged.learning_rate is None:
        return None
    there, curve = logged.learning_rate, Curve.of(plan)
    here = [plan.peak_lr * curve.factor(done) for done in (logged.last - 1, logged.last)]
    return there, min(here, key=lambda rate: abs(rate - there))


def _agree(there: float, here: float) -> bool:
    return math.isclose(there, here, rel_tol=_RATE_TOLERANCE)


def _overall(compared: Sequence[ReplayedLoss], *, incomparable: bool) -> MigrationVerdict:
    verdicts = {each.verdict for each in compared}
    if MigrationVerdict.differs in verdicts:
        return MigrationVerdict.incomparable if incomparable else MigrationVerdict.differs
    if not all(each.same_rate for each in compared):
        return MigrationVerdict.differs
    is_equal = verdicts == {MigrationVerdict.equal}
    return MigrationVerdict.equal if is_equal else MigrationVerdict.rounding


def _other_samples(found: LoggedCheckpoint, plan: RunPlan) -> str | None:
    """Return why a step here must have another loss than there; None if nothing says so."""
    if plan.config.data.shuffle:
        return (
            "data.shuffle=true orders samples as trainctl does and no other trainer, so each loss "
            "is of other samples (data.shuffle=false keeps the order of the files)"
        )
    file = found.path / "config.json"
    config = read_json(file) if file.is_file() else {}
    drops = {
        key: value
        for key, value in config.items()
        if key.endswith(("dropout", "pdrop")) and isinstance(value, int | float) and value > 0
    }
    if drops:
        named = ", ".join(f"{key}={value:g}" for key, value in drops.items())
        return f"the model drops out at random there ({named}), and other numbers are drawn here"
    return None


def _reasons(
    compared: Sequence[ReplayedLoss], found: LoggedCheckpoint, other_samples: str | None
) -> list[str]:
    """Return what explains the differences, or where to look for it."""
    reasons = []
    is_different = [each.verdict is MigrationVerdict.differs for each in compared]
    if other_samples is not None:
        logged = [each.loss for each in found.losses[-100:]]
        reasons += [
            other_samples,
            f"over these steps the mean loss is {fmean(e.replayed for e in compared):.4f} here and "
            f"{fmean(e.logged for e in compared):.4f} there; the last {len(logged)} logged losses "
            f"have a standard deviation of {pstdev(logged):.2g}",
        ]
    for each in compared:
        if not each.same_rate:
            assert each.learning_rates is not None
            there, here = each.learning_rates
            reasons.append(
                f"the learning rate of step {each.last:,} is {here:.6g} here and was {there:.6g}: "
                "optimizer.lr, or the schedule"
            )
            break
    if other_samples is None and any(is_different):
        reasons.append(_where_to_look(compared, is_different.index(True)))
    if any(each.last > each.first for each in compared):
        reasons.append("the log has means over several steps: a difference may be of any of them")
    return reasons


def _where_to_look(compared: Sequence[ReplayedLoss], first: int) -> str:
    here = compared[first]
    if first > 0:
        before = compared[first - 1].last
        return (
            f"the losses up to step {before:,} agree, so the weights and samples of "
            f"step {before:,} are the same, and its update is another: learning rate, betas, "
            "epsilon, weight decay, clipping, or the optimizer's states"
        )
    if here.last > here.first:
        return f"the first mean, of steps {here.first:,} to {here.last:,}, differs already"
    return (
        "the first loss differs already, before any update: other weights or samples (Trainer "
        "shuffles unless train_sampling_strategy=sequential), dropout, another loss function "
        "or another model configuration"
    )
