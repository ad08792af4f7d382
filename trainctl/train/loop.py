"""Training of a rank: its lifecycle, and the loop of steps with the callbacks between them."""

from __future__ import annotations

import socket
import time
import warnings
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from trainctl.data.corpora import bad_text, unigram_entropy
from trainctl.data.packing import load_bins
from trainctl.engines import patch_checks
from trainctl.engines.process import nondeterminism_error, stop_process
from trainctl.engines.protocol import engine_backend
from trainctl.engines.stopwatch import PhaseMemory
from trainctl.errors import TrainctlError
from trainctl.options.data import SampleKind
from trainctl.options.objective import objective_of
from trainctl.plans.mixture import StagedBatches, stages_of_plan
from trainctl.plans.types import RunPlan
from trainctl.readers.remote import print_notice
from trainctl.runs.layout import RunPaths
from trainctl.runs.manifest import UNFINISHED
from trainctl.runs.processes import full_collections_at_steps, gc_disabled
from trainctl.runs.records import EventWriter
from trainctl.runs.status import Heartbeat, Phase
from trainctl.train.callbacks.checkpoints import unfinished_hooks
from trainctl.train.callbacks.context import Journal, StepState
from trainctl.train.callbacks.evaluation import EvaluationStopped
from trainctl.train.callbacks.order import callbacks_of_run
from trainctl.train.data import BatchPrefetcher
from trainctl.train.objectives.preferences import attach_reference
from trainctl.train.parallel.experts import product_in_force
from trainctl.train.session import Session, assemble
from trainctl.train.step import Stepper

