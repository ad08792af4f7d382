"""What the trainer asks of an engine, and what an engine is given.

An engine of another make is a `Room` that joins the ranks and builds one `Engine`, whose `States`
say where its optimizer keeps what. Nothing else of it is seen by the trainer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from trainctl.config.schema import Packing
from trainctl.engines.fragments import Fragment, Place
from trainctl.engines.mesh import ProcessMesh
from trainctl.engines.micro_batch import MicroBatch
from trainctl.engines.process import Process
from trainctl.engines.shards import ParameterPiece, Pieces, Read
from trainctl.engines.stopwatch import Stopwatch
from trainctl.engines.sums import Sums
from trainctl.engines.updater import Updater
from trainctl.options.objective import objective_of
from trainctl.plan.batches import Batch
from trainctl.plan.types import RunPlan
from trainctl.runs.layout import RunPaths

CLIPPING_EPSILON = 1e-6
"""Added to the norm that a gradient is divided by, as DeepSpeed and torch do."""

Change = Callable[[Place, torch.Tensor], None]
"""Changes some elements of a gradient in place: flat, in any floating type."""

MakeParameter = Callable[[nn.Parameter, ParameterPiece, Read], nn.Parameter]
"""Of a skeleton's parameter, what of it this rank has, and a reader of the flattened values of
that: the real parameter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What an engine is built of."""

    plan: RunPlan
    """The plan of the run."""
    process: Process
    """This rank."""
    mesh: ProcessMesh
    """Its place on the mesh."""
    module: nn.Module
    """What is trained, with its loss: `LanguageModel` of `train.objectives`; on a pipeline's rank
    `trainctl.train.parallel.pipeline.Stage`."""
    pieces: Pieces
    """What this rank has of its parameters."""
    groups: list[dict[str, Any]]
    """The optimizer's parameter groups; a group's rate is `peak_lr` times a factor."""
    optimizer: Optimizer | None
    """The one that makes the update; None if the engine makes it by the plan."""
    tied: nn.Parameter | None = None
    """The weight that the two ends of a pipeline share, on these ends."""
    flash_attention: bool = False
    """Whether attention is told where documents begin."""
    blocks: tuple[nn.Module, ...] = ()
    """The decoder's, in order."""


class LossScale(Protocol):
    """The factor that keeps fp16 gradients from vanishing (arXiv:1710.03740).

    After an update that overflowed, the scale is halved (from the second one in a row on), and
    doubled after a number of updates without. It decides which updates are made, so it belongs to
    the state of a run.
    """

    @property
    def value(self) -> float:
        """What the loss is multiplied by now."""

    def state(self) -> dict[str, float]:
        """What `restore` needs; empty for a fixed scale."""

    def restore(self, state: Mapping[str, float]) -> None:
        """Go on from a saved state; a scale that is fixed, or was when it was saved, does not."""


class States(ABC):
    """The optimizer's tensors on this rank, their states and gradients, by canonical names.

    Attributes:
        are_partitioned: Whether each replica has another part of the parameters.
        show_gradients: Whether the gradients of a step can be looked at before its update:
            not where another process has them.
    """

    optimizer: Optimizer
    """The one that makes the update."""
    tensors: list[torch.Tensor]
    """Those that it updates, flat."""
    fragments: list[Fragment]
    """Which elements of which parameters lie where in them, and in their gradients."""
    are_partitioned = True
    show_gradients = True

    @abstractmethod
    def group(self, index: int) -> dict[str, Any]:
        """Return the parameter group of one of the tensors."""

    @abstractmethod
    def updater(self, index: int) -> Updater:
        """Of one of the tensors: another on the device if only a part is offloaded."""

    @abstractmethod
    def catch_up(self, scalars: Mapping[str, float]) -> None:
        """Bring the optimizer where its steps would have brought it, beyond the states.

        Args:
            scalars: States that are one number for all of it, such as its step count.
        """

    @abstractmethod
    def check_readable(self) -> None:
        """Make sure that this process has the states.

        Raises:
            TrainctlError: Another process has them.
        """

    @abstractmethod
    def is_swapped(self, index: int) -> bool:
        """Whether a tensor lies on NVMe between uses."""

    @abstractmethod
    def numel(self, index: int) -> int:
        """Return elements of one of the tensors, wherever it lies."""

    @abstractmethod
    def resident(self, index: int, *, changes: bool = False) -> AbstractContextManager[None]:
        """Within it one of the tensors and its states are in memory.

        Args:
            changes: Whether to write them back to NVMe, if they come from there.
        """

    @abstractmethod
    def settle(self) -> None:
        """Bring the master weights up to date, before they are saved."""

    @abstractmethod
    def publish(self) -> None:
        """Let the model's parameters follow the master weights, as an update does; on all ranks."""

    @property
    @abstractmethod
    def scale(self) -> float:
        """What gradients are multiplied by until the update divides by it: the loss scale."""

    @abstractmethod
    def squares(self) -> Iterator[tuple[Fragment, torch.Tensor]]:
        """Fragments that this rank counts, and summed squares of their gradients, to be added."""

    @abstractmethod
    def change(self, change: Change) -> None:
        """Change every element of the gradients, here and in whatever copies decide the update."""


