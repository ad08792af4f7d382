"""Context of hooks on a rank; `trainctl.options.callbacks.Context` documents it for users."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from trainctl.engines.micro_batch import MicroBatch
from trainctl.engines.shards import ElementRange
from trainctl.errors import TrainctlError
from trainctl.runs.layout import RunPaths
from trainctl.runs.records import EventWriter
from trainctl.runs.status import Heartbeat, Phase, Request, is_requested
from trainctl.train.checkpoint.optimizer_state import MASTER
from trainctl.train.session import Session

if TYPE_CHECKING:
    from trainctl.train.step import Step


@dataclass(slots=True)
class StepState:
    """Facts about the step at hand, shared by the loop and all callbacks of a rank."""

    step: int
    """Number of the step, from 1; 0 before the first."""
    loss: float | None = None
    grad_norm: float | None = None
    factor: float = 0.0
    """Factor of the peak learning rates."""
    batches: Sequence[MicroBatch] = ()
    """Micro-batches of this rank in the step."""
    early_records: list[dict[str, Any]] = field(default_factory=list)
    """Records of callbacks that wait for the step's own record, so that they follow it."""
    gradients_are_there: bool = False
    """Whether the gradients of the step can be read now."""
    step_seconds: float = 0.0
    """Length of the step itself, without what comes between steps."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Parts of the time since the last step's record."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Results of the evaluation after this step."""
    made: Step | None = None
    """The step that was made."""
    should_save: bool = False
    """Whether this rank asks for a checkpoint."""
    should_stop: bool = False
    """Whether this rank asks to stop, for a request from outside."""
    should_finish: bool = False
    """Whether a callback of this rank asks to end the run as done."""
    written: list[list[tuple[float, int]]] = field(default_factory=list)
    """Seconds and bytes of each rank's file of the checkpoints written since the last step."""
    saves: bool = False
    """Whether the step has its checkpoint, or the ranks have agreed to save one."""
    is_stopping: bool = False
    """Whether the ranks have seen a request to stop."""
    unfinished: set[tuple[str, str]] = field(default_factory=set)
    """Long hooks of this rank that the step has still to run: name of the callback, hook."""
    is_done: bool = False
    """Whether the run ends as done, rather than stopped from outside."""
    end: dict[str, Any] = field(default_factory=dict)
    """Fields of the end record from the callback that ends the run."""


@dataclass(frozen=True, slots=True)
class Journal:
    """Writer of the run's records, from the first rank, and of this rank's heartbeats."""

    session: Session
    run: RunPaths
    attempt: int
    events: EventWriter | None
    """None on ranks other than the first."""
    heartbeat: Heartbeat | None
    """None where no agent watches."""

    def record(self, event: str, **fields: object) -> None:
        """Write a record; does nothing on ranks other than the first."""
        if self.events is not None:
            self.events.write(event, **fields)

    def is_stop_requested(self) -> bool:
        """Return True on the first rank if somebody has asked the run to stop."""
        return self.session.process.is_first and is_requested(self.run, Request.stop)

    def beat(self, phase: Phase, doing: str = "") -> None:
        """Tell the agent what this rank is doing."""
        if self.heartbeat is not None:
            self.heartbeat.beat(phase, self.session.progress.step, doing)


@dataclass(frozen=True, slots=True)
class LocalFragment:
    """Elements of one parameter, of its gradient or of its weight, that this rank holds."""

    place: ElementRange
    values: torch.Tensor
    is_counted: bool

    @property
    def name(self) -> str:
        return self.place.name

    def indices(self) -> torch.Tensor:
        return self.place.indices(self.values.device)


