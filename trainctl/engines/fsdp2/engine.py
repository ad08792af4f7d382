"""Training steps with torch's `fully_shard` around the model.

Shards are along the first dimension: a rank reads its own values only, and torch gathers the
others. `fully_shard` splits the rows of a parameter as `torch.chunk` does: the last ranks may have
fewer rows than the first, or none. So a shard is a range of the flattened parameter.

With HSDP the ranks are groups that each hold all shards. Gradients are reduced within the group in
each micro-batch, and their shards are summed over the groups once a step.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from trainctl.config.schema import Accelerator
from trainctl.engines import patch_checks as declared
from trainctl.engines.micro_batch import MicroBatch, StepSums
from trainctl.engines.process import Axis, Process, ProcessMesh, start_process
from trainctl.engines.protocol import (
    Change,
    Engine,
    Job,
    MakeParameter,
    States,
    clipping_factor,
    scale_gradients,
)
from trainctl.engines.shards import ElementRange, Fragment, ParameterPiece, Pieces, Read
from trainctl.plans.fsdp2 import PREFIX
from trainctl.plans.types import RunPlan
from trainctl.runs.layout import RunPaths

_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of the engine, read from a plan."""

    reshard_after_forward: bool
    """Whether weights are freed after the forward pass and gathered again for the backward pass."""
    param_dtype: torch.dtype
    """Format in which weights are gathered."""
    reduce_dtype: torch.dtype
    """Format in which gradients are reduced."""
    offload: bool
    """Whether shards, their gradients and states are in host memory."""
    pin_memory: bool
    """Whether offloaded shards are in page-locked memory; without an accelerator they never are."""
    reduce_every_micro_batch: bool
    """Whether gradients are reduced in each backward pass, rather than once a step."""
    optimizer: dict[str, Any]
    """Class name and arguments of torch's optimizer; empty if the trainer builds its own."""

    @classmethod
    def of(cls, plan: RunPlan) -> Settings:
        """Return the settings in a plan."""
        told = plan.settings[PREFIX]
        return cls(
            reshard_after_forward=told["reshard_after_forward"],
            param_dtype=_TYPES[told["param_dtype"]],
            reduce_dtype=_TYPES[told["reduce_dtype"]],
            offload=told["offload"],
            pin_memory=told["pin_memory"],
            reduce_every_micro_batch=told["reduce_every_micro_batch"],
            optimizer=told.get("optimizer", {}),
        )

    @property
    def mixed_precision(self) -> MixedPrecisionPolicy:
        return MixedPrecisionPolicy(param_dtype=self.param_dtype, reduce_dtype=self.reduce_dtype)

    def offload_policy(self, device: torch.device) -> OffloadPolicy:
        """Return the offload policy of a model that computes on `device`."""
        if not self.offload:
            return OffloadPolicy()
        return CPUOffloadPolicy(pin_memory=self.pin_memory and device.type != "cpu")


