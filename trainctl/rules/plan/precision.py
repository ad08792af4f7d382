"""Rules about number formats."""

from __future__ import annotations

from collections.abc import Iterator

from trainctl.config.schema import Accelerator, DataType, OffloadDevice
from trainctl.options import model as families
from trainctl.options.precision import is_emulated, loss_scaling, precision_of
from trainctl.plans.derive import choices, nearest_multiples
from trainctl.plans.settings import number_formats
from trainctl.rules.deepspeed import precision as json
from trainctl.rules.plan.draft import Draft, json_problems, on_json
from trainctl.rules.rule import Problem, rule


@rule("TC050", "precision.compute", example="recipe=tiny precision=fp16")
def compute_type_runs_here(draft: Draft) -> Iterator[Problem]:
    """The device computes in precision.compute.

    Not every device computes in every format: fp16 has no CPU path in DeepSpeed, bf16 needs Ampere,
    fp8 Hopper.

    Fix: Use precision=bf16 on newer GPUs, fp16 on a T4 or V100, fp32 anywhere.
    """
    precision, hardware = draft.config.precision, draft.hardware
    spec, key = precision_of(precision), "precision.compute"
    others = [f"precision={name}" for name in spec.alternatives(hardware)]
    if not spec.runs_on(hardware) and not is_emulated(precision):
        slowly = f"precision.{spec.emulated_by}=true to try it slowly"
        yield Problem(
            f"{key}={spec.name}, but {hardware.name} does not compute in {spec.name}",
            f"{others[0]}, or {slowly}" if spec.emulated_by else " or ".join(others),
        )
    if spec.not_on_cpu_because and hardware.accelerator is Accelerator.cpu:
        yield Problem(f"{key}={spec.name}: {spec.not_on_cpu_because}", " or ".join(others))


@rule(
    "TC195",
    "precision.min_loss_scale",
    example="recipe=tiny precision=fp16 precision.initial_scale_power=4 "
    "precision.min_loss_scale=32",
)
def loss_scale_starts_above_its_least(draft: Draft) -> Iterator[Problem]:
    """An adaptive loss scale starts at or above its minimum.

    The fp16 loss scale falls at overflows, down to its least. One that begins below its least would
    be raised by an overflow.

    Fix: Use a lower min_loss_scale, or a higher initial_scale_power.
    """
    precision = loss_scaling(draft.config)
    if precision is None or precision.loss_scale > 0:
        return
    first = 2**precision.initial_scale_power
    if precision.min_loss_scale > first:
        key = "precision.min_loss_scale"
        yield Problem(
            f"{key}={precision.min_loss_scale} is above the first loss scale, {first} "
            f"(precision.initial_scale_power={precision.initial_scale_power})",
            f"{key}={first} or less",
        )


@rule(
    "TC058",
    "precision.compute",
    "model.*",
    "training.sequence_length",
    example="recipe=tiny precision=fp8 model.family=gpt2",
)
def fp8_has_matrices_that_fit(draft: Draft) -> Iterator[Problem]:
    """fp8 has linear layers to convert, with dimensions that are multiples of 16.

    torchao replaces linear layers by products in fp8, on matrices whose sides are multiples of 16;
    GPT-2's are another class.

    Fix: Use precision=bf16, or a model and a batch of such sizes.
    """
    config, spec = draft.config, precision_of(draft.config.precision)
    if spec.product_bytes is None:
        return
    model, batch = config.model, draft.batch
    asked, wider = f"precision.compute={spec.name}", spec.format.value
    if families.spec_of(model).inputs_first:
        yield Problem(
            f"{asked} converts linear layers, and {model.family} has none: its "
            "matrices are transformers' Conv1D",
            f"precision={wider}",
        )
    if config.parallelism.tensor > 1:
        yield Problem(
            f"{asked} with parallelism.tensor={config.parallelism.tensor}: the "
            "sharded layers are not converted",
            f"parallelism.tensor=1, or precision={wider}",
        )
    for name in ("hidden_size", "intermediate_size"):
        if getattr(model, name) % spec.multiple:
            yield Problem(
                f"model.{name}={getattr(model, name)} with {asked}: the products "
                f"take multiples of {spec.multiple}",
                choices(nearest_multiples(getattr(model, name), spec.multiple), f"model.{name}"),
                key=f"model.{name}",
            )
    # In a product for the weights' gradient the tokens are the inner dimension.
    if batch is not None:
        tokens = batch.micro_batch_size * batch.sequence_length // config.parallelism.sequence_parts
        if tokens % spec.multiple:
            yield Problem(
                f"{tokens} tokens in a forward pass with {asked}: the products take "
                f"multiples of {spec.multiple}",
                choices(
                    nearest_multiples(batch.sequence_length, spec.multiple),
                    "training.sequence_length",
                ),
                key="training.sequence_length",
            )


