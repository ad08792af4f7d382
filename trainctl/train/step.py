"""One optimizer step, and the intervention if it should not be made.

The gradient of a step is checked before its update. Every number that decides is a sum over all
ranks, so that all ranks decide the same. docs/stability.md says what each policy leaves behind.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from trainctl.config.schema import OnBadLoss
from trainctl.data.sample_contents import common_document, read_samples
from trainctl.engines.micro_batch import MicroBatch
from trainctl.errors import ExitCode, TrainctlError
from trainctl.plans.mixture import StagedBatches, stages_of_plan
from trainctl.plans.types import Batch
from trainctl.runs.event_descriptions import describe_document, describe_not_finite
from trainctl.runs.records import round_measured
from trainctl.train.callbacks.context import StepState
from trainctl.train.callbacks.order import Callbacks
from trainctl.train.checkpoint.content import CheckpointReader, newest_valid_checkpoint
from trainctl.train.data import BatchPrefetcher
from trainctl.train.gradients import Norms, clipped_groups, elementwise_change
from trainctl.train.models.model import fill_buffers
from trainctl.train.nonfinite import WEIGHT, NotFinite, bad_gradients, locate
from trainctl.train.parallel.routers import Load
from trainctl.train.session import Session, seed_step
from trainctl.train.stability import BadStep, BadStepKind

if TYPE_CHECKING:
    from trainctl.train.rollouts.steps import RolloutData

LISTED_SAMPLES = 64
"""Most suspected samples that a record lists."""


@dataclass(frozen=True, slots=True)
class Step:
    """Optimizer step that was counted."""

    loss: float
    """Loss over the global batch, in nats: the cross entropy alone, or the objective's loss."""
    grad_norm: float | None
    """Gradient norm before any change but centralization; None if unknown at this step."""
    group_norms: dict[str, float]
    """Gradient norm of each parameter group; empty where only DeepSpeed knows norms."""
    factor: float
    """Factor of the peak learning rates."""
    batch: Batch
    first_sample: int
    """Counter of the step's first sample."""
    clip_at: float | None = None
    """Threshold of the gradient norm if clipping is adaptive; None otherwise, or without a norm."""
    clipped_groups: dict[str, float] | None = None
    """Factors of the gradients of groups above their own limits, applied before the total norm is
    clipped; None if no group was above.
    """
    z_loss: float | None = None
    """Z-loss, which `loss` does not contain; None without one."""
    experts: Load | None = None
    """Load of the experts; None for a dense model."""
    measures: dict[str, float] = field(default_factory=dict)
    """Measures that the objective records besides the loss, by name."""
    intervention: OnBadLoss | None = None
    """Policy by which no update was made; None without an intervention."""

    def extras(self) -> dict[str, Any]:
        """Return the fields of the step record that only some runs have."""
        found = {
            "grad_norms": {name: round_measured(norm) for name, norm in self.group_norms.items()}
            or None,
            "clip_at": self.clip_at,
            "clipped_groups": self.clipped_groups,
            "z_loss": self.z_loss,
            "experts": self.experts and self.experts.record(),
            "objective": self.measures or None,
            "intervention": self.intervention and self.intervention.value,
        }
        return {name: value for name, value in found.items() if value is not None}


