"""The training loop."""

from __future__ import annotations

import math
import socket
import time
from contextlib import suppress
from dataclasses import asdict
from functools import partial

from trainctl.data.corpora import bad_text, corpus_digests, unigram_entropy
from trainctl.data.packing import load_bins
from trainctl.engines.stopwatch import PhaseMemory
from trainctl.errors import TrainctlError
from trainctl.options.objective import objective_of
from trainctl.plan.average import METRIC
from trainctl.plan.identity import description
from trainctl.plan.mixture import StagedBatches, stages_of_plan
from trainctl.plan.mup import multipliers
from trainctl.plan.precision import formats
from trainctl.plan.schedule import Curve
from trainctl.readers.remote import say
from trainctl.runs import checkpoints
from trainctl.runs.heartbeats import Heartbeat, Phase
from trainctl.runs.records import EventWriter
from trainctl.runs.requests import Request, pending_requests, withdraw_request
from trainctl.train.checkpoint.saver import Saver
from trainctl.train.evaluation import (
    HeldOutLoss,
    evaluate_sources,
    inference,
    sampled_ids,
)
from trainctl.train.models.model import TORCH_TYPES
from trainctl.train.objectives.reference import attach_reference
from trainctl.train.prefetch import BatchPrefetcher
from trainctl.train.profiler import Profiler
from trainctl.train.prompts import Prompts, prompts_of
from trainctl.train.session import Session
from trainctl.train.step import Step, Stepper
from trainctl.train.stragglers import Stragglers
from trainctl.train.throughput import Throughput, memory_record, peak_bytes

STEADY_AFTER_STEPS = 2
"""Steps until memory is compared: the first allocates what stays, the second has all of it."""


