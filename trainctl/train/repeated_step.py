"""The gradient of the next step, computed again and again without an update."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trainctl.engines.micro_batch import MicroBatch
from trainctl.errors import TrainctlError
from trainctl.plans.mixture import StagedBatches, stages_of_plan
from trainctl.train.session import Session, seed_step


@dataclass(frozen=True, slots=True)
class Measured:
    """Loss and gradient of a repetition, over all ranks."""

    loss: float
    """Mean over `num_labels`, in nats."""
    num_labels: float
    """Number of labels (or records) that the gradient's sum is divided by."""
    grad_norm: float | None
    """Norm of the gradient; None if the trainer cannot read gradients."""


class RepeatedStep:
    """The step after those that a session has made. All ranks make the same calls together.

    Attributes:
        first_sample: Counter of the step's first sample.
        batch: Global batch of the step.

    Raises:
        TrainctlError: The engine updates weights in the backward pass, or the session was stopped
            before its last step.
    """

    def __init__(self, session: Session) -> None:
        if session.engine.updates_in_backward:
            raise TrainctlError(
                "weights are updated in the backward pass, so no step can be computed twice",
                hint="offload.zenflow=false",
            )
        self._session, progress = session, session.progress
        if progress.step != session.plan.stop_step:
            raise TrainctlError(
                f"the replay was stopped after step {progress.step:,}, "
                f"{session.plan.stop_step - progress.step:,} before the end",
                hint="a callback of yours may ask for it (callbacks)",
            )
        stages = StagedBatches(stages_of_plan(session.plan))
        self.first_sample, self.batch = stages.at(progress.step, progress.samples)
        session.engine.set_batch(self.batch)

    def measure(self, batches: Sequence[MicroBatch], data_rank: int) -> Measured:
        """Compute loss and gradient of micro-batches, and drop the gradient.

        Args:
            data_rank: Data-parallel rank whose random numbers (dropout) are drawn.
        """
        session = self._session
        data, replicas = session.mesh.data, session.mesh.replicas
        of_a_sample = replicas.size // data.size  # ranks with parts of the same samples
        replica = data_rank * of_a_sample + replicas.index % of_a_sample
        seed_step(session.plan.config.training.seed, session.progress.step, replica)
        loss, num_labels = session.engine.accumulate(batches)
        session.routers.take(session.process, session.mesh, num_labels)
        gradients = session.gradients
        norm = gradients.norms().total if gradients.are_visible else None
        session.engine.discard()
        return Measured(loss, num_labels, norm)
