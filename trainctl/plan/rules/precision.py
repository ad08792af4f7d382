"""Rules about number formats."""

from __future__ import annotations

from collections.abc import Iterator

from trainctl.config.schema import (
    Accelerator,
    DataType,
    OffloadDevice,
)
from trainctl.errors import Finding
from trainctl.options import model as families
from trainctl.options.optimizer import spec_of
from trainctl.plan.precision import formats
from trainctl.plan.rules.draft import Draft, choices, error, nearest_multiples

FP8_MULTIPLE = 16
"""Of every dimension of a matrix product in fp8 (torch._scaled_mm)."""


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
    emulated = draft.config.precision.emulate_fp8
    if compute is DataType.fp8 and not hardware.supports_fp8 and not emulated:
        other = "precision=bf16" if hardware.supports_bf16 else "precision=fp16"
        yield error(
            "precision.compute",
            f"precision.compute=fp8, but {hardware.name} does not compute in fp8",
            f"{other}, or precision.emulate_fp8=true to try it slowly",
        )


def loss_is_scaled_where_deepspeed_does(draft: Draft) -> Iterator[Finding]:
    """Without ZeRO, `engine.backward` scales no loss, but the update divides by the scale.

    (runtime/engine.py scales for a ZeROOptimizer only; fp16/unfused_optimizer.py is none.)
    """
    zero = draft.config.zero_stage
    if formats(draft.config.precision).weights is DataType.fp16 and zero.stage == 0:
        yield error(
            "zero_stage.stage",
            "zero_stage.stage=0 with fp16 weights: DeepSpeed divides the gradients by a loss scale "
            "that it never multiplied the loss with",
            "zero_stage=1",
        )


def loss_scale_starts_above_its_least(draft: Draft) -> Iterator[Finding]:
    """An adaptive scale starts at its smallest value or above: an overflow never enlarges it."""
    precision = draft.config.precision
    is_adaptive = precision.compute is DataType.fp16 and precision.loss_scale == 0
    first = 2**precision.initial_scale_power
    if is_adaptive and precision.min_loss_scale > first:
        key = "precision.min_loss_scale"
        yield error(
            key,
            f"{key}={precision.min_loss_scale} is above the first loss scale, {first} "
            f"(precision.initial_scale_power={precision.initial_scale_power})",
            f"{key}={first} or less",
        )


def fp8_has_matrices_that_fit(draft: Draft) -> Iterator[Finding]:
    """What torchao converts, and what its products take: whole matrices, multiples of 16."""
    config = draft.config
    if config.precision.compute is not DataType.fp8:
        return
    model, batch = config.model, draft.batch
    key = "precision.compute"
    if families.spec_of(model).inputs_first:
        yield error(
            key,
            f"precision.compute=fp8 converts linear layers, and {model.family} has none: its "
            "matrices are transformers' Conv1D",
            "precision=bf16",
        )
    if config.parallelism.tensor > 1:
        yield error(
            key,
            f"precision.compute=fp8 with parallelism.tensor={config.parallelism.tensor}: the "
            "sharded layers are not converted",
            "parallelism.tensor=1, or precision=bf16",
        )
    for name in ("hidden_size", "intermediate_size"):
        if getattr(model, name) % FP8_MULTIPLE:
            yield error(
                f"model.{name}",
                f"model.{name}={getattr(model, name)} with precision.compute=fp8: the products "
                f"take multiples of {FP8_MULTIPLE}",
                choices(nearest_multiples(getattr(model, name), FP8_MULTIPLE), f"model.{name}"),
            )
    # In a product for the weights' gradient the tokens are the inner dimension.
    if batch is not None:
        tokens = batch.micro_batch_size * batch.sequence_length // config.parallelism.sequence
        if tokens % FP8_MULTIPLE:
            yield error(
                "training.sequence_length",
                f"{tokens} tokens in a forward pass with precision.compute=fp8: the products take "
                f"multiples of {FP8_MULTIPLE}",
                choices(
                    nearest_multiples(batch.sequence_length, FP8_MULTIPLE),
                    "training.sequence_length",
                ),
            )


