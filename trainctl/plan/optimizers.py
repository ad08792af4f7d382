"""Optimizer of a plan: its implementation, the settings it refuses, and its learning rates."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import sqrt

from trainctl.config.derived import Derived
from trainctl.config.schema import (
    Accelerator,
    AdaptiveClipping,
    DataType,
    LrScaling,
    OffloadDevice,
    OptimizerConfig,
    RunConfig,
)
from trainctl.hardware import Hardware
from trainctl.options.engine import engine_of
from trainctl.options.optimizer import Maker, spec_of
from trainctl.plan.types import Batch


@dataclass(frozen=True, slots=True)
class Refusal:
    """Setting that the optimizer does not allow, with the reason and the nearest allowed one."""

    key: str
    value: object
    why: str
    nearest: str


def refusals(config: RunConfig) -> Iterator[Refusal]:
    """Yield the settings of a config that its optimizer does not allow in trainctl's trainer."""
    can = spec_of(config.optimizer)
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


def is_fused(config: RunConfig, hardware: Hardware) -> bool:
    """Return True if a single fused kernel on the device makes the update."""
    if spec_of(config.optimizer).fused_by not in engine_of(config).makers:
        return False
    if config.offload.optimizer is not OffloadDevice.none:
        return False
    if config.optimizer.fused is None:
        return hardware.accelerator is not Accelerator.cpu
    return config.optimizer.fused


def reasons(config: RunConfig, hardware: Hardware) -> Iterator[Derived]:
    """Yield the optimizer's implementation and fusion where the config does not set them."""
    if not config.trains_itself:
        return
    spec, made_by = spec_of(config.optimizer), optimizer_maker(config, hardware)
    if made_by is Maker.trainctl:
        needs = f"one element's update needs {spec.needs}, and ZeRO's pieces are cut anywhere"
        why = spec.is_ours_because or needs
        yield Derived(key="optimizer.made_by", value=made_by.value, reason=why)
    if config.optimizer.fused is None and is_fused(config, hardware):
        yield Derived(key="optimizer.fused", value=True, reason=f"on {hardware.accelerator.value}")


def optimizer_maker(config: RunConfig, hardware: Hardware) -> Maker:
    """Return whose implementation updates the weights. torch's and DeepSpeed's are named in the
    JSON; trainctl's is passed beside it.
    """
    spec = spec_of(config.optimizer)
    if config.offload.optimizer is not OffloadDevice.none:
        on_host = spec.made_on_host_by or spec.made_by
        return on_host if on_host in engine_of(config).makers else spec.made_by
    # torch's fused kernel is an argument of its optimizer; DeepSpeed's is a class of its own.
    if spec.fused_by is Maker.deepspeed and is_fused(config, hardware):
        return spec.fused_by
    return spec.made_by


SOURCES = {LrScaling.linear: "arXiv:1706.02677", LrScaling.sqrt: "arXiv:2205.10287"}


def lr_scale(optimizer: OptimizerConfig, batch: Batch) -> float:
    """Return the factor of all learning rates; 1 without scaling.

    `optimizer.lr` is the rate tuned at b = `optimizer.lr_scaling_batch_size` sequences. At a global
    batch of B, which is the batch after a ramp, the factor is

    - linear: B / b, for SGD                         (arXiv:1706.02677, the linear scaling rule)
    - sqrt: sqrt(B / b), for Adam and its relatives  (arXiv:2205.10287, the square root rule)
    """
    if optimizer.lr_scaling is LrScaling.none or optimizer.lr_scaling_batch_size is None:
        return 1.0
    ratio = batch.global_batch_size / optimizer.lr_scaling_batch_size
    return ratio if optimizer.lr_scaling is LrScaling.linear else sqrt(ratio)


def learning_rate_reasons(config: RunConfig, batch: Batch) -> Iterator[Derived]:
    """Yield the scaled rates with their arithmetic, and adaptive clipping if enabled."""
    optimizer, scale = config.optimizer, lr_scale(config.optimizer, batch)
    if optimizer.lr_scaling is not LrScaling.none:
        ratio = (
            f"global_batch_size {batch.global_batch_size} /"
            f" optimizer.lr_scaling_batch_size {optimizer.lr_scaling_batch_size}"
        )
        factor = f"sqrt({ratio})" if optimizer.lr_scaling is LrScaling.sqrt else f"({ratio})"
        source = SOURCES[optimizer.lr_scaling]
        rates = {"lr": optimizer.lr}
        spec = spec_of(optimizer)
        matrix_rate = spec.matrix_rate(optimizer)
        if matrix_rate is not None:
            rates[spec.matrix_lr] = matrix_rate
        for name, rate in rates.items():
            why = f"optimizer.{name} {rate:g} x {factor}, {source}"
            sources = (f"optimizer.{name}", "optimizer.lr_scaling_batch_size")
            yield Derived(key=f"peak_{name}", value=rate * scale, reason=why, sources=sources)
    if config.trains_itself and config.gradients.adaptive_clipping is not AdaptiveClipping.none:
        kind = config.gradients.adaptive_clipping.value
        fixed = f"optimizer.gradient_clipping {optimizer.gradient_clipping:g}"
        why = f"decides alone, in place of {fixed}"
        if config.gradients.adaptive_clipping is AdaptiveClipping.mean:
            why = f"decides alone from the second update on, {fixed} for the first"
        yield Derived(
            key="clip_at",
            value=kind,
            reason=f"gradients.adaptive_clipping={kind} {why}",
            sources=("gradients.adaptive_clipping", "optimizer.gradient_clipping"),
        )
