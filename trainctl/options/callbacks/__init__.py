"""Specification of a callback, its hooks, and what the training loop gives them. No torch.

A callback is a class with some of the hooks of `Callback`. `trainctl.train.callbacks` calls them on
the ranks, in a declared order: after a step the records and the checkpoint that is due, then the
evaluation, then the user's callbacks in the order of `callbacks=[a,b]`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

from trainctl.config.registry import Spec
from trainctl.options.limits import Limit


class Ranks(StrEnum):
    """Ranks on which a callback runs."""

    all = "all"
    first = "first"


class Callback:
    """Base class of callbacks. A subclass overrides the hooks that it needs.

    Hooks that are not overridden cost nothing. Every hook runs on all ranks of the callback, in the
    same order. The batch, the gradients and the weights must not be changed.
    """

    def on_train_start(self, context: Context) -> None:
        """Run once before the first step of an attempt, after `after_load`."""

    def before_step(self, context: Context) -> None:
        """Run before the batch of a step is taken, also when a step is tried again."""

    def after_backward(self, context: Context) -> None:
        """Run with the gradients of a step that will be made, before they are clipped or changed.

        `context.gradients()` has them. It is not called for a step that the guard of losses
        rejects, or that overflows in fp16.
        """

    def after_step(self, context: Context) -> None:
        """Run after each step that counts, whether or not its update was made."""

    def on_evaluate(self, context: Context) -> None:
        """Run after an evaluation, whose results are in `context.metrics`."""

    def before_agreement(self, context: Context) -> Sequence[float]:
        """Return numbers to sum over all ranks, by the all-reduce that follows every step.

        The count must be the same on all ranks in every step. A callback of the first rank cannot
        have this hook.
        """
        return ()

    def after_agreement(self, context: Context, sums: Sequence[float]) -> None:
        """Run with the sums of `before_agreement`, the same on all ranks."""

    def before_save(self) -> Mapping[str, Any]:
        """Return the state for a checkpoint: JSON values, the same on all ranks."""
        return {}

    def after_load(self, state: Mapping[str, Any]) -> None:
        """Restore the state of a checkpoint, at a resume or a rewind; empty if it has none."""

    def on_train_end(self, context: Context) -> None:
        """Run once after the last step, when its checkpoint is saved; not after errors."""

    def close(self) -> None:
        """Release files and threads; called after errors, too."""


class LocalTensor(Protocol):
    """Elements of one parameter, of its gradient or of its weight, that this rank holds."""

    @property
    def name(self) -> str:
        """Canonical name of the parameter, as transformers has it."""

    @property
    def values(self) -> Any:
        """The elements: a flat tensor, not to be changed."""

    @property
    def is_counted(self) -> bool:
        """Whether this rank counts them: over all ranks, each element is counted once."""

    def indices(self) -> Any:
        """Return the index of each element in the whole flattened parameter: an int64 tensor."""


class Collectives(Protocol):
    """Functions that all ranks must call together, in the same order."""

    def sum(self, *values: float) -> list[float]:
        """Return each value summed over all ranks, in double precision."""

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in rank order; for small values."""

    def broadcast(self, value: Any) -> Any:
        """Return the first rank's value."""

    def whole_gradient(self, name: str) -> Any:
        """Return a parameter's whole gradient: an fp32 tensor on the CPU, on all ranks.

        It has the parameter's shape. Only `after_backward` may ask for it.
        """

    def whole_weight(self, name: str) -> Any:
        """Return a parameter's whole master weight: an fp32 tensor on the CPU, on all ranks."""