if TYPE_CHECKING:
    from trainctl.train.rollouts.steps import RolloutData


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
        self._session, plan = session, session.plan
        self._times = session.engine.times
        if plan.config.logging.memory_phases:
            self._times.memory = PhaseMemory(session.process.device)
        self._journal = Journal(session, session.run, attempt, events, heartbeat)
        self._now = StepState(session.progress.step)
        self._callbacks, self._checkpoints = callbacks_of_run(session, self._now, self._journal)
        self._batches = self._step_data()
        self._stepper = Stepper(
            session,
            self._batches,
            self._now,
            self._callbacks,
            self._journal.record,
            self._checkpoints.before_rewind,
        )
        self._recorded_at = time.monotonic()
        for stream in session.training.streams:
            stream.notify = self._tell_stream

    def _step_data(self) -> BatchPrefetcher | RolloutData:
        """Return the source of the steps' micro-batches: the corpus, or answers to its prompts."""
        session, plan = self._session, self._session.plan
        if objective_of(plan.config.objective).takes is SampleKind.prompts:
            from trainctl.train.rollouts.steps import RolloutData

            session.rollouts = RolloutData(session, self._journal)
            return session.rollouts
        return BatchPrefetcher(
            session.training,
            StagedBatches(stages_of_plan(plan)),
            stop_step=plan.stop_step,
            device=session.process.device,
        )

    def train(self) -> None:
        """Make steps until the plan's stopping step, a callback's decision or a request to stop."""
        try:
            with (
                self._batches,
                self._times.watch_stalls(),
                full_collections_at_steps() as collect_garbage,
            ):
                self._start()
                collect_garbage(0)
                stop = self._finish_last_step()
                while not stop and self._session.progress.step < self._session.plan.stop_step:
                    self._make_step()
                    collect_garbage(self._session.progress.step)
                    self._callbacks.call("after_step")
                    self._now.unfinished = self._callbacks.long_hooks(self._now.step)
                    if self._callbacks.has_long_hooks(self._now.step):
                        self._checkpoints.save_before_long_hooks()
                    stop = self._finish_step()
                self._end()
        except BaseException as error:
            with suppress(Exception):  # the error that came first counts
                if isinstance(error, Exception):  # threads of all ranks write, or fail together
                    self._checkpoints.finish()
            with suppress(Exception):
                self._callbacks.close()
            raise
        self._callbacks.close()

    def _make_step(self) -> None:
        """Make the next step, and measure it."""
        started = time.monotonic()
        with self._times.step():
            step = self._stepper.make()
        now = self._now
        now.made, now.loss, now.grad_norm, now.factor = step, step.loss, step.grad_norm, step.factor
        now.step, now.metrics, now.saves = self._session.progress.step, {}, False
        now.step_seconds = time.monotonic() - started
        now.seconds = self._seconds()

    def _finish_last_step(self) -> bool:
        """Run the hooks that the checkpoint was saved before; return True to stop.

        Those of the end follow at the end.
        """
        now, manifest = self._now, self._session.manifest
        left = unfinished_hooks(manifest)
        now.unfinished = left & self._callbacks.all_long_hooks
        if all(hook == "on_train_end" for _, hook in left):
            return False
        facts = manifest[UNFINISHED]
        now.loss, now.grad_norm = facts.get("loss"), facts.get("grad_norm")
        now.factor, now.metrics = facts.get("factor", 0.0), dict(manifest["metrics"])
        now.saves = True
        return self._finish_step()

    def _finish_step(self) -> bool:
        """Run the long hooks of the step and bring its checkpoint up to date; return True to stop.

        An evaluation that the run stops leaves them all to the resume.
        """
        try:
            self._callbacks.call_long("after_step")
            stop = self._agree()
        except EvaluationStopped:
            self._checkpoints.save_unless_saved()
            return True
        except TrainctlError as error:
            if error.is_of_all_ranks:
                self._checkpoints.save_unless_saved()
            raise
        if self._now.is_stopping and not stop:  # a hook after the agreement was told to return
            self._checkpoints.save_unless_saved()
            stop = True
        self._checkpoints.amend()
        return stop

    def _agree(self) -> bool:
        """Decide by one all-reduce whether to save and to stop now; return True to stop.

        The all-reduce also carries the numbers that callbacks want to be summed.
        """
        now = self._now
        numbers = self._callbacks.before_agreement()
        asked = [float(now.should_save), float(now.should_stop), float(now.should_finish)]
        save, stop, finish, *sums = self._session.process.sum(
            *asked, *(n for s in numbers for n in s)
        )
        now.should_save = now.should_stop = now.should_finish = False
        at_end = self._session.plan.config.checkpoint.at_end
        now.saves |= save > 0 or (finish > 0 and at_end)
        now.is_done, now.is_stopping = finish > 0, now.is_stopping or stop > 0
        if now.is_done:  # the first rank records it, whichever asked
            now.end = next(filter(None, self._session.process.gather(now.end)))
        rest = iter(sums)
        self._callbacks.after_agreement([[next(rest) for _ in own] for own in numbers])
        return stop > 0 or finish > 0

    def _start(self) -> None:
        session = self._session
        reference = attach_reference(session, partial(self._journal.beat, Phase.start))
        self._record_start()
        if reference is not None:
            self._journal.record("reference", step=session.progress.step, **reference)
        if session.resumed_from is not None:
            self._callbacks.restore(session.manifest)
        self._callbacks.call("on_train_start")
        self._times.take()  # `seconds` begins with the first step
        self._recorded_at = time.monotonic()

    def _end(self) -> None:
        now, plan, step = self._now, self._session.plan, self._session.progress.step
        is_complete, is_at_stop = step >= plan.total_steps, step >= plan.stop_step
        now.is_done |= is_at_stop and not now.is_stopping
        self._callbacks.call("on_train_end")
        self._callbacks.call_long("on_train_end")
        self._checkpoints.amend()
        self._checkpoints.finish()
        is_at_stop &= not now.unfinished
        reason = "complete" if is_complete else "stop_after_steps"
        end = {"reason": reason if is_at_stop else "stop_requested", **now.end}
        if is_complete and is_at_stop:
            end["reason"] = reason
        self._journal.record("end", step=step, **end)

    def _tell_stream(self, message: str) -> None:
        """Report which data this rank waits for, in its log and in the run's events."""
        print_notice(message)
        run = self._session.run
        with suppress(OSError), EventWriter(run.events, self._journal.attempt) as writer:
            writer.write("corpus", message=message, host=socket.gethostname())

    def _seconds(self) -> dict[str, float]:
        """Return where the time since the last step's record went; `total` is all of it.

        A save and an evaluation follow the record of their step, so their time is in the next one.
        """
        now = time.monotonic()
        total, self._recorded_at = now - self._recorded_at, now
        parts = {"total": total, **self._times.take()}
        return {name: round(seconds, 6) for name, seconds in parts.items()}

    def _record_start(self) -> None:
        session = self._session
        resumed_from = session.resumed_from
        self._journal.record(
            "start",
            step=session.progress.step,
            total_steps=session.plan.total_steps,
            stop_step=session.plan.stop_step,
            world_size=session.process.world_size,
            num_parameters=session.num_parameters,
            num_trained=session.num_trained,
            wrapped_blocks=session.wrapped_blocks,
            expert_products=product_in_force(session.engine.module),
            **self._text(),
            resumed_from=resumed_from.name if resumed_from else None,
            ema_begins=session.average_begins,
            passed_over=session.skipped_checkpoints,
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


def train_rank(plan: RunPlan, run: RunPaths, attempt: int, heartbeat: Heartbeat) -> None:
    """Train this rank as the plan says.

    Raises:
        TrainctlError: The user can act on it; any other exception is a bug or a failing device.
    """
    # DeepSpeed calls collectives by deprecated names, of which newer torch warns at every call.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    heartbeat.beat(Phase.start, doing="joining the other ranks")
    with gc_disabled():  # this imports the engine
        patch_checks.require_original_definitions(plan.config)
    process = engine_backend(plan).start_process(plan)
    heartbeat.beat(Phase.start, doing="building the model and its engine")
    try:
        session = assemble(plan, run, process, partial(heartbeat.beat, Phase.start, None))
        events = EventWriter(run.events, attempt) if process.is_first else None
        Trainer(session, events, heartbeat, attempt=attempt).train()
    except RuntimeError as error:
        explained = nondeterminism_error(error)
        if explained is None:
            raise
        raise explained from error
    heartbeat.beat(Phase.end)
    # In this order: DeepSpeed's threads use the process groups, and exiting with them alive aborts.
    process.barrier()
    session.engine.close()
    stop_process()
