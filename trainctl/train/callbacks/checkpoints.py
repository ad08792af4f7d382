"""Checkpoints: when they are due, what is in their manifests, and their records."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from trainctl.data.corpora import corpus_digests
from trainctl.options.callbacks import Callback, Context
from trainctl.plans.schedule import Curve
from trainctl.plans.settings import number_formats
from trainctl.runs import checkpoints
from trainctl.runs.manifest import UNFINISHED
from trainctl.runs.status import Phase, Request, pending_requests, withdraw_request
from trainctl.train.callbacks.context import Journal, StepState
from trainctl.train.checkpoint.save import Saver
from trainctl.train.models.model import TORCH_TYPES
from trainctl.train.session import Session


class Checkpoints(Callback):
    """Saves when the plan, a request or a callback asks for it; answers requests to stop.

    Args:
        states: Returns the manifest entries of all callbacks.
    """

    def __init__(
        self,
        session: Session,
        now: StepState,
        journal: Journal,
        states: Callable[[], dict[str, Any]],
    ) -> None:
        self._session, self._now, self._journal, self._states = session, now, journal, states
        config = session.plan.config
        self._config = config.checkpoint
        stable_end = Curve.of(session.plan).stable_end
        self._stable_end = stable_end if self._config.saves_something else None
        self._saver = Saver(
            session.run,
            session.process,
            session.state,
            self._config,
            TORCH_TYPES[number_formats(config.precision).weights],
            session.saved_buffers,
        )
        self._origin = session.origin
        self._saved_at = time.monotonic()
        self._best = self._best_so_far()
        self._requests: set[Request] = set()
        self._saved: dict[bool, tuple[int, set[tuple[str, str]]]] = {}
        """Step of the last checkpoint and of the last weights-only one, and the hooks that it names
        as unfinished.
        """

    def on_train_start(self, context: Context) -> None:
        session = self._session
        if session.process.is_first:
            step = session.progress.step
            checkpoints.archive_later_weights(session.run, step, attempt=self._journal.attempt)
        if session.resumed_from is not None:
            named = unfinished_hooks(session.manifest)
            self._saved = dict.fromkeys((False, True), (session.progress.step, named))

    def save_before_long_hooks(self) -> None:
        """Save the checkpoint that is due before the step's long hooks; on all ranks together.

        Raises:
            TrainctlError: The checkpoint, or the one before, could not be saved.
        """
        flags = self._is_due(), self._saver.has_failed, Request.stop in self._requests
        due, failed, stop = self._session.process.sum(*map(float, flags))
        self._now.is_stopping = stop > 0
        self._save_all(due=due > 0, failed=failed > 0)

    def before_agreement(self, context: Context) -> Sequence[float]:
        now, is_due = self._now, self._is_due()
        now.should_save |= is_due or (
            now.metrics.get(self._config.best_of or "", math.inf) < self._best
        )
        now.should_stop |= now.is_stopping or Request.stop in self._requests
        return [float(self._saver.has_failed)]

    def after_agreement(self, context: Context, sums: Sequence[float]) -> None:
        self._save_all(due=self._now.saves, failed=sums[0] > 0)

    def on_train_end(self, context: Context) -> None:
        self._journal.beat(Phase.end, "saving a checkpoint")
        self.finish()

    def close(self) -> None:
        if self._now.is_stopping and self._session.process.is_first:
            withdraw_request(self._session.run, Request.stop)

    def save_unless_saved(self) -> None:
        """Save the step unless it has a checkpoint, and wait for it; on all ranks together."""
        if not self._has_saved():
            self._save()
        self.finish()

    def amend(self) -> None:
        """Update what the step's checkpoint says about the long hooks that have run since."""
        now = self._now
        for weights_only, (step, named) in self._saved.items():
            if step == now.step and named != now.unfinished:
                self._saved[weights_only] = step, set(now.unfinished)
                self._saver.amend(step, self._amended(self._states()), weights_only=weights_only)
                self._best = min(self._best, now.metrics.get(self._config.best_of or "", math.inf))

    def _has_saved(self, *, weights_only: bool = False) -> bool:
        step, _ = self._saved.get(weights_only, (None, None))
        return step == self._now.step

    def _is_due(self) -> bool:
        """Return True if this rank wants a checkpoint of the step; reads the requests."""
        config, step = self._config, self._now.step
        is_first = self._session.process.is_first
        self._requests = pending_requests(self._session.run) if is_first else set()
        minutes = (time.monotonic() - self._saved_at) / 60
        return (
            bool(self._requests)
            or (step == self._session.plan.stop_step and config.at_end)
            or step == self._stable_end
            or (config.every_steps is not None and step % config.every_steps == 0)
            or (config.every_minutes is not None and minutes >= config.every_minutes)
        )

    def _save_all(self, *, due: bool, failed: bool) -> None:
        """Save the checkpoints of the step that are due and not saved yet."""
        if failed:
            self._saver.wait()  # raises
        self._record_saved()
        for request in self._requests:
            withdraw_request(self._session.run, request)
        if due and not self._has_saved():
            self._save()
        every = self._config.weights_only_every_steps
        is_due = every is not None and self._now.step % every == 0
        if is_due and not self._has_saved(weights_only=True):
            self._save(weights_only=True)
        self._now.saves |= self._has_saved()

    def finish(self) -> None:
        """Wait until the checkpoint being written is committed."""
        self._saver.wait()
        self._record_saved()

    def before_rewind(self) -> None:
        """Wait for the checkpoint being written, which the rewind may read.

        The heartbeat says `save`, a slow phase, because reading a checkpoint may take long.
        """
        self._journal.beat(Phase.save)
        self.finish()
        self._saved.clear()  # the steps are made again

    def _save(self, *, weights_only: bool = False) -> None:
        metrics = self._now.metrics
        self._journal.beat(Phase.save)
        states = self._states()
        with self._session.engine.times.host_part("checkpoint"):
            self._saver.save(self._manifest(states, weights_only=weights_only))
        self._saved[weights_only] = self._now.step, set(self._now.unfinished)
        if not weights_only:
            self._saved_at = time.monotonic()
            self._best = min(self._best, metrics.get(self._config.best_of or "", math.inf))
        self._record_saved()
        self._journal.beat(Phase.step)

    def _manifest(self, states: dict[str, Any], *, weights_only: bool) -> dict[str, Any]:
        session = self._session
        progress, scale = session.progress, session.engine.loss_scale
        return {
            "step": progress.step,
            "attempt": self._journal.attempt,
            "weights_only": weights_only,
            "kept_for": "stable_phase" if progress.step == self._stable_end else "",
            "samples": progress.samples,
            "tokens": progress.tokens,
            "layout": {
                "zero_stage": session.plan.config.zero_stage.stage,
                **asdict(session.plan.mesh),
            },
            "loss_scale": scale.state() if scale is not None else {},
            "stability": session.guard.state(),
            "norms": session.norms.state(),
            "ema": session.average.saved() if session.average is not None else {},
            **({"rollouts": session.rollouts.phase_name} if session.rollouts else {}),
            **corpus_digests(session.corpora),
            "shapes": session.shapes,
            **self._origin,
            **self._amended(states),
        }

    def _amended(self, states: dict[str, Any]) -> dict[str, Any]:
        """Return the entries of a manifest that long hooks change, as they are now."""
        now = self._now
        facts = {"loss": now.loss, "grad_norm": now.grad_norm, "factor": now.factor}
        left = {"hooks": sorted(now.unfinished), **_finite(facts)} if now.unfinished else {}
        return {
            "metrics": _finite(now.metrics),
            "learning_rate": self._session.learning_rate.state(),
            UNFINISHED: left,
            **states,
        }

    def _record_saved(self) -> None:
        """Record each checkpoint committed since the last call."""
        for saved in self._saver.take_saved():
            if not saved.weights_only:
                self._now.written.append(saved.files)
            self._journal.record(
                "weights" if saved.weights_only else "checkpoint",
                step=saved.step,
                path=str(saved.path.relative_to(self._session.run.root)),
                seconds=saved.seconds,
                stall_seconds=saved.stall_seconds,
            )

    def _best_so_far(self) -> float:
        saved = checkpoints.list_checkpoints(self._session.run)
        metric = self._config.best_of or ""
        return min((info.metrics.get(metric, math.inf) for info in saved), default=math.inf)


def unfinished_hooks(manifest: Mapping[str, Any]) -> set[tuple[str, str]]:
    """Return the long hooks that a checkpoint was saved before, by callback and hook."""
    return {(name, hook) for name, hook in manifest.get(UNFINISHED, {}).get("hooks", ())}


def _finite(values: Mapping[str, float | None]) -> dict[str, float]:
    """Return the values that JSON can hold."""
    return {k: v for k, v in values.items() if v is not None and math.isfinite(v)}
