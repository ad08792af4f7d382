"""Shards along the first dimension: a rank reads its own values only, and torch gathers the others.

`fully_shard` splits the rows of a parameter as `torch.chunk` does: the last ranks may have fewer
rows than the first, or none. So a shard is a range of the flattened parameter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
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

from trainctl.engines.process import Axis
from trainctl.engines.shards import ParameterPiece, Pieces, Read
from trainctl.plan.fsdp2 import PREFIX
from trainctl.plan.types import RunPlan

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

    def make_optimizer(self, groups: list[dict[str, Any]]) -> Optimizer:
        """Return torch's optimizer over parameter groups, each of which has its own rate and
        decay.
        """
        made: Optimizer = getattr(torch.optim, self.optimizer["type"])(
            groups, **self.optimizer["params"]
        )
        return made


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
        replicas: The ranks over which parameters are sharded.
        place: The device of the shards.
    """

    def __init__(self, replicas: Axis, place: torch.device) -> None:
        self._replicas, self._place = replicas, place

    def __call__(self, meta: nn.Parameter, piece: ParameterPiece, read: Read) -> nn.Parameter:
        """Return the shard. It replaces the skeleton's parameter until `shard_model` wraps it in a
        DTensor.
        """
        rows = shard_rows(meta.shape[0], self._replicas)
        shard = torch.empty((len(rows), *meta.shape[1:]), dtype=torch.float32, device=self._place)
        start = shard_start(meta.shape, self._replicas)
        if shard.numel():
            shard.view(-1).copy_(read(start, start + shard.numel()))
        return nn.Parameter(shard, requires_grad=meta.requires_grad)


@dataclass(frozen=True, slots=True)
class Sharded:
    """A parameter that `fully_shard` manages."""

    shard: nn.Parameter
    """This rank's shard as a plain tensor, which the optimizer updates."""
    parameter: nn.Parameter
    """The model's DTensor, whose local part is the shard. It receives the gradient."""

    def take_gradient(self) -> None:
        """Set the shard's gradient from the parameter's; zeros if the parameter has none."""
        gradient = self.parameter.grad
        if gradient is None:
            self.shard.grad = torch.zeros_like(self.shard)
        else:
            assert isinstance(gradient, DTensor)
            self.shard.grad = gradient.to_local()

    def drop_gradient(self) -> None:
        """Clear the gradient of the shard and of the parameter."""
        self.shard.grad = self.parameter.grad = None


def shard_model(
    module: nn.Module,
    blocks: Sequence[nn.Module],
    pieces: Pieces,
    replicas: Axis,
    settings: Settings,
    device: torch.device,
) -> tuple[list[FSDPModule], list[Sharded]]:
    """Let torch gather each block while it runs, and all other parameters while the model runs.

    The embedding is in one unit with the output projection. In a unit of its own it would silently
    become untied.

    Args:
        module: The model, whose parameters are this rank's shards.
        blocks: Modules in it that are gathered one at a time.
        replicas: The ranks over which parameters are sharded.
        device: Device on which the model computes.

    Returns:
        The units, the whole model last, and the parameters in the order of `pieces`.
    """
    mesh = DeviceMesh.from_group(replicas.group, device.type)
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
    return units, [Sharded(shard, found[shard]) for shard in pieces]


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
