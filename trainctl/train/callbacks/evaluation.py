"""Evaluation on held-out samples during training, and what follows from its loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from trainctl.config.schema import TrainingConfig
from trainctl.data.corpora import unigram_entropy
from trainctl.options.callbacks import Callback, Context
from trainctl.options.objective import objective_of
from trainctl.plan.settings import EMA_METRIC
from trainctl.runs.heartbeats import Phase
from trainctl.train.callbacks.context import Journal, StepState
from trainctl.train.evaluation import HeldOutLoss, evaluate_sources, inference
from trainctl.train.learning_rate import LearningRate
from trainctl.train.patience import Patience
from trainctl.train.session import Session


class Evaluation(Callback):
    """Evaluates the held-out samples every `training.evaluate_every_steps`, and at the end.

    Args:
        publish: Calls `on_evaluate` of all callbacks, once the evaluation is recorded.
    """

    def __init__(
        self, session: Session, now: StepState, journal: Journal, publish: Callable[[], None]
    ) -> None:
        self._session, self._now, self._journal = session, now, journal
        self._publish = publish

    def after_step(self, context: Context) -> None:
        every = self._session.plan.config.training.evaluate_every_steps
        is_last = context.step == self._session.plan.stop_step
        if is_last or (every is not None and context.step % every == 0):
            self._evaluate(context.step)

    def _evaluate(self, step: int) -> None:
        session = self._session
        config = session.plan.config
        found = self._held_out_loss()
        if found is None:
            return
        self._now.metrics = {"loss": found.loss}
        if session.average is not None:
            with session.average.average_parameters():
                of_average = self._held_out_loss()
            assert of_average is not None
            self._now.metrics[EMA_METRIC] = of_average.loss
        is_entropy = objective_of(config.objective).is_entropy
        self._journal.record(
            "evaluation",
            step=step,
            **self._now.metrics,
            **({"objective": found.measures} if found.measures else {}),
            **({"unigram_entropy": unigram_entropy(session.corpora)} if is_entropy else {}),
            **({"sources": found.sources} if config.data.sources else {}),
        )
        self._publish()

    def _held_out_loss(self) -> HeldOutLoss | None:
        """Evaluate the held-out samples with the model's current weights; on all ranks together."""
        session = self._session
        with session.engine.times.host_part("evaluation"), inference(session.engine.module):
            found = evaluate_sources(
                session.engine.score,
                session.held_out,
                num_samples=session.plan.config.training.evaluation_samples,
                recorded=objective_of(session.plan.config.objective).recorded,
                micro_batch_size=session.plan.batch.micro_batch_size,
                data_rank=session.training.data_rank,
                data_size=session.training.data_size,
                sum_over_ranks=session.process.sum,
                progress=lambda *_: self._journal.beat(Phase.evaluate),
            )
        self._journal.beat(Phase.step)
        return found


class Plateau(Callback):
    """Drops the learning rate where the schedule waits for the held-out loss."""

    def __init__(self, learning_rate: LearningRate, journal: Journal) -> None:
        self._learning_rate, self._journal = learning_rate, journal

    def on_evaluate(self, context: Context) -> None:
        loss = context.metrics["loss"]
        dropped = self._learning_rate.see(loss, context.step)
        if dropped is not None:
            self._journal.record("plateau", step=context.step, loss=loss, **dropped)


class EarlyStopping(Callback):
    """Ends the run after `training.stop_patience` evaluations without a lower held-out loss."""

    def __init__(self, training: TrainingConfig, now: StepState) -> None:
        self._training, self._now = training, now
        self.after_load({})

    def on_evaluate(self, context: Context) -> None:
        self._patience.see(context.metrics["loss"], context.step)

    def after_step(self, context: Context) -> None:
        if self._patience.is_exhausted:
            context.request_stop()
            min_delta = self._training.stop_min_delta
            why = {**self._patience.state(), "min_delta": min_delta}
            self._now.end = {"reason": "no_improvement", **why}

    def before_save(self) -> Mapping[str, Any]:
        return self._patience.state()

    def after_load(self, state: Mapping[str, Any]) -> None:
        limit, min_delta = self._training.stop_patience, self._training.stop_min_delta
        self._patience = Patience(limit, state, min_delta=min_delta)