class Engine(ABC):
    """A model that trains: forward, backward, update. All ranks make the same calls in one order.

    Args:
        job: What it is built of.

    Attributes:
        mesh: This rank's place on it.
        pieces: What this rank has of the parameters.
        times: Where the time of a step goes.
        z_loss: That of the last step, beside its loss and in its units; None without one.
        measures: What the objective records of the last step beside its loss: means over
            what is counted, by name.
        summed_loss: Sum of the last step's losses, over this rank's own labels, in nats.
    """

    states: States
    """Where its optimizer keeps what."""
    loss_scale: LossScale | None = None
    """Factor of the loss of fp16 weights; None for other formats."""
    updates_early = False
    """Whether some weights are updated in the backward pass, before anything can be judged."""

    def __init__(self, job: Job) -> None:
        self._plan, self._process = job.plan, job.process
        self._batch = job.plan.batch
        self.mesh, self.pieces, self._trained = job.mesh, job.pieces, job.module
        self.times = Stopwatch(job.process.device)
        self.z_loss: float | None = None
        self.measures: dict[str, float] = {}
        self._recorded = objective_of(job.plan.config.objective).recorded
        self.summed_loss = 0.0

    @property
    @abstractmethod
    def module(self) -> nn.Module:
        """What is trained, as the engine calls it: by its `eval` and `train` modes are changed."""

    @abstractmethod
    def set_batch(self, batch: Batch) -> None:
        """Give the steps from now on a batch of another size: accumulation steps, or lengths."""

    @abstractmethod
    def run(self, batches: Sequence[MicroBatch], num_labels: float) -> Sums:
        """Forward and backward of each micro-batch of a step, adding up their gradients.

        Args:
            batches: Of this rank.
            num_labels: What is counted in the global batch, by which the summed loss is divided for
                the gradient: every label (or pair) has the same weight, on whichever rank and in
                whichever micro-batch.

        Returns:
            Over what this rank counts.
        """

    def accumulate(self, batches: Sequence[MicroBatch]) -> tuple[float, float]:
        """Forward and backward over a step's micro-batches, leaving the mean gradient.

        Returns:
            The mean loss over what is counted in the global batch, and its number.
        """
        num_labels = self._num_labels(batches)
        own = self.run(batches, max(1.0, num_labels)).tolist()
        self.summed_loss = own[0]
        # The ranks of a tensor group all have the same.
        summed = self._process.sum(*(own if self.mesh.tensor.is_first else [0.0] * len(own)))
        loss, z_loss, *measures = (each / max(1.0, num_labels) for each in summed)
        if self._plan.config.stability.z_loss > 0:
            self.z_loss = z_loss
        self.measures = dict(zip(self._recorded, measures, strict=True))
        return loss, num_labels

    def _num_labels(self, batches: Sequence[MicroBatch]) -> float:
        """What is counted in the global batch: labels, or pairs."""
        is_cut = self._plan.config.data.packing is Packing.stream
        if is_cut and not batches[0].is_masked:  # every position has one: no rank needs to ask
            return float(self._batch.tokens_per_step)
        (number,) = self._process.sum(sum(batch.num_counted for batch in batches))
        return number * self.mesh.data.size / self._process.world_size

    @abstractmethod
    def set_learning_rate(self, factor: float) -> None:
        """For the next step, before its gradients: a factor of each group's peak learning rate."""

    @abstractmethod
    def update(self, *, norm: float | None, clip_at: float | None) -> None:
        """Clip, step the optimizer, clear the gradients.

        Args:
            norm: Of the gradient as it is now; None where only the engine can tell.
            clip_at: What it is clipped at; None does not clip.

        Raises:
            TrainctlError: fp16 gradients overflow at the smallest loss scale; on all ranks.
        """

    @abstractmethod
    def discard(self) -> None:
        """Clear the gradients as an update does, without one: weights, moments and scale stay."""

    def learning_rates(self) -> dict[str, float]:
        """Of the last update, as the optimizer that made it has them: by parameter group."""
        groups = self.states.optimizer.param_groups
        return {group.get("name", str(i)): float(group["lr"]) for i, group in enumerate(groups)}

    @property
    @abstractmethod
    def norm_of_update(self) -> float | None:
        """What the gradient norm of the last update was taken for, before clipping; None where
        none was made at the last step."""

    @property
    @abstractmethod
    def was_skipped(self) -> bool:
        """Whether the last update was not made, because the gradients were not finite."""

    @abstractmethod
    def resume_at(self, step: int) -> None:
        """Go on after `step` steps, the optimizer's state being that of a checkpoint."""

    @abstractmethod
    def score(self, batch: MicroBatch) -> tuple[float, ...]:
        """Return the summed loss over what a batch counts, its number, and what the objective
        records.

        Of what this rank counts: summed over all ranks they are those of the data-parallel ranks'
        batches.
        """

    def measured(self) -> torch.Tensor:
        """What the objective records of each sample of the last pass, (samples, names), fp64."""
        found: Any = self._trained.last_measures
        return torch.zeros(1, 0) if found is None else found.double()

    @abstractmethod
    def scores_at(self, batch: MicroBatch, position: int) -> torch.Tensor | None:
        """Return the first sample's scores at a position of the whole sequence, if this rank has
        it."""

    def next_scores(self, ids: list[int]) -> torch.Tensor:
        """Scores of the token after `ids`, (vocabulary,) in fp32 on the CPU: the same on all ranks.

        Args:
            ids: Token ids, the same on all ranks; at least one.
        """
        # Every rank of a sequence or tensor group has an equal part of the context.
        multiple = self.mesh.sequence.size * self.mesh.tensor.size
        padded = ids + [0] * (-len(ids) % multiple)
        batch = MicroBatch.of_context(padded, samples=self._plan.batch.micro_batch_size)
        scores = self.scores_at(batch, len(ids) - 1)
        is_mine = scores is not None and self.mesh.tensor.is_first and self.mesh.data.is_first
        size = self._plan.config.model.vocab_size
        mine = scores.double().cpu().tolist() if is_mine and scores is not None else [0.0] * size
        return torch.tensor(self._process.sum(*mine), dtype=torch.float32)

    @abstractmethod
    def close(self) -> None:
        """Release threads, buffers and files; must come before the process groups go."""


class Room(Protocol):
    """What the folder of an engine offers."""

    def start_process(self, plan: RunPlan) -> Process:
        """Join the ranks that the agent started, from the environment that it set."""

    def settle_plan(self, plan: RunPlan, run: RunPaths, process: Process) -> RunPlan:
        """Return the plan with what of the engine's only the machine tells; on all ranks
        together."""

    def parameter_maker(
        self, plan: RunPlan, skeleton: nn.Module, device: torch.device, mesh: ProcessMesh
    ) -> MakeParameter | None:
        """How parameters are made where no rank has them whole; None where each has all of it.

        Args:
            plan: The plan of the run.
            skeleton: Cut to this rank's stage and shards.
            mesh: This rank's.
        """

    def build(self, job: Job) -> Engine:
        """Return the engine of a job. A process may build one only."""
