"""Interface between the trainer and an engine.

A new engine implements `EngineBackend`, which joins the ranks and builds one `Engine`. Its `States`
tell where the optimizer keeps its tensors. The trainer sees nothing else of an engine.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from trainctl.config.registry import function_of
from trainctl.config.schema import Packing
from trainctl.engines.first_pass import FirstPass
from trainctl.engines.micro_batch import MicroBatch, StepSums
from trainctl.engines.process import Process, ProcessMesh
from trainctl.engines.shards import (
    ElementRange,
    Fragment,
    ParameterPiece,
    Pieces,
    Read,
    fragment_norms,
)
from trainctl.engines.stopwatch import Stopwatch
from trainctl.options.objective import objective_of
from trainctl.plans.types import Batch, RunPlan
from trainctl.runs.layout import RunPaths


@contextmanager
def same_randomness(device: torch.device) -> Iterator[None]:
    """Run the block, and let what follows draw the same random numbers (dropout)."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        yield


class Updater:
    """Optimizer states as torch's optimizers, and trainctl's own, keep them."""

    has_uniform_step_count = True
    """Whether a scalar state, such as the step count, is the same for all parameters."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    def step_count(self, tensor: torch.Tensor, value: float) -> torch.Tensor | int:
        """Return a step count as a state: on the CPU, or on the tensor's device for a fused
        kernel.
        """
        device = tensor.device if self.optimizer.defaults.get("fused") else "cpu"
        return torch.tensor(value, dtype=torch.float32, device=device)

    def state_type(self, tensor: torch.Tensor) -> torch.dtype:
        """Return the dtype of the states that have the tensor's size."""
        return tensor.dtype

    def restore_scalars(self, scalars: Mapping[str, float]) -> None:
        """Bring the optimizer's internal values, beyond its states, to the step of a checkpoint.

        Args:
            scalars: States that are one number for the whole optimizer, such as its step count.
        """


CLIPPING_EPSILON = 1e-6
"""Added to the norm that a gradient is divided by, as DeepSpeed and torch do."""


def clipping_factor(norm: float, limit: float | None) -> float:
    """Return the factor that clips gradients of this norm; 1 if the norm is below the limit."""
    is_above = limit is not None and limit < norm + CLIPPING_EPSILON
    return limit / (norm + CLIPPING_EPSILON) if is_above and limit is not None else 1.0


def scale_gradients(gradients: Sequence[torch.Tensor], factor: float) -> None:
    """Multiply all gradients by a factor, in one call; a factor of 1 needs no pass over them."""
    if factor != 1.0 and gradients:
        torch._foreach_mul_(gradients, factor)


Change = Callable[[ElementRange, torch.Tensor], None]
"""Function that changes some elements of a gradient in place: flat, in any floating-point type."""

MakeParameter = Callable[[nn.Parameter, ParameterPiece, Read], nn.Parameter]
"""Function that makes this rank's parameter from the skeleton's parameter, the piece that this rank
holds, and a reader of the flattened values of that piece.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Everything an engine is built from."""

    plan: RunPlan
    process: Process
    mesh: ProcessMesh
    """Position of this rank on the mesh, with its process groups."""
    module: nn.Module
    """The model to train, with its loss: `LanguageModel` of `train.objectives.loss`; on a pipeline
    rank `PipelineStage` of `train.parallel.pipeline`.
    """
    pieces: Pieces
    """The piece of each model parameter that this rank holds."""
    groups: list[dict[str, Any]]
    """The optimizer's parameter groups; the learning rate of a group is its `peak_lr` times a
    factor.
    """
    optimizer: Optimizer | None
    """The optimizer that makes the update; None if the engine builds one from the plan."""
    tied: nn.Parameter | None = None
    """The weight tied between the first and the last pipeline stage; None on the stages between."""
    flash_attention: bool = False
    """Whether attention is FlashAttention, which must be given the document boundaries."""
    blocks: tuple[nn.Module, ...] = ()
    """The decoder blocks, in order."""


class LossScale(Protocol):
    """The factor that keeps fp16 gradients from vanishing (arXiv:1710.03740).

    After an update that overflowed, the scale is halved (from the second one in a row on). After a
    number of updates without an overflow it is doubled. It decides which updates are made, so it
    belongs to the state of a run.
    """

    @property
    def value(self) -> float:
        """The factor by which the loss is multiplied now."""

    def state(self) -> dict[str, float]:
        """Return the values that `restore` takes; empty for a fixed scale."""

    def restore(self, state: Mapping[str, float]) -> None:
        """Continue from a saved state. Nothing changes if the scale is fixed, or was when it was
        saved.
        """