class Context(Protocol):
    """Argument of all hooks: facts about the step, and ways to record, save and stop."""

    plan: Any
    """The frozen `RunPlan`; `plan.config` is the configuration."""
    folder: Path
    """`RUN/callbacks/NAME`, for files of the callback; not created."""
    attempt_folder: Path
    """`RUN/attempts/N`, for files about this attempt alone."""
    rank: int
    world_size: int
    device: Any
    """torch's device of this rank."""
    shapes: Mapping[str, Sequence[int]]
    """Shape of each trained parameter of the whole model, by canonical name."""
    has_gradients: bool
    """Whether gradients can be read before the update; not under `offload.super_offload`,
    `offload.zenflow` and DeepCompile.
    """

    @property
    def module(self) -> Any:
        """The module that the engine calls.

        Under ZeRO 3 and FSDP2 its parameters are partitioned, with tensor and pipeline ranks it is
        a part of the model, and a forward pass is a collective.
        """

    @property
    def micro_batch_labels(self) -> Sequence[int]:
        """Labels (or records) in each micro-batch of this rank's step, in order: the loss is a mean
        over them. In `after_backward` only.
        """

    @property
    def hook_scale(self) -> float:
        """Factor by which a tensor in a parameter's own backward hook exceeds the micro-batch's
        share of `gradients()`: the loss scale, and the number of ranks that DeepSpeed averages
        over.
        """

    @property
    def step(self) -> int:
        """Number of the step, from 1: the step being made until `after_backward`, then the last
        one made; 0 before the first.
        """

    @property
    def loss(self) -> float | None:
        """Loss of the step over the global batch, in nats; None before it is known."""

    @property
    def grad_norm(self) -> float | None:
        """Gradient norm of the step before clipping; None if unknown."""

    @property
    def learning_rate(self) -> float:
        """Peak learning rate times the schedule's factor, as the step used it."""

    @property
    def tokens(self) -> int:
        """Tokens trained on."""

    @property
    def seconds(self) -> Mapping[str, float]:
        """Parts of the time since the last step's record; known from `after_step` on."""

    @property
    def metrics(self) -> Mapping[str, float]:
        """Results of this step's evaluation, by name: `loss`, `ema_loss`; empty without one."""

    @property
    def is_saving(self) -> bool:
        """Whether the step has a checkpoint; known in `after_agreement`."""

    def gradients(self) -> Iterator[LocalTensor]:
        """Yield the parts of gradients that this rank holds, without the loss scale.

        In `after_backward` only, and only with `has_gradients`. ZeRO 0: every rank holds all
        gradients, averaged over the replicas. ZeRO 1 to 3 and FSDP2: each rank holds its partition.
        Tensor and pipeline ranks hold their shards and stages.
        """

    def weights(self) -> Iterator[LocalTensor]:
        """Yield the parts of the master weights that this rank holds."""

    @property
    def collectives(self) -> Collectives:
        """Functions over all ranks.

        Raises:
            TrainctlError: The spec does not have `collectives=True`.
        """

    def record(self, name: str, /, **values: Any) -> None:
        """Write a record of this step, from the first rank: event `callback`, under `name`.

        Numbers among the values go to the trackers as `CALLBACK/NAME/KEY`.
        """

    def beat(self, doing: str) -> None:
        """Tell the agent that this rank works, and on what: in hooks that take over ten seconds."""

    def should_stop(self) -> bool:
        """Return True if the run was asked to stop: by a signal, its time limit or a command.

        The hook then returns early, without a record of what it has not finished. After a resume,
        `after_step`, `after_agreement` and `on_train_end` are called again for the same step, so
        they leave the state of the callback as it was. Ask at least once a batch: on a callback of
        all ranks it is a collective, which all call equally often; on a callback of the first rank
        it reads one folder.
        """

    def request_save(self) -> None:
        """Ask for a checkpoint after this step. One rank that asks is enough."""

    def request_stop(self, reason: str = "") -> None:
        """Ask to end the run after this step. One rank that asks is enough.

        Args:
            reason: Why, for the console and the report; the name of the callback is added.
        """


@dataclass
class CallbackConfig:
    """Keys that all callbacks share: none."""


@dataclass(frozen=True, kw_only=True)
class CallbackSpec(Spec):
    """Specification of one callback.

    `build` is called with the callback's section on each of its ranks and returns a `Callback`: the
    class itself, or `module:function` where the class needs torch at its import.
    """

    keys: type = CallbackConfig
    """Dataclass of the callback's own keys."""
    build: str | Callable[[Any], Callback]
    ranks: Ranks = Ranks.all
    """Ranks on which it runs."""
    collectives: bool = False
    """Whether it may use `Context.collectives`; needs `ranks=Ranks.all`."""
    limits: tuple[Limit, ...] = ()
    """Settings that the callback does not support."""
    needs_gpu: bool = False
    """Whether it does nothing on a CPU; a plan on CPUs then has a warning."""
    host_bytes: int = 0
    """Bytes of host memory for each trained weight that a rank counts."""
    min_micro_batches: int = 1
    """Fewest micro-batches of a step, over all data ranks and accumulation steps, that it needs."""

    def __post_init__(self) -> None:
        if self.collectives and self.ranks is Ranks.first:
            raise ValueError("collectives=True needs ranks=Ranks.all: all ranks call them together")