class RankContext:
    """The context of one callback on this rank.

    Args:
        name: Name of the callback.
        collectives: Whether the callback may use collectives.
        is_alone: Whether it runs on the first rank alone.

    Attributes:
        was_stopped: Whether `should_stop` has told the hook that runs to return early.
    """

    def __init__(
        self,
        name: str,
        session: Session,
        now: StepState,
        journal: Journal,
        *,
        collectives: bool,
        is_alone: bool = False,
    ) -> None:
        self._name, self._session, self._now, self._journal = name, session, now, journal
        self._collectives = RankCollectives(self, session) if collectives else None
        self._is_alone, self.was_stopped = is_alone, False
        self.plan = session.plan
        self.shapes: Mapping[str, Sequence[int]] = session.shapes
        self.folder: Path = session.run.callbacks / name
        self.attempt_folder = session.run.attempt(journal.attempt).root
        self.rank, self.world_size = session.process.rank, session.process.world_size
        self.device = session.process.device
        self.has_gradients = session.gradients.are_visible

    @property
    def module(self) -> nn.Module:
        return self._session.engine.module

    @property
    def micro_batch_labels(self) -> Sequence[int]:
        return [batch.num_counted for batch in self._now.batches]

    @property
    def hook_scale(self) -> float:
        return self._session.gradients.scale * self._session.mesh.replicas.size

    @property
    def step(self) -> int:
        return self._now.step

    @property
    def loss(self) -> float | None:
        return self._now.loss

    @property
    def grad_norm(self) -> float | None:
        return self._now.grad_norm

    @property
    def learning_rate(self) -> float:
        return self.plan.peak_lr * self._now.factor

    @property
    def tokens(self) -> int:
        return self._session.progress.tokens

    @property
    def seconds(self) -> Mapping[str, float]:
        return self._now.seconds

    @property
    def metrics(self) -> Mapping[str, float]:
        return self._now.metrics

    @property
    def is_saving(self) -> bool:
        return self._now.saves

    @property
    def collectives(self) -> RankCollectives:
        if self._collectives is None:
            raise TrainctlError(
                f"the callback {self._name} uses collectives, which its spec does not allow",
                hint="CallbackSpec(..., collectives=True) allows them, on all ranks",
            )
        return self._collectives

    def gradients(self) -> Iterator[LocalFragment]:
        if not self._now.gradients_are_there:
            raise TrainctlError(
                f"the callback {self._name} reads gradients where there are none",
                hint="read them in after_backward, and only if context.has_gradients",
            )
        scale = self._session.gradients.scale
        for fragment, start, values in self._session.engine.states.gradients():
            place = ElementRange(fragment.name, fragment.shard, start, values.numel())
            values = values.detach()
            yield LocalFragment(place, values if scale == 1 else values / scale, fragment.owned)

    def weights(self) -> Iterator[LocalFragment]:
        state = self._session.state
        state.sync_master_weights()
        for index in range(len(state.tensors)):
            with state.swapped_in(index):
                values = state.tensor(index, MASTER)
                for each in state.fragments:
                    if each.tensor == index:
                        place = ElementRange(each.name, each.shard, each.start, each.numel)
                        yield LocalFragment(place, each.of(values).reshape(-1), each.owned)

    def record(self, name: str, /, **values: Any) -> None:
        json.dumps(values)  # raises in the hook itself: what waits for the step's record is late
        fields = {"step": self._now.step, "callback": self._name, "name": name, "values": values}
        if self._now.gradients_are_there:
            self._now.early_records.append(fields)
        else:
            self._journal.record("callback", **fields)

    def beat(self, doing: str) -> None:
        self._journal.beat(Phase.evaluate, doing)

    def should_stop(self) -> bool:
        now, asked = self._now, self._journal.is_stop_requested()
        if self._is_alone:
            self.was_stopped = now.is_stopping or asked
        else:
            now.is_stopping = now.is_stopping or self._session.process.any(asked)
            self.was_stopped = now.is_stopping
        return self.was_stopped

    def request_save(self) -> None:
        self._now.should_save = True

    def request_stop(self, reason: str = "") -> None:
        self._now.should_finish = True
        self._now.end = {"reason": "callback", "callback": self._name, "why": reason}


class RankCollectives:
    """Collectives of a callback; all ranks call them together."""

    def __init__(self, context: RankContext, session: Session) -> None:
        self._context, process = context, session.process
        self._control = process.control
        self.sum, self.gather = process.sum, process.gather
        self.broadcast = process.broadcast_from_first

    def whole_gradient(self, name: str) -> torch.Tensor:
        return self._whole(name, self._context.gradients())

    def whole_weight(self, name: str) -> torch.Tensor:
        return self._whole(name, self._context.weights())

    def _whole(self, name: str, parts: Iterator[LocalFragment]) -> torch.Tensor:
        """Assemble a parameter: each element comes from the rank that counts it."""
        shape = torch.Size(self._context.shapes[name])
        whole = torch.zeros(shape.numel())
        for part in parts:
            if part.name == name and part.is_counted:
                whole[part.indices().cpu()] = part.values.float().cpu()
        dist.all_reduce(whole, group=self._control)
        return whole.view(shape)
