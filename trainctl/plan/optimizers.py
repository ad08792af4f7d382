"""What each optimizer can be trained with: one table for the rules, the engine and the docs.

ZeRO gives an optimizer flat pieces of parameters. To an elementwise rule that is all the same; one
that looks at whole matrices (Muon, Adafactor), whole tensors (LAMB) or blocks of them (8-bit AdamW)
would compute something else, silently. DeepSpeed's and torch's do. So those four are trainctl's own
(`trainctl.train.optimizers`): they know which piece of which parameter they have and ask the
other ranks for what they lack, which gives the same numbers at every ZeRO stage.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum

from trainctl.config.derived import Derived
from trainctl.config.schema import (
    Accelerator,
    DataType,
    OffloadDevice,
    OptimizerConfig,
    OptimizerKind,
    RunConfig,
)
from trainctl.hardware import Hardware

_HOST = (OffloadDevice.none, OffloadDevice.cpu)
_EVERYWHERE = (*_HOST, OffloadDevice.nvme)

EIGHT_BIT_AT_ONCE = 2**22
"""Elements that 8-bit AdamW updates at a time, whole blocks: all in fp32 meanwhile."""


class Maker(Enum):
    """Whose code makes the update."""

    torch = "torch"
    deepspeed = "DeepSpeed"
    trainctl = "trainctl"


@dataclass(frozen=True, slots=True, kw_only=True)
class Capability:
    """What one kind of optimizer allows.

    Attributes:
        needs: What of a parameter one element's update depends on.
        states: Tensor states of the size of what they are for.
        matrix_states: Those of Muon's matrices, where they are others.
        stages: ZeRO stages.
        offload: Places of its states.
        tensor: Whether parameters may be cut over tensor-parallel ranks.
        low_precision_states: Whether the states may be kept in bf16.
        has_fused: Whether it has a fused kernel on accelerators.
        why_not: By the name of what is not allowed: the reason.
    """

    needs: str
    states: tuple[str, ...]
    matrix_states: tuple[str, ...] = ()
    stages: tuple[int, ...] = (0, 1, 2, 3)
    offload: tuple[OffloadDevice, ...] = (OffloadDevice.none,)
    tensor: bool = True
    low_precision_states: bool = False
    has_fused: bool = False
    why_not: dict[str, str] = field(default_factory=dict)


_NO_HOST_KERNEL = "DeepSpeed has no kernel that updates its states in host memory"
_NO_SWAP = "DeepSpeed's swapper holds the four tensors of Adam"
_ROUNDED = "a momentum in bf16 drops what a step adds to it"
_CUT = "a tensor rank has only a shard of a matrix"

CAPABILITIES: dict[OptimizerKind, Capability] = {
    OptimizerKind.adamw: Capability(
        needs="the element",
        states=("exp_avg", "exp_avg_sq"),
        offload=_EVERYWHERE,
        low_precision_states=True,
        has_fused=True,
    ),
    OptimizerKind.adam: Capability(
        needs="the element",
        states=("exp_avg", "exp_avg_sq"),
        offload=_EVERYWHERE,
        low_precision_states=True,
        has_fused=True,
    ),
    OptimizerKind.lion: Capability(
        needs="the element",
        states=("exp_avg",),
        offload=_HOST,
        has_fused=True,
        why_not={"nvme": _NO_SWAP, "states": _ROUNDED},
    ),
    OptimizerKind.muon: Capability(
        needs="the matrix",
        states=("exp_avg", "exp_avg_sq"),
        matrix_states=("momentum_buffer",),
        tensor=False,
        has_fused=True,
        why_not={
            "cpu": "whole matrices are orthogonalised on the device",
            "nvme": _NO_SWAP,
            "tensor": f"{_CUT}, and orthogonalising a shard is another update",
            "states": _ROUNDED,
        },
    ),
    OptimizerKind.adamw_8bit: Capability(
        needs="the block of 256",
        states=("exp_avg.codes", "exp_avg_sq.codes"),
        tensor=False,
        why_not={
            "cpu": _NO_HOST_KERNEL,
            "nvme": _NO_SWAP,
            "tensor": f"{_CUT}, and its blocks of 256 would be others",
            "states": "its states have 8 bits already",
        },
    ),
    OptimizerKind.adafactor: Capability(
        needs="the matrix",
        states=(),
        tensor=False,
        why_not={
            "cpu": _NO_HOST_KERNEL,
            "nvme": _NO_SWAP,
            "tensor": f"{_CUT}, and the second moment's rows and columns would be a shard's",
            "states": "its states are rows and columns, in fp32",
        },
    ),
    OptimizerKind.lamb: Capability(
        needs="the tensor",
        states=("exp_avg", "exp_avg_sq"),
        tensor=False,
        why_not={
            "cpu": _NO_HOST_KERNEL,
            "nvme": _NO_SWAP,
            "tensor": f"{_CUT}, and the trust ratio would be a shard's",
            "states": _ROUNDED,
        },
    ),
    OptimizerKind.sgd: Capability(
        needs="the element",
        states=("momentum_buffer",),
        offload=_HOST,
        has_fused=True,
        why_not={"nvme": _NO_SWAP, "states": _ROUNDED},
    ),
}


@dataclass(frozen=True, slots=True)
class Refusal:
    """A setting that the optimizer does not allow, why, and the nearest that it does."""

    key: str
    value: object
    why: str
    nearest: str


def refusals(config: RunConfig) -> Iterator[Refusal]:
    """What of a config its optimizer does not allow in trainctl's trainer."""
    can = CAPABILITIES[config.optimizer.kind]
    stage, offload = config.zero_stage.stage, config.offload.optimizer
    if stage not in can.stages:
        nearest = min(can.stages, key=lambda each: abs(each - stage))
        yield Refusal("zero_stage.stage", stage, can.why_not["stage"], f"zero_stage={nearest}")
    if offload not in can.offload:
        name = offload.value
        nearest_place = can.offload[-1].value
        yield Refusal("offload.optimizer", name, can.why_not[name], f"offload={nearest_place}")
    if config.parallelism.tensor > 1 and not can.tensor:
        size = config.parallelism.tensor
        yield Refusal("parallelism.tensor", size, can.why_not["tensor"], "parallelism.tensor=1")
    for name in ("master_weights", "optimizer_states"):
        kept = getattr(config.precision, name)
        if kept is not DataType.fp32 and not can.low_precision_states:
            key = f"precision.{name}"
            yield Refusal(key, kept.value, can.why_not["states"], f"{key}=fp32")