class RankSums(Protocol):
    """Numbers that are read, and summed over the ranks, together with the losses of a step."""

    def measure(self) -> torch.Tensor:
        """Return this rank's numbers as a vector in fp64, on any device."""

    def add_up(self, numbers: Sequence[float]) -> list[float]:
        """Return what is summed over the ranks, from the numbers read from the device."""


class States(ABC):
    """The optimizer's tensors on this rank, their states and gradients, by canonical names.

    The methods that are not abstract suit tensors that stay in the memory of this process.

    Attributes:
        are_partitioned: Whether each replica holds a different part of the parameters.
        has_readable_gradients: Whether the trainer can read gradients before the update. It cannot
            where another process holds them.
    """

    optimizer: Optimizer
    """The optimizer that makes the update."""
    tensors: list[torch.Tensor]
    """The flat tensors that the optimizer updates."""
    fragments: list[Fragment]
    """Ranges of parameters inside `tensors`; the gradients have the same layout."""
    are_partitioned = True
    has_readable_gradients = True

    @abstractmethod
    def group(self, index: int) -> dict[str, Any]:
        """Return the parameter group of one of the tensors."""

    def updater(self, index: int) -> Updater:
        """Return the updater of a tensor. Under partial offload, tensors on the device have
        another one.
        """
        return Updater(self.optimizer)

    def restore_scalars(self, scalars: Mapping[str, float]) -> None:  # noqa: B027
        """Bring the optimizer's internal values, beyond its states, to the step of a checkpoint.

        Args:
            scalars: States that are one number for the whole optimizer, such as its step count.
        """

    def check_readable(self) -> None:  # noqa: B027
        """Make sure that this process holds the states.

        Raises:
            TrainctlError: Another process holds them.
        """

    def is_swapped(self, index: int) -> bool:
        """Return True if a tensor lies on NVMe between uses."""
        return False

    def numel(self, index: int) -> int:
        """Return the number of elements of a tensor, also if it is on NVMe."""
        return self.tensors[index].numel()

    def swapped_in(self, index: int, *, changes: bool = False) -> AbstractContextManager[None]:
        """Hold a tensor and its states in memory within the context.

        Args:
            changes: Whether to write them back if they come from NVMe.
        """
        return nullcontext()

    def sync_master_weights(self) -> None:  # noqa: B027
        """Bring the master weights up to date before they are saved."""

    @abstractmethod
    def copy_masters_to_parameters(self) -> None:
        """Copy the master weights to the model's parameters, as an update does; on all ranks
        together.
        """

    @property
    def scale(self) -> float:
        """Loss scale: the gradients are multiplied by it until the update divides by it."""
        return 1.0

    @abstractmethod
    def gradients(self) -> Iterator[tuple[Fragment, int, torch.Tensor]]:
        """Yield the gradient elements that this rank holds, multiplied by `scale`.

        Each time: a fragment, the position of the first value in the fragment's shard, and the
        values, flat and not to be changed. A fragment may come several times.
        """

    def norms(self) -> Iterator[tuple[Fragment, torch.Tensor]]:
        """Yield the fragments that this rank counts in the norm, with norms of their gradients.

        A fragment may come several times, each time with the norm of other elements.
        """
        found = ((fragment, values) for fragment, _, values in self.gradients())
        yield from fragment_norms([each for each in found if each[0].owned])

    @abstractmethod
    def change(self, change: Change) -> None:
        """Apply a change to every gradient element on this rank, in every copy that the update
        reads.
        """