def shard_rows(count: int, axis: Axis) -> range:
    """Return the rows of this rank's shard of a parameter with `count` rows."""
    each = -(-count // axis.size)
    return range(min(axis.index * each, count), min((axis.index + 1) * each, count))


def shard_start(shape: torch.Size, axis: Axis) -> int:
    """Return the first element of this rank's shard in the flattened parameter."""
    return shard_rows(shape[0], axis).start * shape[1:].numel()


class ShardMaker:
    """Maker of this rank's shard of each parameter, in fp32: the tensor that the optimizer updates.

    Args:
        shards: The ranks over which parameters are sharded.
    """

    def __init__(self, shards: Axis, place: torch.device) -> None:
        self._shards, self._place = shards, place

    def __call__(self, meta: nn.Parameter, piece: ParameterPiece, read: Read) -> nn.Parameter:
        """Return the shard. It replaces the skeleton's parameter until `shard_model` wraps it in a
        DTensor.
        """
        rows = shard_rows(meta.shape[0], self._shards)
        shard = torch.empty((len(rows), *meta.shape[1:]), dtype=torch.float32, device=self._place)
        start = shard_start(meta.shape, self._shards)
        if shard.numel():
            shard.view(-1).copy_(read(start, start + shard.numel()))
        return nn.Parameter(shard, requires_grad=meta.requires_grad)


@dataclass(frozen=True, slots=True)
class ShardedParameter:
    """A parameter that `fully_shard` manages."""

    shard: nn.Parameter
    """This rank's shard as a plain tensor, which the optimizer updates."""
    parameter: nn.Parameter
    """The model's DTensor, whose local part is the shard. It receives the gradient."""


def shard_model(
    module: nn.Module,
    blocks: Sequence[nn.Module],
    pieces: Pieces,
    ranks: ProcessMesh,
    settings: Settings,
    device: torch.device,
) -> tuple[list[FSDPModule], list[ShardedParameter]]:
    """Let torch gather each block while it runs, and all other parameters while the model runs.

    The embedding is in one unit with the output projection. In a unit of its own it would silently
    become untied.

    Args:
        module: The model, whose parameters are this rank's shards.
        blocks: Modules in it that are gathered one at a time.
        device: Device on which the model computes.

    Returns:
        The units, the whole model last, and the parameters in the order of `pieces`.
    """
    mesh = _device_mesh(ranks, device)
    units: list[FSDPModule] = []
    found: dict[nn.Parameter, nn.Parameter] = {}
    for unit in (*blocks, module):
        slots = _parameter_places(unit, pieces)
        whole = {
            shard: nn.Parameter(
                torch.empty(pieces[shard].shape, dtype=shard.dtype, device="meta"),
                requires_grad=shard.requires_grad,
            )
            for _, _, shard in slots
        }
        for owner, name, shard in slots:
            setattr(owner, name, whole[shard])
        # Parameters outside the blocks stay gathered from their first use to their last.
        reshard = settings.reshard_after_forward and unit is not module
        sharded = fully_shard(
            unit,
            mesh=mesh,
            reshard_after_forward=reshard,
            mp_policy=settings.mixed_precision,
            offload_policy=settings.offload_policy(device),
        )
        for owner, name, shard in slots:
            found.setdefault(shard, _make_sharded_parameter(getattr(owner, name), shard))
            setattr(owner, name, found[shard])
        sharded._apply(lambda tensor: tensor)  # pads and pins the shards that it finds now
        for _, _, shard in slots:
            local = found[shard].detach()
            assert isinstance(local, DTensor)
            shard.data = local.to_local()
        units.append(sharded)
    return units, [ShardedParameter(shard, found[shard]) for shard in pieces]


def _device_mesh(ranks: ProcessMesh, device: torch.device) -> DeviceMesh:
    """Return the mesh for `fully_shard`: shards, or with HSDP (copies, shards)."""
    if ranks.copies.size == 1:
        return DeviceMesh.from_group(ranks.shards.group, device.type)
    return DeviceMesh.from_group(
        [ranks.copies.group, ranks.shards.group],
        device.type,
        mesh=torch.tensor(ranks.replicas.ranks).view(ranks.copies.size, ranks.shards.size),
        mesh_dim_names=("copies", "shards"),
    )


def _parameter_places(unit: nn.Module, pieces: Pieces) -> list[tuple[nn.Module, str, nn.Parameter]]:
    """Return each place of a parameter in a unit (module, name, parameter), without inner units."""
    return [
        (owner, name, parameter)
        for owner in unit.modules()
        for name, parameter in owner.named_parameters(recurse=False, remove_duplicate=False)
        if parameter in pieces
    ]


def _make_sharded_parameter(meta: nn.Parameter, shard: nn.Parameter) -> nn.Parameter:
    """Return a sharded parameter that holds this rank's values."""
    assert isinstance(meta, DTensor)
    values = DTensor.from_local(
        shard.detach(),
        meta.device_mesh,
        meta.placements,
        run_check=False,
        shape=meta.shape,
        stride=meta.stride(),
    )
    return nn.Parameter(values, requires_grad=shard.requires_grad)


class Shards(States):
    """States whose tensors are each a range of one parameter, with the same range of its gradient.

    Args:
        parameters: All parameters that the model trains.
        units: Modules that gather the parameters.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        parameters: Sequence[ShardedParameter],
        units: Sequence[FSDPModule],
        pieces: Pieces,
        mesh: ProcessMesh,
    ) -> None:
        self.optimizer = optimizer
        self._units, self._parameters = units, parameters
        groups = {p: group for group in optimizer.param_groups for p in group["params"]}
        self.tensors = [each.shard for each in parameters]
        self._groups = [groups[tensor] for tensor in self.tensors]
        self.fragments = [
            Fragment.of_piece(
                pieces[shard],
                shard_start(pieces[shard].shape, mesh.shards),
                shard.numel(),
                index,
                0,
                dealt=index % mesh.copies.size == mesh.copies.index,
            )
            for index, shard in enumerate(self.tensors)
            if shard.numel()
        ]

    def group(self, index: int) -> dict[str, Any]:
        return self._groups[index]

    def copy_masters_to_parameters(self) -> None:
        """Free the gathered parameters, which hold the old values, so that torch gathers them
        again.
        """
        for unit in self._units:
            unit.reshard()

    def gradients(self) -> Iterator[tuple[Fragment, int, torch.Tensor]]:
        for fragment in self.fragments:
            gradient = self.tensors[fragment.tensor].grad
            assert gradient is not None
            yield fragment, fragment.start, gradient.view(-1)

    def change(self, change: Change) -> None:
        for fragment, start, gradient in self.gradients():
            change(ElementRange(fragment.name, None, start, fragment.numel), gradient)

    def take_gradients(self) -> None:
        """Set the shards' gradients from the parameters'; zeros if a parameter has none."""
        for each in self._parameters:
            gradient: Any = each.parameter.grad
            has_none = gradient is None
            each.shard.grad = torch.zeros_like(each.shard) if has_none else gradient.to_local()

    @torch.no_grad()
    def update(self, norm: float, limit: float | None) -> None:
        """Clip the gradients and step.

        Args:
            limit: Clipping threshold; None does not clip.
        """
        gradients = [gradient for _, _, gradient in self.gradients()]
        scale_gradients(gradients, clipping_factor(norm, limit))
        self.optimizer.step()

    def drop_gradients(self) -> None:
        """Clear the gradients of shards and parameters."""
        for each in self._parameters:
            each.shard.grad = each.parameter.grad = None


class Fsdp2Engine(Engine):
    """Data parallelism with parameters, gradients and optimizer states in shards.

    Args:
        job: What the engine is built from; its model holds this rank's shards (`ShardMaker`).
    """

    states: Shards

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._settings = Settings.of(job.plan)
        self._has_flash_attention = job.flash_attention
        units, parameters = shard_model(
            job.module, job.blocks, job.pieces, job.mesh, self._settings, job.process.device
        )
        self._module, self._units, self._root = job.module, units, units[-1]
        optimizer = job.optimizer
        if optimizer is None:
            own = self._settings.optimizer
            optimizer = getattr(torch.optim, own["type"])(job.groups, **own["params"])
        self.states = Shards(optimizer, parameters, units, job.pieces, job.mesh)
        self._norm: float | None = None

    @property
    def module(self) -> nn.Module:
        return self._module

    def run(self, batches: Sequence[MicroBatch], num_labels: float) -> StepSums:
        """Run forward and backward of each micro-batch.

        torch averages gradients over the replicas, so the loss is scaled by their number to get a
        sum.
        """
        scale = self.mesh.replicas.size / num_labels
        sums = StepSums(self._process.device)
        for index, batch in enumerate(batches):
            is_last = index + 1 == len(batches)
            reduces = is_last or self._settings.reduce_every_micro_batch
            self._root.set_requires_gradient_sync(reduces)
            # Gradients that wait for the sum over the groups would stay on the device.
            self._root.set_requires_all_reduce(is_last or (reduces and self._settings.offload))
            with self.times.part("forward"):
                loss = self.output(batch)
            with self.times.part("backward"):
                (loss * scale).backward()
                sums.add(loss, self._module)
        self.states.take_gradients()
        return sums

    def update(self, *, norm: float | None, clip_at: float | None) -> None:
        assert norm is not None  # gradients are always accessible
        with self.times.part("optimizer"):
            self.states.update(norm, clip_at)
            self.discard()
        self._norm = norm

    def discard(self) -> None:
        self.states.drop_gradients()

    @property
    def norm_of_update(self) -> float | None:
        return self._norm

    def output(self, batch: MicroBatch) -> torch.Tensor:
        return self._module(*self._arguments(batch))

    def scores_at(self, batch: MicroBatch, position: int) -> torch.Tensor | None:
        inputs, *_ = self._arguments(batch)
        scores: torch.Tensor = self._module(inputs)
        return scores[0, position]

    @contextmanager
    def whole_weights(self) -> Iterator[None]:
        for unit in self._units:
            unit.set_reshard_after_forward(False, recurse=False)
            unit.unshard()
        try:
            yield
        finally:
            for unit in self._units:
                reshards = self._settings.reshard_after_forward and unit is not self._root
                unit.set_reshard_after_forward(reshards, recurse=False)
                unit.reshard()

    def _arguments(self, batch: MicroBatch) -> tuple[dict[str, Any], torch.Tensor, dict[str, Any]]:
        """Return the arguments of a model call, on this rank's device."""
        device = self._process.device
        inputs = batch.model_inputs(device, flash_attention=self._has_flash_attention)
        return inputs, batch.labels.to(device, non_blocking=True), self._objective_inputs(batch)

    def close(self) -> None:
        """Free the gathered parameters; the engine has no threads or files."""
        self.states.copy_masters_to_parameters()


class Fsdp2Backend:
    """Entry point of the FSDP2 engine (`trainctl.engines.protocol.EngineBackend`)."""

    def start_process(self, plan: RunPlan) -> Process:
        declared.apply_patches(plan.config)
        device = torch.device("cpu")
        if plan.hardware.accelerator is not Accelerator.cpu:
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(device)
        return start_process(plan, device, dist.init_process_group)

    def settle_plan(self, plan: RunPlan, run: RunPaths, process: Process) -> RunPlan:
        """Return the plan unchanged: nothing in it depends on the machine."""
        return plan

    def parameter_maker(
        self, plan: RunPlan, skeleton: nn.Module, device: torch.device, mesh: ProcessMesh
    ) -> MakeParameter | None:
        place = torch.device("cpu") if Settings.of(plan).offload else device
        return ShardMaker(mesh.shards, place)

    def build(self, job: Job) -> Engine:
        return Fsdp2Engine(job)
