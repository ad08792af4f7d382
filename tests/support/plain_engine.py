"""Minimal engine in plain torch, without DeepSpeed: exactly what the protocol requires.

Data-parallel, in fp32. The process group is the usual one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.metadata import EntryPoint
from typing import Any

import torch
import torch.distributed as dist
from rank_processes import Case
from torch import nn

from trainctl.config import registry
from trainctl.engines.micro_batch import MicroBatch, StepSums
from trainctl.engines.process import Process, ProcessMesh
from trainctl.engines.protocol import Change, Engine, Job, MakeParameter, States
from trainctl.engines.shards import ElementRange, Fragment, Pieces
from trainctl.options.engine import EngineSpec
from trainctl.plans.types import RunPlan
from trainctl.runs.layout import RunPaths
from trainctl.runs.records import EventWriter
from trainctl.train.loop import Trainer
from trainctl.train.session import assemble


class PlainStates(States):
    """Checkpointed tensors: each parameter is one whole tensor, saved by the first rank."""

    are_partitioned = False

    def __init__(self, optimizer: torch.optim.Optimizer, pieces: Pieces, *, saves: bool) -> None:
        self.optimizer = optimizer
        self._groups = [(p, group) for group in optimizer.param_groups for p in group["params"]]
        self.tensors = [parameter for parameter, _ in self._groups]
        self.fragments = [
            Fragment.of_piece(pieces[parameter], 0, parameter.numel(), index, 0, dealt=saves)
            for index, parameter in enumerate(self.tensors)
        ]

    def group(self, index: int) -> dict[str, Any]:
        return self._groups[index][1]

    def copy_masters_to_parameters(self) -> None:
        pass

    def gradients(self) -> Iterator[tuple[Fragment, int, torch.Tensor]]:
        for fragment, parameter in zip(self.fragments, self.tensors, strict=True):
            yield fragment, 0, parameter.grad.view(-1)

    def change(self, change: Change) -> None:
        for fragment, parameter in zip(self.fragments, self.tensors, strict=True):
            place = ElementRange(fragment.name, fragment.shard, 0, fragment.numel)
            change(place, parameter.grad.view(-1))


class PlainEngine(Engine):
    """Engine that holds the whole model on each rank and updates it with torch's AdamW."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._module = job.module
        config = job.plan.config.optimizer
        betas = (config.beta1, config.beta2)
        optimizer = torch.optim.AdamW(job.groups, betas=betas, eps=config.epsilon)
        self.states = PlainStates(optimizer, job.pieces, saves=job.mesh.data.is_first)

    @property
    def module(self) -> nn.Module:
        return self._module

    def run(self, batches: Sequence[MicroBatch], num_labels: float) -> StepSums:
        sums = StepSums(torch.device("cpu"))
        for batch in batches:
            loss = self.output(batch)
            (loss / num_labels).backward()
            sums.add(loss, self._module)
        for parameter in self.pieces:
            dist.all_reduce(parameter.grad, group=self.mesh.data.group)
        return sums

    def output(self, batch: MicroBatch) -> torch.Tensor:
        loss: torch.Tensor = self._module(batch.model_inputs(torch.device("cpu")), batch.labels)
        return loss

    def update(self, *, norm: float | None, clip_at: float | None) -> None:
        assert norm is not None
        self._norm = norm
        if clip_at is not None and clip_at < norm:
            self.states.change(lambda _, values: values.mul_(clip_at / norm))
        self.states.optimizer.step()
        self.discard()

    def discard(self) -> None:
        self.states.optimizer.zero_grad()

    @property
    def norm_of_update(self) -> float | None:
        return self._norm

    def scores_at(self, batch: MicroBatch, position: int) -> torch.Tensor | None:
        logits: torch.Tensor = self._module(batch.model_inputs(torch.device("cpu")))
        return logits[0, position]

    def close(self) -> None:
        pass


class PlainRoom:
    """Entry of the engine; the test has joined the ranks."""

    def settle_plan(self, plan: RunPlan, run: RunPaths, process: Process) -> RunPlan:
        return plan

    def parameter_maker(
        self, plan: RunPlan, skeleton: nn.Module, device: torch.device, mesh: ProcessMesh
    ) -> MakeParameter | None:
        return None

    def build(self, job: Job) -> Engine:
        return PlainEngine(job)


SPEC = EngineSpec(name="plain", build="plain_engine:PlainRoom")


def train(cases: list[Case], process: Process) -> None:
    """Train each case as launched, with a plan that names this engine."""
    registered = EntryPoint(
        name=f"engine.{SPEC.name}", value="plain_engine:SPEC", group=registry.ENTRY_POINTS
    )
    registry._registered_entry_points = lambda: (registered,)  # as an installed package does
    for case in cases:
        plan = replace(case.plan, engine=SPEC.name)
        session = assemble(plan, case.run, process)
        events = EventWriter(case.run.events, case.attempt) if process.is_first else None
        Trainer(session, events, attempt=case.attempt).train()
        process.barrier()
        session.engine.close()