@rule(
    "TC051",
    "precision.gradient_accumulation",
    "precision.master_weights",
    example="recipe=tiny precision=bf16 zero_stage=2 offload.optimizer=cpu "
    "precision.gradient_accumulation=fp32",
)
def gradients_accumulate_in_a_wider_type(draft: Draft) -> Iterator[Problem]:
    """Gradients accumulate in the format of the weights or in fp32, as DeepSpeed supports it.

    Gradients of many micro-batches are summed. DeepSpeed takes some combinations and then sums in
    another type than was asked for.

    Fix: Use the format of the weights, or fp32 where DeepSpeed really uses it.
    """
    used, config = number_formats(draft.config.precision), draft.config
    accumulate, weights = used.gradient_accumulation, used.weights
    if accumulate is weights:
        return
    key = "precision.gradient_accumulation"
    if accumulate is not DataType.fp32:
        yield Problem(
            f"{key}={accumulate.value} while the weights are {weights.value}",
            f"{key}={weights.value} or fp32",
        )
        return
    stage, offloaded = config.zero_stage.stage, config.offload.optimizer is not OffloadDevice.none
    yield from json_problems(draft, json.without_zero_gradients_have_the_weights_format)
    if 0 < stage < 3 and offloaded:  # zero/stage_1_and_2.py: buffers in host memory
        yield Problem(
            f"{key}=fp32 with offload.optimizer at stage {stage}: DeepSpeed accumulates in "
            f"{weights.value} in host memory all the same",
            f"zero_stage=3, or {key}={weights.value}",
        )
    elif stage == 1 and config.precision.master_weights is DataType.bf16:  # bf16_optimizer.py
        yield Problem(
            f"precision.master_weights=bf16 with {key}=fp32 at stage 1: DeepSpeed keeps fp32 "
            "master weights all the same",
            f"zero_stage=2, or {key}=bf16",
            key="precision.master_weights",
        )


@rule(
    "TC052",
    "precision.communication",
    example="recipe=tiny precision.communication=fp16 precision.autocast=true",
)
def gradients_travel_in_a_known_type(draft: Draft) -> Iterator[Problem]:
    """Gradients are communicated in a format that DeepSpeed supports.

    DeepSpeed sends gradients in the type of the weights or in fp32; anything else it replaces.

    Fix: Set precision.communication=null, or one of the two.
    """
    if draft.config.precision.communication is DataType.fp8:
        yield Problem(
            "precision.communication=fp8: DeepSpeed sends gradients as fp32, bf16 or fp16",
            "precision.communication=bf16",
        )
    precision = draft.config.precision
    wire = precision.communication
    compute = precision.compute
    if precision.autocast and wire not in (None, DataType.fp32, precision_of(precision).format):
        yield Problem(
            f"precision.communication={wire.value} under autocast in {compute}: DeepSpeed sends "
            f"gradients as fp32 or {compute}",
            f"precision.communication=fp32 or {compute}",
        )


@rule(
    "TC053",
    "precision.autocast",
    "zero_stage.quantized_weights",
    example="recipe=tiny precision=fp16 precision.autocast=true",
)
def autocast_has_a_lower_type(draft: Draft) -> Iterator[Problem]:
    """Autocast computes in bf16.

    Autocast keeps fp32 weights and multiplies in bf16. In fp16 DeepSpeed clips gradients that are
    still scaled, and never lowers the scale after an overflow.

    Fix: Use precision=autocast-bf16, or plain precision=fp16 without autocast.
    """
    precision = draft.config.precision
    if not precision.autocast:
        return
    # In fp16 DeepSpeed clips by the norm of gradients that torch's scaler has still scaled, and
    # after an overflow the scale stays (zero/stage_1_and_2.py, `step` and `_optimizer_step`).
    if loss_scaling(draft.config) is not None:
        yield Problem(
            f"precision.autocast with precision.compute={precision.compute}: DeepSpeed clips the "
            "scaled gradients, and does not lower the scale after an overflow",
            "precision=autocast-bf16, or precision.autocast=false",
        )
    elif not precision_of(precision).can_autocast:
        yield Problem(
            f"precision.autocast needs bf16, and precision.compute is {precision.compute}",
            "precision.autocast=false, or precision.compute=bf16",
        )
    yield from json_problems(draft, json.autocast_without_quantized_weights)


@rule(
    "TC054",
    "precision.master_weights",
    "precision.optimizer_states",
    example="recipe=tiny precision.master_weights=fp16",
)
def master_weights_are_kept_in_a_known_type(draft: Draft) -> Iterator[Problem]:
    """Master weights and optimizer states have a format that DeepSpeed can update.

    Master weights keep the bits that an update in 16 bits would lose: fp32, or the compute type
    where DeepSpeed can update in it.

    Fix: Set precision.master_weights=fp32.
    """
    config = draft.config
    precision, weights = config.precision, number_formats(config.precision).weights
    master, states = precision.master_weights, precision.optimizer_states
    stage, offloaded = config.zero_stage.stage, config.offload.optimizer is not OffloadDevice.none
    key = "precision.master_weights"
    if master is not DataType.fp32 and master is not weights:
        yield Problem(
            f"{key}={master.value} while the weights are {weights.value}",
            f"{key}=fp32" if weights is DataType.fp32 else f"{key}=fp32 or {weights.value}",
        )
    elif master is not DataType.fp32 and stage == 0:
        yield Problem(f"{key}={master.value} needs ZeRO; zero_stage.stage is 0", "zero_stage=1")
    elif master is DataType.fp16 and not offloaded:
        yield Problem(
            f"{key}=fp16 needs the optimizer in host memory",
            f"{key}=fp32, or offload.optimizer=cpu",
        )
    elif master is DataType.bf16 and states is not DataType.bf16 and not offloaded:
        yield Problem(
            f"{key}=bf16 on the device needs bf16 optimizer states too",
            f"precision.optimizer_states=bf16, or {key}=fp32",
        )
    if states not in (DataType.fp32, DataType.bf16):
        yield Problem(
            f"precision.optimizer_states={states.value} is not kept by DeepSpeed",
            "precision.optimizer_states=fp32, or optimizer=adamw_8bit for smaller ones",
            key="precision.optimizer_states",
        )
    elif states is DataType.bf16 and master is not DataType.bf16:
        yield Problem(
            f"precision.optimizer_states=bf16 needs {key}=bf16, and it is {master.value}",
            f"precision.optimizer_states=fp32, or {key}=bf16",
            key="precision.optimizer_states",
        )


on_json(
    "TC057",
    json.the_loss_is_scaled_where_the_gradient_is_unscaled,
    arguments="recipe=tiny precision=fp16 zero_stage=0",
)