class Engine(ABC):
    """A model that trains: forward, backward, update. All ranks make the same calls in one order.

    Attributes:
        times: Stopwatch of the parts of a step.
        z_loss: z-loss of the last step, in the units of its loss; None if the run has none.
        measures: The objective's measures of the last step besides its loss: means over the counted
            labels or records, by name.
        summed_loss: Sum of the last step's losses, over this rank's own labels, in nats.
        sums_beside: What `accumulate` summed over the ranks beside the last step's losses.
    """

    states: States
    """The optimizer's tensors, states and gradients."""
    loss_scale: LossScale | None = None
    """Loss scale of fp16 weights; None for other formats."""
    updates_in_backward = False
    """Whether some weights are updated in the backward pass, before the trainer can judge the
    step.
    """

    def __init__(self, job: Job) -> None:
        self._plan, self._process = job.plan, job.process
        self._batch = job.plan.batch
        self.mesh, self.pieces, self._trained = job.mesh, job.pieces, job.module
        self.times = Stopwatch(job.process.device)
        self.z_loss: float | None = None
        self.measures: dict[str, float] = {}
        self.objective = objective_of(job.plan.config.objective)
        self.summed_loss = 0.0
        self.sums_beside: list[float] = []

    @property
    @abstractmethod
    def module(self) -> nn.Module:
        """The module that the engine calls; its `eval` and `train` methods switch the model's
        mode.
        """

    @property
    def stage(self) -> int:
        """Pipeline stage of this rank; of two, the one whose forward pass runs."""
        return self.mesh.pipeline.index

    def _objective_inputs(self, batch: MicroBatch) -> dict[str, Any]:
        """Return what the objective is told of a micro-batch; empty for the next token's loss."""
        return batch.objective_inputs(self._process.device) if self.objective.build else {}

    def set_batch(self, batch: Batch) -> None:
        """Change the batch of the following steps: its accumulation steps or sequence length."""
        self._batch = batch

    @abstractmethod
    def run(self, batches: Sequence[MicroBatch], num_labels: float) -> StepSums:
        """Run forward and backward of each micro-batch of a step, and accumulate the gradients.

        Args:
            num_labels: Number of labels (or records) in the global batch. The gradient is of the
                summed loss divided by it, so every label (or record) has the same weight, on
                whichever rank and in whichever micro-batch.

        Returns:
            Sums over the labels (or records) that this rank counts.
        """

    def accumulate(
        self, batches: Sequence[MicroBatch], beside: RankSums | None = None
    ) -> tuple[float, float]:
        """Run forward and backward over a step's micro-batches, leaving the mean gradient.

        The host waits for the device once, and all ranks reduce once.

        Args:
            beside: What to measure after the backward passes; `sums_beside` has the result.

        Returns:
            The mean loss over the labels (or records) of the global batch, and their number.
        """
        num_labels = self._num_labels(batches)
        if self.objective.passes == 1:
            sums = self.run(batches, max(1.0, num_labels)).values()
        else:
            with self.times.part("forward"), same_randomness(self._process.device):
                first = self._first_pass(batches)
            self.run(first.with_gradients(batches), max(1.0, num_labels))
            loss, *measures = first.sums()
            sums = torch.tensor([loss, 0.0, *measures], dtype=torch.float64)
        count = len(sums)
        numbers = self._read(sums, beside)
        own, added = numbers[:count], beside.add_up(numbers[count:]) if beside else []
        self.summed_loss = own[0]
        # The ranks of a tensor group all hold the same sums: only the first one counts.
        counted = own if self.mesh.tensor.is_first else [0.0] * count
        summed = self._process.sum(*counted, *added)
        summed, self.sums_beside = summed[:count], summed[count:]
        loss, z_loss = (each / max(1.0, num_labels) for each in summed[:2])
        if self._plan.config.stability.z_loss > 0:
            self.z_loss = z_loss
        section = self._plan.config.objective
        self.measures = self.objective.record(section, summed[2:], num_labels)
        return loss, num_labels

    def _read(self, sums: torch.Tensor, beside: RankSums | None) -> list[float]:
        """Return the sums and the numbers beside them, all read from the device at once."""
        parts = [sums] if beside is None else [sums, beside.measure()]
        return torch.cat([part.to(self._process.device) for part in parts]).tolist()

    def _first_pass(self, batches: Sequence[MicroBatch]) -> FirstPass:
        module: Any = self._trained
        return FirstPass.of(batches, self.output, module.objective.whole, self.mesh.data)

    def _num_labels(self, batches: Sequence[MicroBatch]) -> float:
        """Return the number of labels (or records) in the global batch."""
        has_all = not self.objective.hides_tokens and not batches[0].is_masked
        if has_all and self._plan.config.data.packing is Packing.stream:  # no collective is needed
            return float(self._batch.tokens_per_step)
        (number,) = self._process.sum(sum(batch.num_counted for batch in batches))
        return number * self.mesh.data.size / self._process.world_size

    def set_learning_rate(self, factor: float) -> None:
        """Set the learning rate of the next step to `factor` times each group's peak learning rate.

        It must be called before the gradients of that step are computed.
        """
        for group in self.states.optimizer.param_groups:
            group["lr"] = group["peak_lr"] * factor

    @abstractmethod
    def update(self, *, norm: float | None, clip_at: float | None) -> None:
        """Clip the gradients, step the optimizer, clear the gradients.

        Args:
            norm: Current norm of the gradient; None where only the engine can tell.
            clip_at: Clipping threshold; None does not clip.

        Raises:
            TrainctlError: fp16 gradients overflow at the smallest loss scale; on all ranks.
        """

    @abstractmethod
    def discard(self) -> None:
        """Clear the gradients without an update: weights, moments and loss scale stay."""

    def learning_rates(self) -> dict[str, float]:
        """Return the learning rate of each parameter group in the last update, by the group's
        name.
        """
        groups = self.states.optimizer.param_groups
        return {group.get("name", str(i)): float(group["lr"]) for i, group in enumerate(groups)}

    @property
    @abstractmethod
    def norm_of_update(self) -> float | None:
        """Gradient norm of the last update, before clipping; None if the last step made none."""

    @property
    def was_skipped(self) -> bool:
        """Whether the last update was skipped because the gradients were not finite."""
        return False

    def resume_at(self, step: int) -> None:  # noqa: B027
        """Continue after `step` steps; a checkpoint's optimizer state is already loaded."""

    @abstractmethod
    def output(self, batch: MicroBatch) -> torch.Tensor:
        """Return the summed loss of a forward pass; the features if the objective has two passes
        and this is the first one.
        """

    def score(self, batches: Sequence[MicroBatch]) -> tuple[float, ...]:
        """Return the summed loss, the number of labels (or records), and the objective's summed
        measures.

        All cover the labels (or records) that this rank counts. Summed over all ranks, they cover
        the batches of all data-parallel ranks. To an objective with two passes, these batches are a
        global batch.
        """
        if self.objective.passes == 1:
            each = [self._score(batch) for batch in batches]
            found = tuple(sum(column) for column in zip(*each, strict=True))
        else:
            loss, *measures = self._first_pass(batches).sums()
            found = loss, sum(batch.num_counted for batch in batches), *measures
        return found if self.mesh.tensor.is_first else (0.0,) * len(found)

    def _score(self, batch: MicroBatch) -> tuple[float, ...]:
        """Return the sums of `score` for one micro-batch."""
        loss = float(self.output(batch))
        own = batch.part(self.mesh.part)
        return loss, own.num_counted, *self.measured().sum(dim=0).tolist()

    def measured(self) -> torch.Tensor:
        """Return the objective's measures per sample of the last pass, (samples, names), fp64."""
        found: Any = self._trained.last_measures
        return torch.zeros(1, 0) if found is None else found.double()

    @abstractmethod
    def scores_at(self, batch: MicroBatch, position: int) -> torch.Tensor | None:
        """Return the first sample's logits at a position of the whole sequence; None on other
        ranks.
        """

    def next_scores(self, ids: list[int]) -> torch.Tensor:
        """Return the logits of the token after `ids`, (vocabulary,) in fp32 on the CPU, on all
        ranks.

        Args:
            ids: Token ids, the same on all ranks; at least one.
        """
        # The tokens are split equally over the ranks that share a sequence, or a tensor group.
        multiple = self._plan.config.parallelism.sequence_multiple * self.mesh.tensor.size
        padded = ids + [0] * (-len(ids) % multiple)
        batch = MicroBatch.of_context(padded, samples=self._plan.batch.micro_batch_size)
        scores = self.scores_at(batch, len(ids) - 1)
        is_mine = scores is not None and self.mesh.tensor.is_first and self.mesh.data.is_first
        size = self._plan.config.model.vocab_size
        mine = scores.double().cpu().tolist() if is_mine and scores is not None else [0.0] * size
        return torch.tensor(self._process.sum(*mine), dtype=torch.float32)

    @contextmanager
    def whole_weights(self) -> Iterator[None]:
        """Hold all weights whole on this rank within the context, for many forward passes; on all
        ranks together. They must not change within it.

        For engines whose ranks always hold them, there is nothing to do.
        """
        yield

    @abstractmethod
    def close(self) -> None:
        """Release threads, buffers and files. It must be called before the process groups are
        destroyed.
        """


class EngineBackend(Protocol):
    """Entry point of an engine."""

    def start_process(self, plan: RunPlan) -> Process:
        """Join the ranks that the agent started, from the environment that it set."""

    def settle_plan(self, plan: RunPlan, run: RunPaths, process: Process) -> RunPlan:
        """Return the plan with the engine settings that only this machine decides; on all ranks
        together.
        """

    def parameter_maker(
        self, plan: RunPlan, skeleton: nn.Module, device: torch.device, mesh: ProcessMesh
    ) -> MakeParameter | None:
        """Return the maker of partitioned parameters; None if each rank holds its parameters whole.

        Args:
            skeleton: The model on the meta device, cut to this rank's stage and shards.
        """

    def build(self, job: Job) -> Engine:
        """Return the engine of a job. A process may build one only."""


def engine_backend(plan: RunPlan) -> EngineBackend:
    """Return the entry point of the engine that a plan names, importing its package.

    Raises:
        TrainctlError: The package of the engine, or one that it needs, is not installed here.
    """
    return function_of("engine", plan.engine)()
