"""Evaluation on held-out samples, what follows from its loss, and text sampled at the end."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

from trainctl.config.schema import TrainingConfig
from trainctl.data.corpora import unigram_entropy
from trainctl.engines.micro_batch import MicroBatch
from trainctl.options.callbacks import Callback, Context
from trainctl.options.objective import objective_of
from trainctl.plans.settings import EMA_METRIC
from trainctl.runs.status import Phase
from trainctl.train.callbacks.context import Journal, StepState
from trainctl.train.evaluation import (
    HeldOutLoss,
    evaluate_sources,
    inference,
    prompts_of,
    sampled_ids,
    scored_together,
)
from trainctl.train.learning_rate import LearningRate, Patience
from trainctl.train.session import Session

PEERS_PATIENCE = timedelta(seconds=60)
"""Time that a rank whose batch failed waits for the others, which may be in theirs."""


class EvaluationStopped(Exception):
    """End of an evaluation because the run is to stop; raised on all ranks."""


class RanksFailed(Exception):
    """Failure of one rank's evaluation, known to all ranks."""


class Evaluation(Callback):
    """Evaluates the held-out samples every `training.evaluate_every_steps`, and at the end.

    Args:
        publish: Calls `on_evaluate` of all callbacks, once the evaluation is recorded.
        save: Saves the step if it has no checkpoint; on all ranks together.
    """

    def __init__(
        self,
        session: Session,
        now: StepState,
        journal: Journal,
        publish: Callable[[], None],
        save: Callable[[], None],
    ) -> None:
        self._session, self._now, self._journal = session, now, journal
        self._publish, self._save = publish, save
        self._error: Exception | None = None

    def is_due(self, step: int) -> bool:
        """Return True if the held-out samples are to be evaluated after a step."""
        training = self._session.plan.config.training
        every, is_last = training.evaluate_every_steps, step == self._session.plan.stop_step
        return training.evaluation_samples > 0 and (
            is_last or (every is not None and step % every == 0)
        )

    def after_step(self, context: Context) -> None:
        try:
            self._evaluate(context.step)
        except RanksFailed:
            self._save()
            if self._error is not None:
                raise self._error from None
            self._session.process.barrier()  # raises when the rank that failed is gone
            raise

    def _evaluate(self, step: int) -> None:
        session = self._session
        config = session.plan.config
        found = self._held_out_loss()
        if found is None:
            return
        metrics = {"loss": found.loss}
        if session.average is not None:
            with session.average.average_parameters():
                of_average = self._held_out_loss()
            if of_average is not None:  # no reward may apply to its answers
                metrics[EMA_METRIC] = of_average.loss
        self._now.metrics = metrics
        is_entropy = objective_of(config.objective).is_entropy
        self._journal.record(
            "evaluation",
            step=step,
            **metrics,
            **({"objective": found.measures} if found.measures else {}),
            **({"unigram_entropy": unigram_entropy(session.corpora)} if is_entropy else {}),
            **({"sources": found.sources} if config.data.sources else {}),
        )
        self._publish()

    def _held_out_loss(self) -> HeldOutLoss | None:
        """Evaluate the held-out samples with the model's current weights; on all ranks together."""
        session = self._session
        if session.rollouts is not None:
            samples = session.plan.config.training.evaluation_samples
            return session.rollouts.evaluate(samples, self._go_on)
        with session.engine.times.host_part("evaluation"), inference(session.engine.module):
            found = evaluate_sources(
                self._score,
                session.held_out,
                num_samples=session.plan.config.training.evaluation_samples,
                record=partial(session.engine.objective.record, session.plan.config.objective),
                micro_batch_size=session.plan.batch.micro_batch_size,
                micro_batches=scored_together(session.plan, session.training.data_size),
                data_rank=session.training.data_rank,
                data_size=session.training.data_size,
                sum_over_ranks=session.process.sum,
                progress=lambda *_: self._go_on(),
            )
        self._journal.beat(Phase.step)
        return found

    def _score(self, batches: Sequence[MicroBatch]) -> tuple[float, ...]:
        """Score micro-batches; an error waits for `_go_on`, so that the ranks stop together."""
        try:
            return self._session.engine.score(batches)
        except Exception as error:  # out of memory, or whatever a model raises
            self._error = error
            return ()

    def _go_on(self, doing: str = "") -> None:
        """Tell the agent that this rank works, and agree on going on; on all ranks together.

        Raises:
            EvaluationStopped: The run is to stop.
            RanksFailed: A rank could not score its samples.
        """
        self._journal.beat(Phase.evaluate, doing)
        process, error = self._session.process, self._error
        # The other ranks of a collective forward pass do not come here.
        patience = PEERS_PATIENCE if error is not None else None
        flags = float(self._journal.is_stop_requested()), float(error is not None)
        try:
            stop, failed = process.sum(*flags, within=patience)
        except RuntimeError:
            if error is None:
                raise
            raise error from None
        if failed:
            raise RanksFailed("the evaluation failed on another rank")
        if stop or self._now.is_stopping:
            self._now.is_stopping = True
            raise EvaluationStopped


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


class Sampling(Callback):
    """Samples `training.sample_tokens` tokens after each prompt, when training is done.

    Raises:
        TrainctlError: The chat template refuses a prompt; before the first step.
    """

    def __init__(self, session: Session, now: StepState, journal: Journal) -> None:
        self._session, self._now, self._journal = session, now, journal
        training = session.plan.config.training
        self._prompts = prompts_of(
            session.plan.config.data, session.tokenizer, corpora=session.corpora
        )
        self._chosen = [(text, self._prompts.ids(text)) for text in training.sample_prompts]

    def on_train_end(self, context: Context) -> None:
        if not self._now.is_done:
            return
        session, journal = self._session, self._journal
        journal.beat(Phase.end, "sampling text")
        samples: list[dict[str, str]] = []
        with suppress(EvaluationStopped):
            if not self._chosen:
                ids = self._prompts.text_ids(session.plan.config.training.sample_prompt)
                drawn = self._generate(context, ids, temperature=0.8)
                samples.append({"text": session.tokenizer.decode([*ids, *drawn])})
            for prompt, ids in self._chosen:  # greedy decoding
                text = session.tokenizer.decode(self._generate(context, ids))
                samples.append({"prompt": prompt, "text": text})
            for sample in samples:
                journal.record("sample", step=context.step, **sample)

    def _generate(self, context: Context, ids: list[int], *, temperature: float = 0.0) -> list[int]:
        """Generate a continuation of the prompt `ids`; on all ranks together.

        Raises:
            EvaluationStopped: The run is to stop.
        """
        session = self._session
        training = session.plan.config.training

        def go_on(*_: int) -> None:
            if context.should_stop():
                raise EvaluationStopped

        with inference(session.engine.module):
            return sampled_ids(
                session.engine.next_scores,
                ids,
                num_tokens=training.sample_tokens,
                window=training.sequence_length,
                seed=training.seed,
                vocab_size=session.tokenizer.vocab_size,
                ends=self._prompts.ends,
                temperature=temperature,
                progress=go_on,
            )