def state_names(optimizer: OptimizerConfig, *, uses_muon: bool) -> tuple[str, ...]:
    """Tensor states of a group, of the size of its parameters; the same whoever makes the update.

    Args:
        optimizer: The run's.
        uses_muon: Whether Muon updates the group.
    """
    can = CAPABILITIES[optimizer.kind]
    if optimizer.kind is OptimizerKind.sgd and not optimizer.momentum:
        return ()
    return can.matrix_states if uses_muon else can.states


def is_fused(config: RunConfig, hardware: Hardware) -> bool:
    """Whether one fused kernel on the device makes the update."""
    if not CAPABILITIES[config.optimizer.kind].has_fused:
        return False
    if config.offload.optimizer is not OffloadDevice.none:
        return False
    if config.optimizer.fused is None:
        return hardware.accelerator is not Accelerator.cpu
    return config.optimizer.fused


def reasons(config: RunConfig, hardware: Hardware) -> Iterator[Derived]:
    """Whose optimizer it is, where the config leaves it open."""
    if not config.trains_itself:
        return
    kind, made_by = config.optimizer.kind, maker(config, hardware)
    can = CAPABILITIES[kind]
    if made_by is Maker.trainctl:
        why = f"one element's update needs {can.needs}, and ZeRO's pieces are cut anywhere"
        if kind is OptimizerKind.lion:
            why = "DeepSpeed's kernels are for GPUs and for states in host memory"
        yield Derived(key="optimizer.made_by", value=made_by.value, reason=why)
    if config.optimizer.fused is None and is_fused(config, hardware):
        yield Derived(key="optimizer.fused", value=True, reason=f"on {hardware.accelerator.value}")


def maker(config: RunConfig, hardware: Hardware) -> Maker:
    """Whose code updates: torch's and DeepSpeed's come by the JSON, trainctl's beside it."""
    kind, offloaded = config.optimizer.kind, config.offload.optimizer is not OffloadDevice.none
    if kind in (OptimizerKind.adamw, OptimizerKind.adam):
        return Maker.deepspeed if offloaded else Maker.torch
    if kind is OptimizerKind.lion:
        by_kernel = offloaded or is_fused(config, hardware)
        return Maker.deepspeed if by_kernel else Maker.trainctl
    return Maker.torch if kind is OptimizerKind.sgd else Maker.trainctl
