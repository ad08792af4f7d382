"""Rules about number formats."""

from __future__ import annotations

from collections.abc import Iterator

from trainctl.config.schema import Accelerator, DataType, OffloadDevice, OptimizerKind
from trainctl.errors import Finding
from trainctl.plan.precision import formats
from trainctl.plan.rules.draft import Draft, error


def compute_type_runs_here(draft: Draft) -> Iterator[Finding]:
    """The device computes in the asked type."""
    compute, hardware = draft.config.precision.compute, draft.hardware
    if compute is DataType.bf16 and not hardware.supports_bf16:
        yield error(
            "precision.compute",
            f"precision.compute=bf16, but {hardware.name} does not compute in bf16",
            "precision=fp16 or precision=fp32",
        )
    if compute is DataType.fp16 and hardware.accelerator is Accelerator.cpu:
        yield error(
            "precision.compute",
            "precision.compute=fp16: DeepSpeed does not train in fp16 on the CPU",
            "precision=bf16 or precision=fp32",
        )
    if compute is DataType.fp8 and not hardware.supports_fp8:
        yield error(
            "precision.compute",
            f"precision.compute=fp8, but {hardware.name} does not compute in fp8",
            "precision=bf16" if hardware.supports_bf16 else "precision=fp16",
        )


def gradients_accumulate_in_a_wider_type(draft: Draft) -> Iterator[Finding]:
    """The weights' type or fp32, and without ZeRO the weights' type only (runtime/engine.py)."""
    used = formats(draft.config.precision)
    accumulate, weights = used.gradient_accumulation, used.weights
    if accumulate is weights:
        return
    key = "precision.gradient_accumulation"
    if accumulate is not DataType.fp32:
        yield error(
            key,
            f"{key}={accumulate.value} while the weights are {weights.value}",
            f"{key}={weights.value} or fp32",
        )
    elif draft.config.zero_stage.stage == 0:
        yield error(
            key,
            f"{key}=fp32 with {weights.value} weights needs ZeRO; zero_stage.stage is 0",
            f"zero_stage=1, or {key}={weights.value}",
        )


def gradients_travel_in_a_known_type(draft: Draft) -> Iterator[Finding]:
    """What DeepSpeed communicates in (runtime/config.py)."""
    if draft.config.precision.communication is DataType.fp8:
        yield error(
            "precision.communication",
            "precision.communication=fp8: DeepSpeed sends gradients as fp32, bf16 or fp16",
            "precision.communication=bf16",
        )


def autocast_has_a_lower_type(draft: Draft) -> Iterator[Finding]:
    """Autocast runs matrix products in bf16 or fp16."""
    precision = draft.config.precision
    if precision.autocast and precision.compute not in (DataType.bf16, DataType.fp16):
        yield error(
            "precision.autocast",
            f"precision.autocast needs bf16 or fp16, and precision.compute is "
            f"{precision.compute.value}",
            "precision.autocast=false, or precision.compute=bf16",
        )


def master_weights_are_kept_in_a_known_type(draft: Draft) -> Iterator[Finding]:
    """fp32, or the compute type where DeepSpeed can (runtime/base_optimizer.py)."""
    config = draft.config
    precision, weights = config.precision, formats(config.precision).weights
    master, states = precision.master_weights, precision.optimizer_states
    stage, offloaded = config.zero_stage.stage, config.offload.optimizer is not OffloadDevice.none
    key = "precision.master_weights"
    if master is not DataType.fp32 and master is not weights:
        yield error(
            key,
            f"{key}={master.value} while the weights are {weights.value}",
            f"{key}=fp32" if weights is DataType.fp32 else f"{key}=fp32 or {weights.value}",
        )
    elif master is not DataType.fp32 and stage == 0:
        yield error(key, f"{key}={master.value} needs ZeRO; zero_stage.stage is 0", "zero_stage=1")
    elif master is DataType.fp16 and not offloaded:
        yield error(
            key,
            f"{key}=fp16 needs the optimizer in host memory",
            f"{key}=fp32, or offload.optimizer=cpu",
        )
    elif master is DataType.bf16 and states is not DataType.bf16 and not offloaded:
        yield error(
            key,
            f"{key}=bf16 on the device needs bf16 optimizer states too",
            f"precision.optimizer_states=bf16, or {key}=fp32",
        )
    if states not in (DataType.fp32, DataType.bf16):
        yield error(
            "precision.optimizer_states",
            f"precision.optimizer_states={states.value} is not kept by DeepSpeed",
            "precision.optimizer_states=fp32, or optimizer=adamw_8bit for smaller ones",
        )
    elif states is DataType.bf16 and master is not DataType.bf16:
        yield error(
            "precision.optimizer_states",
            f"precision.optimizer_states=bf16 needs {key}=bf16, and it is {master.value}",
            f"precision.optimizer_states=fp32, or {key}=bf16",
        )


def lamb_adapts_its_loss_scale(draft: Draft) -> Iterator[Finding]:
    """DeepSpeed's Lamb refuses a fixed loss scale (runtime/engine.py)."""
    config = draft.config
    fixed = config.precision.compute is DataType.fp16 and config.precision.loss_scale > 0
    if config.optimizer.kind is OptimizerKind.lamb and fixed:
        yield error(
            "precision.loss_scale",
            f"precision.loss_scale={config.precision.loss_scale:g} with optimizer.kind=lamb: "
            "DeepSpeed's Lamb needs an adaptive one",
            "precision.loss_scale=0",
        )


def optimizer_has_a_kernel_here(draft: Draft) -> Iterator[Finding]:
    """DeepSpeed's Lion and Lamb are GPU kernels; only an offloaded Lion runs on the CPU."""
    config = draft.config
    kind, offloaded = config.optimizer.kind, config.offload.optimizer is not OffloadDevice.none
    lacks = kind is OptimizerKind.lamb or (kind is OptimizerKind.lion and not offloaded)
    if lacks and draft.hardware.accelerator is Accelerator.cpu:
        yield error(
            "optimizer.kind",
            f"optimizer.kind={kind.value} is a GPU kernel of DeepSpeed, and the hardware is cpu",
            "optimizer=adamw",
        )