class Trainer:
    """Training loop of a session, up to the plan's stopping step.

    Args:
        events: Writer of the records; None on ranks other than the first.
        heartbeat: Tells the agent what this rank is doing; None where no agent watches.
        attempt: Number of the attempt, whose folder gets the profile.
    """

    def __init__(
        self,
        session: Session,
        events: EventWriter | None,
        heartbeat: Heartbeat | None = None,
        *,
        attempt: int = 1,
    ) -> None:
        self._session = session
        self._events = events
        self._heartbeat = heartbeat
        self._times = session.engine.times
        if session.plan.config.logging.memory_phases:
            self._times.memory = PhaseMemory(session.process.device)
        self._throughput = Throughput(session.plan)
        self._stragglers = Stragglers(session.plan, session.process)
        self._curve = Curve.of(session.plan)
        self._attempt = attempt
        saves = session.plan.config.checkpoint.saves_something
        self._stable_end = self._curve.stable_end if saves else None
        self._recorded_at = time.monotonic()
        self._profiler = Profiler(
            session.plan.config.logging,
            rank=session.process.rank,
            folder=session.run.attempt(attempt).profile,
            device=session.process.device,
        )
        self._saved_at = time.monotonic()
        self._metrics: dict[str, float] = {}
        self._prompts: Prompts
        self._asked: list[tuple[str, list[int]]] = []
        config = session.plan.config
        self._saver = Saver(
            session.run,
            session.process,
            session.state,
            config.checkpoint,
            TORCH_TYPES[formats(config.precision).weights],
            session.saved_buffers,
        )
        self._origin = {
            "run": checkpoints.own_id(session.run) or "",
            "model": description(config.model, session.shapes),
            "multipliers": multipliers(config.model),
            **session.beside,
        }
        self._batches = BatchPrefetcher(
            session.training,
            StagedBatches(stages_of_plan(session.plan)),
            stop_step=session.plan.stop_step,
            device=session.process.device,
        )
        self._stepper = Stepper(session, self._batches, self._record, self._before_rewind)
        self._best = self._best_so_far()
        for stream in session.training.streams:
            stream.notify = self._tell_stream

    def train(self) -> None:
        """Make steps, evaluate and save until the plan's stopping step or a request to stop."""
        with self._profiler, self._batches, self._times.watch_stalls():
            self._train()

    def _train(self) -> None:
        session = self._session
        plan, progress, training = session.plan, session.progress, session.plan.config.training
        if session.process.is_first:
            checkpoints.leave_weights_behind(session.run, progress.step, attempt=self._attempt)
        if training.sample_tokens:  # a prompt that the template refuses fails before the first step
            self._prompts = prompts_of(plan.config.data, session.tokenizer)
            self._asked = [(text, self._prompts.ids(text)) for text in training.sample_prompts]
        reference = attach_reference(session, partial(self._beat, Phase.start))
        self._record_start()
        if reference is not None:
            self._record("reference", step=progress.step, **reference)
        steady = progress.step + STEADY_AFTER_STEPS
        self._recorded_at = time.monotonic()
        stop = False
        while not stop and progress.step < plan.stop_step:
            try:
                with self._profiler.step(progress.step + 1):
                    started = time.monotonic()
                    step = self._stepper.make()
                    seconds = time.monotonic() - started
            except TrainctlError:
                # All ranks stop here together, so the checkpoint being written can be completed.
                self._finish_saving()
                raise
            self._beat(Phase.step)
            parts = self._seconds()
            self._stragglers.add(seconds, parts, self._times.take_busy())
            self._record(
                "step",
                step=progress.step,
                loss=step.loss,
                learning_rate=plan.peak_lr * step.factor,
                learning_rates=session.engine.learning_rates(),
                grad_norm=step.grad_norm,
                **step.extras(),
                **self._precision_record(step),
                tokens=progress.tokens,
                **self._throughput.of_step(seconds, step.batch),
                seconds=parts,
                peak_bytes=peak_bytes(session.process.device, self._times.memory),
                samples=[step.first_sample, progress.samples],
                **self._drawn(step),
            )
            if step.intervention is None:
                verdict = session.divergence.see(step.loss, progress.step)
                if verdict is not None:
                    rate = plan.peak_lr * step.factor
                    self._record("divergence", learning_rate=rate, **verdict)
            self._record_profile()
            self._metrics = {}
            last = progress.step == plan.stop_step
            if progress.step == steady:
                self._record_memory(at_end=False)
            every = training.evaluate_every_steps
            if last or (every is not None and progress.step % every == 0):
                self._evaluate()
            save_is_due, stop = self._decide(last)
            if save_is_due:
                self._save()
            weights = plan.config.checkpoint.weights_only_every_steps
            if weights is not None and progress.step % weights == 0:
                self._save(weights_only=True)
        self._beat(Phase.end)
        self._record_memory(at_end=True)
        no_improvement = session.patience.is_exhausted
        done = progress.step >= plan.stop_step or no_improvement
        if done:
            self._sample()
        self._beat(Phase.end, "saving a checkpoint")
        self._finish_saving()
        complete = progress.step >= plan.total_steps
        reason = "complete" if complete else "stop_after_steps" if done else "stop_requested"
        if no_improvement and not complete:
            reason = "no_improvement"
        why = {}
        if no_improvement:
            why = {**session.patience.state(), "min_delta": plan.config.training.stop_min_delta}
        self._record("end", step=progress.step, reason=reason, **why)

    def _evaluate(self) -> None:
        session = self._session
        found = self._held_out_loss()
        if found is not None:
            loss = found.loss
            self._metrics = {"loss": loss}
            if session.average is not None:
                with session.average.average_parameters():
                    of_average = self._held_out_loss()
                assert of_average is not None
                self._metrics[METRIC] = of_average.loss
            session.patience.see(loss, session.progress.step)
            is_entropy = objective_of(session.plan.config.objective).is_entropy
            self._record(
                "evaluation",
                step=session.progress.step,
                **self._metrics,
                **({"objective": found.measures} if found.measures else {}),
                **({"unigram_entropy": unigram_entropy(session.corpora)} if is_entropy else {}),
                **({"sources": found.sources} if session.plan.config.data.sources else {}),
            )
            dropped = session.learning_rate.see(loss, session.progress.step)
            if dropped is not None:
                self._record("plateau", step=session.progress.step, loss=loss, **dropped)

    def _held_out_loss(self) -> HeldOutLoss | None:
        """Evaluate the held-out samples with the model's current weights; on all ranks together."""
        session = self._session
        with self._times.host_part("evaluation"), inference(session.engine.module):
            found = evaluate_sources(
                session.engine.score,
                session.held_out,
                num_samples=session.plan.config.training.evaluation_samples,
                recorded=objective_of(session.plan.config.objective).recorded,
                micro_batch_size=session.plan.batch.micro_batch_size,
                data_rank=session.training.data_rank,
                data_size=session.training.data_size,
                sum_over_ranks=session.process.sum,
                progress=lambda *_: self._beat(Phase.evaluate),
            )
        self._beat(Phase.step)
        return found

    def _decide(self, last: bool) -> tuple[bool, bool]:
        """Return whether to save and whether to stop now: the same on all ranks, by one all-reduce.

        The all-reduce also carries the ranks' own times, at the end of a window of steps.
        """
        session = self._session
        config, step = session.plan.config.checkpoint, session.progress.step
        minutes = (time.monotonic() - self._saved_at) / 60
        asked = pending_requests(session.run) if session.process.is_first else set()
        no_improvement = session.patience.is_exhausted
        due = (
            bool(asked)
            or ((last or no_improvement) and config.at_end)
            or step == self._stable_end
            or (config.every_steps is not None and step % config.every_steps == 0)
            or (config.every_minutes is not None and minutes >= config.every_minutes)
            or self._metrics.get(config.best_of or "", math.inf) < self._best
        )
        ends = Request.stop in asked or no_improvement
        save, stop, failed, *window = session.process.sum(
            float(due),
            float(ends),
            float(self._saver.has_failed),
            *self._stragglers.window(),
        )
        for straggler in self._stragglers.judge(window, step):
            self._record("straggler", **straggler)
        if failed:
            self._saver.wait()  # raises
        self._record_saved()
        for request in asked:
            withdraw_request(session.run, request)
        return save > 0, stop > 0

    def _save(self, *, weights_only: bool = False) -> None:
        session = self._session
        config, progress = session.plan.config, session.progress
        self._beat(Phase.save)
        scale = session.engine.loss_scale
        with self._times.host_part("checkpoint"):
            self._saver.save(
                {
                    "step": progress.step,
                    "attempt": self._attempt,
                    "weights_only": weights_only,
                    "kept_for": "stable_phase" if progress.step == self._stable_end else "",
                    "patience": session.patience.state(),
                    "samples": progress.samples,
                    "tokens": progress.tokens,
                    # JSON has no NaN or infinity.
                    "metrics": {k: v for k, v in self._metrics.items() if math.isfinite(v)},
                    "layout": {
                        "zero_stage": config.zero_stage.stage,
                        **asdict(session.plan.mesh),
                    },
                    "loss_scale": scale.state() if scale is not None else {},
                    "stability": session.guard.state(),
                    "divergence": session.divergence.state(),
                    "norms": session.norms.state(),
                    "ema": session.average.saved() if session.average is not None else {},
                    "learning_rate": session.learning_rate.state(),
                    **corpus_digests(session.corpora),
                    "shapes": session.shapes,
                    **self._origin,
                }
            )
        if not weights_only:
            self._saved_at = time.monotonic()
            metric = self._metrics.get(config.checkpoint.best_of or "", math.inf)
            self._best = min(self._best, metric)
        self._record_saved()
        self._beat(Phase.step)

    def _finish_saving(self) -> None:
        """Wait until the checkpoint being written is committed."""
        self._saver.wait()
        self._record_saved()

    def _before_rewind(self) -> None:
        """Wait for the checkpoint being written, which the rewind may read.

        The heartbeat says `save`, a slow phase, because reading a checkpoint may take long.
        """
        self._beat(Phase.save)
        self._finish_saving()

    def _record_saved(self) -> None:
        """Record each checkpoint committed since the last call."""
        for saved in self._saver.take_saved():
            self._record(
                "weights" if saved.weights_only else "checkpoint",
                step=saved.step,
                path=str(saved.path.relative_to(self._session.run.root)),
                seconds=saved.seconds,
                stall_seconds=saved.stall_seconds,
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
        self._beat(Phase.end, "sampling text")
        if not training.sample_prompts:
            ids = session.tokenizer.encode(training.sample_prompt).tolist() or [0]
            drawn = self._generate(ids, temperature=0.8)
            text = session.tokenizer.decode([*ids, *drawn])
            self._record("sample", step=session.progress.step, text=text)
        for prompt, ids in self._asked:  # greedy decoding
            text = session.tokenizer.decode(self._generate(ids))
            self._record("sample", step=session.progress.step, prompt=prompt, text=text)

    def _generate(self, ids: list[int], *, temperature: float = 0.0) -> list[int]:
        """Generate a continuation of the prompt `ids`; on all ranks together."""
        session = self._session
        training = session.plan.config.training
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
            )

    def _tell_stream(self, message: str) -> None:
        """Report which data this rank waits for, in its log and in the run's events."""
        say(message)
        run = self._session.run
        with suppress(OSError), EventWriter(run.events, self._attempt) as writer:
            writer.write("corpus", message=message, host=socket.gethostname())

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
            num_trained=session.num_trained,
            wrapped_blocks=session.wrapped_blocks,
            **self._text(),
            resumed_from=resumed_from.name if resumed_from else None,
            ema_begins=session.average_begins,
            passed_over=session.passed_over,
        )

    def _text(self) -> dict[str, object]:
        """Return the start record's fields about the corpora."""
        corpora = self._session.corpora
        each = {
            name: {
                "train_tokens": corpus.train.tokens,
                "held_out_tokens": corpus.held_out.tokens,
            }
            for name, corpus in corpora.items()
        }
        bad, config = bad_text(corpora), self._session.plan.config
        chats = {
            name: dict(bins.counts)
            for name, corpus in corpora.items()
            if corpus.is_marked and (bins := load_bins(config, corpus, corpus.train))
        }
        return {
            "train_tokens": sum(corpus.train.tokens for corpus in corpora.values()),
            "held_out_tokens": sum(corpus.held_out.tokens for corpus in corpora.values()),
            "unigram_entropy": unigram_entropy(corpora),
            **({"sources": each} if config.data.sources else {}),
            **({"conversations": chats} if chats else {}),
            **({"bad_text": bad} if bad else {}),
        }

    def _drawn(self, step: Step) -> dict[str, object]:
        """Return the step record's samples per source; empty without `data.sources`."""
        session = self._session
        if not session.plan.config.data.sources:
            return {}
        end = step.first_sample + step.batch.global_batch_size
        return {"sources": session.training.source_draws(step.first_sample, end)}

    def _precision_record(self, step: Step) -> dict[str, object]:
        """Return whether the last update was skipped, and the next step's fp16 loss scale."""
        engine = self._session.engine
        skipped = engine.was_skipped or step.intervention is not None
        found: dict[str, object] = {"skipped": True} if skipped else {}
        if engine.loss_scale is not None:
            found["loss_scale"] = engine.loss_scale.value
        return found

    def _seconds(self) -> dict[str, float]:
        """Return where the time since the last step's record went; `total` is all of it.

        A save and an evaluation follow the record of their step, so their time is in the next one.
        """
        now = time.monotonic()
        total, self._recorded_at = now - self._recorded_at, now
        parts = {"total": total, **self._times.take()}
        return {name: round(seconds, 6) for name, seconds in parts.items()}

    def _record_memory(self, *, at_end: bool) -> None:
        """Record the fullest rank's peak memory beside the planned one; on all ranks together."""
        session = self._session
        record = memory_record(session.plan, session.process, self._times.memory)
        self._record("memory", step=session.progress.step, at_end=at_end, **record)

    def _record_profile(self) -> None:
        if self._profiler.take_written():
            self._record(
                "profile",
                step=self._session.progress.step,
                path=str(self._profiler.folder.relative_to(self._session.run.root)),
            )

    def _beat(self, phase: Phase, doing: str = "") -> None:
        if self._heartbeat is not None:
            self._heartbeat.beat(phase, self._session.progress.step, doing)

    def _record(self, event: str, **fields: object) -> None:
        if self._events is not None:
            self._events.write(event, **fields)
