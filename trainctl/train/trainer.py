"""The training loop."""

from __future__ import annotations

import math
import time

from trainctl.errors import ExitCode, TrainctlError
from trainctl.plan.schedule import learning_rate_factor
from trainctl.runs import checkpoints
from trainctl.runs.records import EventWriter
from trainctl.train.checkpoint import save
from trainctl.train.evaluation import evaluate, sample_text
from trainctl.train.session import Session, seed_step


class Trainer:
    """Trains a session to the plan's stopping step.

    Args:
        session: The assembled rank.
        events: Writer of the records; only the first rank has one.
    """

    def __init__(self, session: Session, events: EventWriter | None) -> None:
        self._session = session
        self._events = events
        self._saved_at = time.monotonic()
        self._saved_step = session.progress.step
        self._metrics: dict[str, float] = {}
        self._best = self._best_so_far()

    def train(self) -> None:
        """Run the loop: step, evaluate, save, until the plan's stopping step."""
        session = self._session
        plan, progress, training = session.plan, session.progress, session.plan.config.training
        self._record_start()
        while progress.step < plan.stop_step:
            started = time.monotonic()
            loss, grad_norm, factor = self._step()
            self._record(
                "step",
                step=progress.step,
                loss=loss,
                learning_rate=plan.config.optimizer.lr * factor,
                grad_norm=grad_norm,
                tokens=progress.tokens,
                tokens_per_second=plan.batch.tokens_per_step / (time.monotonic() - started),
                samples=[progress.samples - plan.batch.global_batch_size, progress.samples],
            )
            self._metrics = {}
            last = progress.step == plan.stop_step
            every = training.evaluate_every_steps
            if last or (every is not None and progress.step % every == 0):
                self._evaluate()
            if self._save_is_due(last):
                self._save()
        self._sample()
        done = progress.step >= plan.total_steps
        self._record("end", step=progress.step, reason="complete" if done else "stop_after_steps")

    def _step(self) -> tuple[float, float, float]:
        """One optimizer step: the loss, the gradient norm, and the learning rate's factor."""
        session = self._session
        plan, progress = session.plan, session.progress
        seed_step(plan.config.training.seed, progress.step, session.process.rank)
        batches = session.training.step(progress.samples)
        loss, _ = session.engine.accumulate(batches)
        if not math.isfinite(loss):  # summed over the ranks: all of them see it, before the update
            first, end = progress.samples, progress.samples + plan.batch.global_batch_size
            raise TrainctlError(
                f"the loss of step {progress.step + 1} is {loss} (samples {first} to {end})",
                hint="the weights were not updated; resume goes on from the last checkpoint",
                exit_code=ExitCode.training_failed,
            )
        factor = learning_rate_factor(
            plan.config.schedule,
            progress.step,
            total_steps=plan.total_steps,
            warmup_steps=plan.warmup_steps,
        )
        grad_norm = session.engine.update(factor)
        progress.step += 1
        progress.samples += plan.batch.global_batch_size
        progress.tokens += plan.batch.tokens_per_step
        return loss, grad_norm, factor

    def _evaluate(self) -> None:
        session = self._session
        loss = evaluate(
            session.engine,
            session.process,
            session.held_out,
            num_samples=session.plan.config.training.evaluation_samples,
            micro_batch_size=session.plan.batch.micro_batch_size,
            data_rank=session.training.data_rank,
            data_size=session.training.data_size,
        )
        if loss is not None:
            self._metrics = {"loss": loss}
            self._record(
                "evaluation",
                step=session.progress.step,
                loss=loss,
                unigram_entropy=session.corpus.unigram_entropy,
            )

    def _save_is_due(self, last: bool) -> bool:
        config, step = self._session.plan.config.checkpoint, self._session.progress.step
        if step == self._saved_step:
            return False
        minutes = (time.monotonic() - self._saved_at) / 60
        return self._session.process.any(
            (last and config.at_end)
            or (config.every_steps is not None and step % config.every_steps == 0)
            or (config.every_minutes is not None and minutes >= config.every_minutes)
            or self._metrics.get(config.best_of or "", math.inf) < self._best
        )

    def _save(self) -> None:
        session = self._session
        config = session.plan.config
        started = time.monotonic()
        path = save(
            session.run,
            session.process,
            session.state,
            session.progress,
            shapes=session.shapes,
            metrics=self._metrics,
            layout={"zero_stage": config.zero_stage.stage, "data": session.plan.mesh.data},
            corpus_digest=session.corpus.digest,
        )
        self._saved_at, self._saved_step = time.monotonic(), session.progress.step
        self._best = min(self._best, self._metrics.get(config.checkpoint.best_of or "", math.inf))
        self._record(
            "checkpoint",
            step=session.progress.step,
            path=str(path.relative_to(session.run.root)),
            seconds=self._saved_at - started,
        )
        if session.process.is_first:
            checkpoints.rotate(
                session.run, keep=config.checkpoint.keep, best_of=config.checkpoint.best_of
            )

    def _best_so_far(self) -> float:
        metric = self._session.plan.config.checkpoint.best_of or ""
        saved = checkpoints.list_checkpoints(self._session.run)
        return min((info.metrics.get(metric, math.inf) for info in saved), default=math.inf)

    def _sample(self) -> None:
        session = self._session
        training = session.plan.config.training
        if training.sample_tokens == 0:
            return
        text = sample_text(
            session.engine,
            session.tokenizer,
            prompt=training.sample_prompt,
            num_tokens=training.sample_tokens,
            window=training.sequence_length,
            seed=training.seed,
        )
        self._record("sample", step=session.progress.step, text=text)

    def _record_start(self) -> None:
        session = self._session
        resumed_from = session.resumed_from
        self._record(
            "start",
            step=session.progress.step,
            total_steps=session.plan.total_steps,
            stop_step=session.plan.stop_step,
            world_size=session.process.world_size,
            num_parameters=session.num_parameters,
            wrapped_blocks=session.wrapped_blocks,
            train_tokens=session.corpus.train.tokens,
            held_out_tokens=session.corpus.held_out.tokens,
            unigram_entropy=session.corpus.unigram_entropy,
            resumed_from=resumed_from.name if resumed_from else None,
        )

    def _record(self, event: str, **fields: object) -> None:
        if self._events is not None:
            self._events.write(event, **fields)
