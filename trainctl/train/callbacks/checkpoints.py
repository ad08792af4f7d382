"""Checkpoints: when they are due, what is in their manifests, and their records."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from trainctl.data.corpora import corpus_digests
from trainctl.options.callbacks import Callback, Context
from trainctl.plans.schedule import Curve
from trainctl.plans.settings import number_formats
from trainctl.runs import checkpoints
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

    def on_train_start(self, context: Context) -> None:
        if self._session.process.is_first:
            step = self._session.progress.step
            checkpoints.archive_later_weights(
                self._session.run, step, attempt=self._journal.attempt
            )

    def after_step(self, context: Context) -> None:
        config, step, now = self._config, context.step, self._now
        is_first = self._session.process.is_first
        self._requests = pending_requests(self._session.run) if is_first else set()
        now.should_stop |= Request.stop in self._requests
        minutes = (time.monotonic() - self._saved_at) / 60
        is_last = step == self._session.plan.stop_step
        now.should_save |= (
            bool(self._requests)
            or (is_last and config.at_end)
            or step == self._stable_end
            or (config.every_steps is not None and step % config.every_steps == 0)
            or (config.every_minutes is not None and minutes >= config.every_minutes)
            or now.metrics.get(config.best_of or "", math.inf) < self._best
        )

    def before_agreement(self, context: Context) -> Sequence[float]:
        self._now.should_save |= self._now.should_finish and self._config.at_end
        return [float(self._saver.has_failed)]

    def after_agreement(self, context: Context, sums: Sequence[float]) -> None:
        if sums[0]:
            self._saver.wait()  # raises
        self._record_saved()
        for request in self._requests:
            withdraw_request(self._session.run, request)
        if self._now.saves:
            self._save()
        every = self._config.weights_only_every_steps
        if every is not None and context.step % every == 0:
            self._save(weights_only=True)

    def on_train_end(self, context: Context) -> None:
        self._journal.beat(Phase.end, "saving a checkpoint")
        self.finish()

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

    def _save(self, *, weights_only: bool = False) -> None:
        metrics = self._now.metrics
        self._journal.beat(Phase.save)
        states = self._states()
        with self._session.engine.times.host_part("checkpoint"):
            self._saver.save(self._manifest(states, weights_only=weights_only))
        if not weights_only:
            self._saved_at = time.monotonic()
            self._best = min(self._best, metrics.get(self._config.best_of or "", math.inf))
        self._record_saved()
        self._journal.beat(Phase.step)

    def _manifest(self, states: dict[str, Any], *, weights_only: bool) -> dict[str, Any]:
        session, metrics = self._session, self._now.metrics
        progress, scale = session.progress, session.engine.loss_scale
        return {
            "step": progress.step,
            "attempt": self._journal.attempt,
            "weights_only": weights_only,
            "kept_for": "stable_phase" if progress.step == self._stable_end else "",
            "samples": progress.samples,
            "tokens": progress.tokens,
            # JSON has no NaN or infinity.
            "metrics": {k: v for k, v in metrics.items() if math.isfinite(v)},
            "layout": {
                "zero_stage": session.plan.config.zero_stage.stage,
                **asdict(session.plan.mesh),
            },
            "loss_scale": scale.state() if scale is not None else {},
            "stability": session.guard.state(),
            "norms": session.norms.state(),
            "ema": session.average.saved() if session.average is not None else {},
            "learning_rate": session.learning_rate.state(),
            **({"rollouts": session.rollouts.phase_name} if session.rollouts else {}),
            **corpus_digests(session.corpora),
            "shapes": session.shapes,
            **self._origin,
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
