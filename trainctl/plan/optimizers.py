"""Optimizer of a plan: its implementation, whether it is fused, and the settings it refuses."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from trainctl.config.derived import Derived
from trainctl.config.schema import Accelerator, DataType, OffloadDevice, RunConfig
from trainctl.hardware import Hardware
from trainctl.options.engine import engine_of
from trainctl.options.optimizer import Maker, spec_of


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