class Stepper:
    """Maker of a session's optimizer steps.

    Args:
        now: Facts about the step at hand, kept up to date here.
        record: Writes a record; does nothing on ranks other than the first.
        wait_for_save: Returns when no checkpoint is being written.
    """

    def __init__(
        self,
        session: Session,
        batches: BatchPrefetcher | RolloutData,
        now: StepState,
        callbacks: Callbacks,
        record: Callable[..., None],
        wait_for_save: Callable[[], None],
    ) -> None:
        self._session, self._now, self._callbacks = session, now, callbacks
        self._record, self._wait_for_save = record, wait_for_save
        self._data = batches
        self._batches = StagedBatches(stages_of_plan(session.plan))
        self._load: Load | None = None
        self._suspects_in_a_row: list[list[int]] = []

    def make(self) -> Step:
        """Make the next step that counts; skip batches and rewind the run on the way if needed.

        All ranks call it together.

        Raises:
            TrainctlError: The step cannot be made, by the policy, after too many interventions, or
                because its loss differs from the recorded one after a resume. Raised on all ranks,
                with the weights of before the step unless the engine updates early.
        """
        while True:
            step = self._attempt()
            if step is not None:
                return step

    def _attempt(self) -> Step | None:
        session = self._session
        plan, progress, engine = session.plan, session.progress, session.engine
        self._now.step, self._now.factor = (
            progress.step + 1,
            session.learning_rate.factor(progress.step),
        )
        self._callbacks.call("before_step")
        seed_step(plan.config.training.seed, progress.step, session.mesh.replicas.index)
        progress.samples, batch = self._batches.at(progress.step, progress.samples)
        engine.set_batch(batch)
        # The parts of a rollout are timed by themselves.
        with nullcontext() if session.rollouts else engine.times.host_part("data"):
            batches = self._data.take(progress.step, progress.samples)
        self._now.batches = batches
        engine.set_learning_rate(self._now.factor)
        gradients = session.gradients if session.gradients.are_visible else None
        loss, num_labels = engine.accumulate(batches, gradients)
        self._load = session.routers.take(session.process, session.mesh, num_labels)
        norms = gradients.norms(engine.sums_beside) if gradients else None
        trouble = session.guard.judge(loss, norms.total if norms else None)
        if trouble is not None:
            policy = self._intervene(trouble, batch, batches)
            if policy is OnBadLoss.skip_step:
                return self._count(loss, norms, batch, intervention=policy)
            if policy is not OnBadLoss.warn:
                return None
        if session.rollouts is not None:
            session.rollouts.check(engine.measures)
        expected = session.replay.check(progress.step + 1, loss, progress.samples)
        if expected is not None:
            self._record(
                "replay",
                step=progress.step + 1,
                loss=loss,
                expected=expected.loss,
                expected_attempt=expected.attempt,
            )
        return self._update(loss, norms, batch)

    def _update(self, loss: float, norms: Norms | None, batch: Batch) -> Step:
        session = self._session
        config, engine = session.plan.config, session.engine
        norm = norms.total if norms is not None else None
        self._look_at_gradients(loss, norms)
        clipped: dict[str, float] = {}
        if norms is not None and norms.is_finite:  # fp16 may overflow: then no update is made
            norms_now = norms
            change = elementwise_change(
                config.gradients,
                seed=config.training.seed,
                update=session.progress.step,
                scale=session.gradients.scale,
            )
            if change is not None:
                session.gradients.change(change)
                norms_now = session.gradients.norms()
            clipped = clipped_groups(norms_now.groups, session.gradients.limits)
            if clipped:
                session.gradients.scale_groups(clipped)
                norms_now = session.gradients.norms()
            norm = norms_now.total
        limit = session.norms.limit(norm)
        engine.update(norm=norm, clip_at=limit)
        is_known = norms is not None and norms.is_finite
        noted = limit if session.norms.is_adaptive and is_known else None
        step = self._count(loss, norms, batch, clip_at=noted, clipped_groups=clipped)
        if not engine.was_skipped:
            if self._load is not None:
                session.routers.balance(self._load)
            if session.average is not None:
                with engine.times.part("optimizer"):
                    session.average.update_average()
            session.guard.accept(session.progress.step, loss, norms.total if norms else None)
            if norm is not None:
                session.norms.add(norm)
        return step

    def _look_at_gradients(self, loss: float, norms: Norms | None) -> None:
        """Call the callbacks' `after_backward`, unless fp16 has overflowed and nothing follows."""
        now = self._now
        if norms is None or norms.is_finite:
            now.loss, now.grad_norm = loss, norms.total if norms is not None else None
            now.gradients_are_there = norms is not None
            self._callbacks.call("after_backward")
            now.gradients_are_there, now.batches = False, ()  # the update may want their memory

    def _count(
        self,
        loss: float,
        norms: Norms | None,
        batch: Batch,
        *,
        clip_at: float | None = None,
        clipped_groups: dict[str, float] | None = None,
        intervention: OnBadLoss | None = None,
    ) -> Step:
        progress, engine = self._session.progress, self._session.engine
        rollouts = self._session.rollouts
        step = Step(
            loss=loss,
            grad_norm=norms.total if norms is not None else engine.norm_of_update,
            group_norms=norms.groups if norms is not None else {},
            factor=self._session.learning_rate.factor(progress.step),
            batch=batch,
            first_sample=progress.samples,
            clip_at=clip_at,
            clipped_groups=clipped_groups or None,
            z_loss=engine.z_loss,
            experts=self._load,
            measures=engine.measures | (rollouts.measures if rollouts is not None else {}),
            intervention=intervention,
        )
        progress.step += 1
        progress.samples = self._end_of(batch)
        progress.tokens += batch.tokens_per_step
        return step

    def _end_of(self, batch: Batch) -> int:
        """Return the counter of the first sample behind the step's, and those it has replaced."""
        rollouts = self._session.rollouts
        replaced = rollouts.extra_samples if rollouts is not None else 0
        return self._session.progress.samples + batch.global_batch_size + replaced

    def _intervene(
        self, trouble: BadStep, batch: Batch, batches: Sequence[MicroBatch]
    ) -> OnBadLoss:
        """Apply the policy to a step that should not be made; return the policy."""
        session = self._session
        progress, guard = session.progress, session.guard
        number, first = progress.step + 1, progress.samples
        end = self._end_of(batch)
        policy = guard.policy(trouble)
        ranks, suspects = self._seen_by(trouble, batch, batches)
        where = self._discard(trouble, policy, batches)
        checkpoint, problem = None, ""
        if policy is OnBadLoss.rewind:
            self._wait_for_save()
            checkpoint = newest_valid_checkpoint(session.run, session.process)
            if checkpoint is None:
                policy, problem = OnBadLoss.stop, ", and there is no checkpoint to go back to yet"
            else:
                session.learning_rate.cut_after_rewind()
        if not guard.interventions:
            self._suspects_in_a_row = []
        # The loss of every sample may be good, and the gradient over all samples bad.
        self._suspects_in_a_row.append(suspects or list(range(first, end)))
        document = self._shared_document() if policy is OnBadLoss.stop else None
        self._record(
            "intervention",
            step=number,
            kind=trouble.kind.value,
            value=trouble.value,
            limit=trouble.limit,
            policy=policy.value,
            samples=[first, end],
            ranks=ranks,
            suspects=suspects[:LISTED_SAMPLES],
            in_a_row=guard.interventions,
            **({} if where is None else {"not_finite": where.record()}),
            **({} if document is None else {"document": document}),
            **({} if checkpoint is None else self._back_to(checkpoint)),
        )
        if policy is OnBadLoss.stop:
            raise self._stopped(trouble, number, first, end, ranks, where, document, problem)
        if policy is OnBadLoss.warn:
            return policy
        guard.intervene(number)
        if policy is OnBadLoss.skip_batch:
            progress.samples = end
        if checkpoint is not None:
            checkpoint.check(session.plan.config.model, session.shapes)
            _rewind(session, checkpoint)
            session.restore(checkpoint.manifest, rewound=True)
            self._callbacks.restore(checkpoint.manifest)
            progress.step, progress.tokens = checkpoint.progress.step, checkpoint.progress.tokens
            progress.samples = end  # also skips what led up to the bad batch (docs/stability.md)
        return policy

    def _discard(
        self, trouble: BadStep, policy: OnBadLoss, batches: Sequence[MicroBatch]
    ) -> NotFinite | None:
        """Clear the gradients unless they are used; return what holds values that are not finite.

        None if all values are finite, or if only another process has the gradients.
        """
        session = self._session
        searches = not trouble.kind.is_finite and session.gradients.are_visible
        gradients = bad_gradients(session) if searches else []
        if searches or policy not in (OnBadLoss.warn, OnBadLoss.stop):
            session.engine.discard()
        if not searches:
            return None
        return locate(
            session, batches, gradients, in_loss=trouble.kind is BadStepKind.loss_not_finite
        )

    def _shared_document(self) -> dict[str, Any] | None:
        """Return the document that all batches of interventions in a row contain, if there is one.

        All ranks call it together.
        """
        session, batches = self._session, self._suspects_in_a_row
        if len(batches) < 2:
            return None
        found: dict[str, Any] | None = None
        if session.process.is_first:
            # A failing search must not hide the error itself.
            with suppress(OSError, ValueError, TrainctlError):
                found = self._look_for_document(batches)
        return session.process.broadcast_from_first(found)

    def _look_for_document(self, batches: Sequence[list[int]]) -> dict[str, Any] | None:
        session = self._session
        read = partial(
            read_samples, session.plan, session.corpora, session.tokenizer, most_characters=1
        )
        shared = common_document([read(counters[:LISTED_SAMPLES]) for counters in batches])
        if shared is None:
            return None
        source, passage = shared
        return {
            "source": source,
            "document": passage.document,
            "file": passage.file,
            "line": passage.line,
            "batches": len(batches),
        }

    def _back_to(self, checkpoint: CheckpointReader) -> dict[str, Any]:
        """Build the rewind fields of the intervention record."""
        left = self._session.learning_rate.cut
        cut = {} if left == 1.0 else {"lr_factor": left}
        return {"to_step": checkpoint.progress.step, **cut}

    def _seen_by(
        self, trouble: BadStep, batch: Batch, batches: Sequence[MicroBatch]
    ) -> tuple[list[int], list[int]]:
        """Find the ranks whose own loss is bad, and their sample counters. Both are often empty."""
        session = self._session
        engine, mesh = session.engine, session.mesh
        labels = sum(each.num_counted for each in batches) / session.plan.mesh.sequence_parts
        mean = engine.summed_loss / max(1.0, labels)
        limit = math.inf if trouble.limit is None else trouble.limit
        is_bad = mesh.pipeline.is_last and (
            not math.isfinite(mean) or (trouble.kind.quantity == "loss" and mean > limit)
        )
        counters = session.training.counters(session.progress.samples, batch)
        seen = session.process.gather(counters.flatten().tolist() if is_bad else None)
        ranks = [rank for rank, found in enumerate(seen) if found is not None]
        return ranks, sorted(set().union(*(found for found in seen if found is not None)))

    def _stopped(
        self,
        trouble: BadStep,
        number: int,
        first: int,
        end: int,
        ranks: list[int],
        where: NotFinite | None,
        document: Mapping[str, Any] | None,
        why: str,
    ) -> TrainctlError:
        seen = f", seen by rank {', '.join(map(str, ranks))}" if ranks else ""
        count = self._session.guard.interventions
        after = f", after {count} interventions in a row" if count else ""
        kept = "" if self._session.engine.updates_in_backward else "the weights were not updated; "
        found = "" if where is None else f"; {describe_not_finite(where.record())}"
        run = self._session.run.root
        data = (
            f"trainctl data show {run} --samples {first}-{end - 1} tells what was in them, "
            f"trainctl data suspects {run} --step {number} which document it is, "
            "stability.on_bad_loss what else can be done"
        )
        if document is not None:
            found += f"; {describe_document(document)}"
            data += "; leave the document out, or raise stability.max_interventions to pass over it"
        if where is not None and where.kind == WEIGHT:  # no other samples would help
            data = "look at optimizer.lr and the updates before it, or at model.path"
        return TrainctlError(
            f"{trouble.of_step(number)} (samples {first} to {end}{seen}){after}{why}{found}",
            hint=f"{kept}resume goes on from the last checkpoint; {data}",
            exit_code=ExitCode.training_failed,
        )


def _rewind(session: Session, checkpoint: CheckpointReader) -> None:
    """Load the weights, optimizer states and loss scale of a checkpoint into the running engine.

    A process can create one ZeRO-3 engine in its life, so the existing engine is loaded, whatever
    its layout. All ranks call it together, after discarding the gradients.
    """
    checkpoint.load_into(session.state)
    fill_buffers(session.buffers, checkpoint)
    checkpoint.close()
    session.state.copy_masters_to_parameters()
    if session.engine.loss_scale is not None:
        session.engine.loss_scale.restore(checkpoint.manifest.get("loss_scale", {}))