def gradients_accumulate_in_a_wider_type(draft: Draft) -> Iterator[Finding]:
    """The weights' type or fp32, where DeepSpeed does not take another one silently."""
    used, config = formats(draft.config.precision), draft.config
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
        return
    stage, offloaded = config.zero_stage.stage, config.offload.optimizer is not OffloadDevice.none
    if stage == 0:  # runtime/engine.py
        yield error(
            key,
            f"{key}=fp32 with {weights.value} weights needs ZeRO; zero_stage.stage is 0",
            f"zero_stage=1, or {key}={weights.value}",
        )
    elif stage < 3 and offloaded:  # zero/stage_1_and_2.py: buffers in host memory
        yield error(
            key,
            f"{key}=fp32 with offload.optimizer at stage {stage}: DeepSpeed accumulates in "
            f"{weights.value} in host memory all the same",
            f"zero_stage=3, or {key}={weights.value}",
        )
    elif stage == 1 and config.precision.master_weights is DataType.bf16:  # bf16_optimizer.py
        yield error(
            "precision.master_weights",
            f"precision.master_weights=bf16 with {key}=fp32 at stage 1: DeepSpeed keeps fp32 "
            "master weights all the same",
            f"zero_stage=2, or {key}=bf16",
        )


def gradients_travel_in_a_known_type(draft: Draft) -> Iterator[Finding]:
    """What DeepSpeed communicates in (runtime/config.py)."""
    if draft.config.precision.communication is DataType.fp8:
        yield error(
            "precision.communication",
            "precision.communication=fp8: DeepSpeed sends gradients as fp32, bf16 or fp16",
            "precision.communication=bf16",
        )
    precision = draft.config.precision
    wire = precision.communication
    if precision.autocast and wire not in (None, DataType.fp32, precision.compute):
        compute = precision.compute.value
        yield error(
            "precision.communication",
            f"precision.communication={wire.value} under autocast in {compute}: DeepSpeed sends "
            f"gradients as fp32 or {compute}",
            f"precision.communication=fp32 or {compute}",
        )


def autocast_has_a_lower_type(draft: Draft) -> Iterator[Finding]:
    """Autocast runs matrix products in bf16.

    In fp16 DeepSpeed clips by the norm of gradients that torch's scaler has still scaled, and after
    an overflow the scale stays (zero/stage_1_and_2.py, `step` and `_optimizer_step`).
    """
    precision = draft.config.precision
    if not precision.autocast:
        return
    if precision.compute is DataType.fp16:
        yield error(
            "precision.autocast",
            "precision.autocast with precision.compute=fp16: DeepSpeed clips the scaled gradients, "
            "and does not lower the scale after an overflow",
            "precision=autocast-bf16, or precision.autocast=false",
        )
    elif precision.compute is not DataType.bf16:
        yield error(
            "precision.autocast",
            f"precision.autocast needs bf16, and precision.compute is {precision.compute.value}",
            "precision.autocast=false, or precision.compute=bf16",
        )
    if draft.config.zero_stage.quantized_weights and draft.config.zero_stage.stage == 3:
        yield error(
            "zero_stage.quantized_weights",
            "zero_stage.quantized_weights with precision.autocast is refused by DeepSpeed",
            "zero_stage.quantized_weights=false",
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


def optimizer_adapts_its_loss_scale(draft: Draft) -> Iterator[Finding]:
    """DeepSpeed's Lamb refuses a fixed loss scale (runtime/engine.py)."""
    config = draft.config
    if config.trains_itself:
        return  # with trainctl's own
    fixed = config.precision.compute is DataType.fp16 and config.precision.loss_scale > 0
    form = spec_of(config.optimizer).deepspeed
    if form is not None and form.needs_adaptive_loss_scale and fixed:
        yield error(
            "precision.loss_scale",
            f"precision.loss_scale={config.precision.loss_scale:g} with "
            f"optimizer.kind={config.optimizer.kind}: "
            f"DeepSpeed's {form.type} needs an adaptive one",
            "precision.loss_scale=0",
        )


def optimizer_has_a_kernel_here(draft: Draft) -> Iterator[Finding]:
    """DeepSpeed's Lion and Lamb are GPU kernels; only an offloaded Lion runs on the CPU."""
    config = draft.config
    if config.trains_itself:
        return  # where it has no kernel, trainctl has an optimizer
    spec, offloaded = spec_of(config.optimizer), config.offload.optimizer is not OffloadDevice.none
    lacks = spec.device_operator and not (offloaded and spec.has_cpu_kernel)
    if lacks and draft.hardware.accelerator is Accelerator.cpu:
        yield error(
            "optimizer.kind",
            f"optimizer.kind={spec.name} is a GPU kernel of DeepSpeed, and the hardware is cpu",
            "optimizer=adamw",
        )
