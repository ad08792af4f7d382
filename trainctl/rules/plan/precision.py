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
from trainctl.options.precision import is_emulated, loss_scaling, precision_of
from trainctl.plan.precision import formats
from trainctl.rules.deepspeed import precision as json
from trainctl.rules.plan.draft import Draft, choices, error, nearest_multiples, on_json


def compute_type_runs_here(draft: Draft) -> Iterator[Finding]:
    """The device computes in the asked type."""
    precision, hardware = draft.config.precision, draft.hardware
    spec, key = precision_of(precision), "precision.compute"
    others = [f"precision={name}" for name in spec.alternatives(hardware)]
    if not spec.runs_on(hardware) and not is_emulated(precision):
        slowly = f"precision.{spec.emulated_by}=true to try it slowly"
        yield error(
            key,
            f"{key}={spec.name}, but {hardware.name} does not compute in {spec.name}",
            f"{others[0]}, or {slowly}" if spec.emulated_by else " or ".join(others),
        )
    if spec.not_on_cpu_because and hardware.accelerator is Accelerator.cpu:
        yield error(key, f"{key}={spec.name}: {spec.not_on_cpu_because}", " or ".join(others))


def loss_scale_starts_above_its_least(draft: Draft) -> Iterator[Finding]:
    """An adaptive scale starts at its smallest value or above: an overflow never enlarges it."""
    precision = loss_scaling(draft.config)
    if precision is None or precision.loss_scale > 0:
        return
    first = 2**precision.initial_scale_power
    if precision.min_loss_scale > first:
        key = "precision.min_loss_scale"
        yield error(
            key,
            f"{key}={precision.min_loss_scale} is above the first loss scale, {first} "
            f"(precision.initial_scale_power={precision.initial_scale_power})",
            f"{key}={first} or less",
        )


def fp8_has_matrices_that_fit(draft: Draft) -> Iterator[Finding]:
    """What torchao converts, and what its products take: whole matrices, multiples of 16."""
    config, spec = draft.config, precision_of(draft.config.precision)
    if spec.product_bytes is None:
        return
    model, batch = config.model, draft.batch
    key, asked, wider = "precision.compute", f"precision.compute={spec.name}", spec.format.value
    if families.spec_of(model).inputs_first:
        yield error(
            key,
            f"{asked} converts linear layers, and {model.family} has none: its "
            "matrices are transformers' Conv1D",
            f"precision={wider}",
        )
    if config.parallelism.tensor > 1:
        yield error(
            key,
            f"{asked} with parallelism.tensor={config.parallelism.tensor}: the "
            "sharded layers are not converted",
            f"parallelism.tensor=1, or precision={wider}",
        )
    for name in ("hidden_size", "intermediate_size"):
        if getattr(model, name) % spec.multiple:
            yield error(
                f"model.{name}",
                f"model.{name}={getattr(model, name)} with {asked}: the products "
                f"take multiples of {spec.multiple}",
                choices(nearest_multiples(getattr(model, name), spec.multiple), f"model.{name}"),
            )
    # In a product for the weights' gradient the tokens are the inner dimension.
    if batch is not None:
        tokens = batch.micro_batch_size * batch.sequence_length // config.parallelism.sequence
        if tokens % spec.multiple:
            yield error(
                "training.sequence_length",
                f"{tokens} tokens in a forward pass with {asked}: the products take "
                f"multiples of {spec.multiple}",
                choices(
                    nearest_multiples(batch.sequence_length, spec.multiple),
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
    yield from on_json(json.without_zero_gradients_have_the_weights_format)(draft)
    if 0 < stage < 3 and offloaded:  # zero/stage_1_and_2.py: buffers in host memory
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
    compute = precision.compute
    if precision.autocast and wire not in (None, DataType.fp32, precision_of(precision).format):
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
    if loss_scaling(draft.config) is not None:
        yield error(
            "precision.autocast",
            f"precision.autocast with precision.compute={precision.compute}: DeepSpeed clips the "
            "scaled gradients, and does not lower the scale after an overflow",
            "precision=autocast-bf16, or precision.autocast=false",
        )
    elif not precision_of(precision).can_autocast:
        yield error(
            "precision.autocast",
            f"precision.autocast needs bf16, and precision.compute is {precision.compute}",
            "precision.autocast=false, or precision.compute=bf16",
        )
    yield from on_json(json.autocast_without_quantized_weights)(draft)


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
