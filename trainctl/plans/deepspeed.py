"""DeepSpeed's JSON: a flat list of settings with their reasons, and its nested form.

Written for DeepSpeed 0.19; file names below are DeepSpeed's. Every key is written out, including
DeepSpeed's defaults, so that a change of its defaults changes nothing here, and nothing is left as
"auto". How DeepSpeed counts ranks for the batch check: `docs/decisions/003-*.md`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from trainctl.config.codec import flatten, nest
from trainctl.config.derived import DerivedValue, derived
from trainctl.config.schema import (
    AdaptiveClipping,
    CompileKind,
    DataType,
    KernelsConfig,
    LrScaling,
    OffloadDevice,
    RunConfig,
)
from trainctl.hardware import Hardware
from trainctl.options.optimizer import Maker, OptimizerForm, OptimizerParameter, spec_of
from trainctl.options.precision import precision_of
from trainctl.plans import mup
from trainctl.plans.deepspeed_table import (
    BF16_KEYS,
    FP16_KEYS,
    OFFLOAD_KEYS,
    PREFETCH,
    ZERO_KEYS,
    written_settings,
)
from trainctl.plans.gathering import KEY, prefetched_elements
from trainctl.plans.optimizers import is_fused, lr_scale, optimizer_maker
from trainctl.plans.settings import gradient_conflict, number_formats
from trainctl.plans.types import Batch, Mesh, peak_rate

BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
"""Keys of the batch triple; DeepSpeed multiplies it with the data-parallel ranks only."""

MATRIX_MODULES = ("torch.nn.modules.linear.Linear", "transformers.pytorch_utils.Conv1D")
"""Module classes that hold the weight matrices; gpt2 uses Conv1D."""

STEPS_PER_PRINT = 1_000_000_000
"""Effectively never: the trainer reports progress itself."""


def nest_settings(settings: Iterable[DerivedValue]) -> dict[str, Any]:
    """Return the nested JSON of flat settings: dots in a key separate levels."""
    return nest((setting.key, setting.value) for setting in settings)


def derived_settings(
    config: RunConfig, hardware: Hardware, mesh: Mesh | None, batch: Batch | None
) -> tuple[DerivedValue, ...]:
    """Return every key of the JSON that trainctl sets, without the user's `deepspeed` section.

    `mesh` is None if no mesh is possible; the configured axis sizes are used then. `batch` is None
    if no batch is possible; the JSON has no batch keys then.
    """
    axes = config.parallelism
    mesh = mesh or Mesh(
        data=1,
        tensor=axes.tensor,
        pipeline=axes.pipeline,
        sequence=axes.sequence,
        context=axes.context,
    )
    return (
        *(() if batch is None else _batch_settings(mesh, batch)),
        *_optimizer_settings(
            config, hardware, 1.0 if batch is None else lr_scale(config.optimizer, batch)
        ),
        _clipping_settings(config),
        *_precision_settings(config, mesh),
        *_zero_settings(config, hardware),
        *written_settings(OFFLOAD_KEYS, config),
        *_parallelism_settings(config, mesh),
        *_compile_settings(config.kernels),
        *_reporting_settings(config),
    )


def user_settings(section: Mapping[str, Any]) -> tuple[DerivedValue, ...]:
    """Return the leaves of the user's `deepspeed` section, which is merged last."""
    return tuple(derived(key, value, why=f"deepspeed.{key}") for key, value in flatten(section))


def _batch_settings(mesh: Mesh, batch: Batch) -> Iterator[DerivedValue]:
    micro, accumulation = batch.micro_batch_size, batch.gradient_accumulation_steps
    product = f"micro {micro} x accumulation {accumulation} x data {mesh.data}"
    why = f"training.global_batch_size: {product}"
    total, per_rank, passes = BATCH_KEYS
    yield derived(total, batch.global_batch_size, "training.global_batch_size", why=why)
    why = "training.micro_batch_size, of a data-parallel rank"
    yield derived(per_rank, micro, "training.micro_batch_size", why=why)
    yield derived(passes, accumulation, "training.gradient_accumulation_steps")


def _optimizer_settings(
    config: RunConfig, hardware: Hardware, lr_scale: float
) -> Iterator[DerivedValue]:
    form = spec_of(config.optimizer).deepspeed
    if form is not None and not _uses_own_optimizer(config, hardware):
        why = f"optimizer.kind={config.optimizer.kind}"
        yield derived("optimizer.type", form.type, "optimizer.kind", why=why)
        yield from _optimizer_params(config, hardware, lr_scale, form)


def _uses_own_optimizer(config: RunConfig, hardware: Hardware) -> bool:
    """Return True if the trainer passes DeepSpeed one of trainctl's own optimizers."""
    return config.trains_itself and optimizer_maker(config, hardware) is Maker.trainctl


def _clipping_settings(config: RunConfig) -> DerivedValue:
    is_fp32 = number_formats(config.precision).weights is DataType.fp32
    if config.trains_itself and config.zero_stage.stage == 0 and is_fp32:
        why = "the trainer clips: without ZeRO DeepSpeed's norm is inexact, and each stage's own"
        return derived("gradient_clipping", 0.0, why=why)
    adaptive = config.gradients.adaptive_clipping
    if config.trains_itself and adaptive is not AdaptiveClipping.none:
        why = f"gradients.adaptive_clipping={adaptive.value}: the trainer sets it at each update"
        return derived("gradient_clipping", 0.0, "gradients.adaptive_clipping", why=why)
    limit = config.optimizer.gradient_clipping
    return derived("gradient_clipping", limit, "optimizer.gradient_clipping")


def _optimizer_params(
    config: RunConfig, hardware: Hardware, lr_scale: float, form: OptimizerForm
) -> Iterator[DerivedValue]:
    optimizer, params = config.optimizer, "optimizer.params"
    offloaded = config.offload.optimizer is not OffloadDevice.none
    for parameter in form.parameters:
        yield optimizer_parameter(config, parameter, lr_scale)
    for name, (value, why) in form.fixed.items():
        yield derived(f"{params}.{name}", value, "optimizer.kind", why=why)
    # ZenFlow passes these parameters to torch's AdamW, which does not know the key.
    if form.has_torch_adam and not config.offload.zenflow:
        why = (
            "the optimizer is offloaded: DeepSpeedCPUAdam"
            if offloaded
            else "torch's own AdamW: nothing to compile"
        )
        yield derived(f"{params}.torch_adam", not offloaded, why=why)
    takes_fused = spec_of(optimizer).fused_by is Maker.torch
    if config.trains_itself and takes_fused and is_fused(config, hardware):
        why = "" if optimizer.fused else "one kernel updates all, on accelerators"
        sources = ("optimizer.fused",) if optimizer.fused else ()
        yield derived(f"{params}.fused", True, *sources, why=why)


def optimizer_parameter(
    config: RunConfig, parameter: OptimizerParameter, lr_scale: float
) -> DerivedValue:
    """Return one optimizer parameter of the JSON, derived from its config keys."""
    optimizer = config.optimizer
    values = [getattr(optimizer, key) for key in parameter.keys]
    value: Any = values if len(values) > 1 else values[0]
    sources = [f"optimizer.{key}" for key in parameter.keys]
    if parameter.or_lr and value is None:
        sources = ["optimizer.lr"]
    why = " and ".join(sources)
    if parameter.is_rate:
        value = peak_rate(optimizer, lr_scale, *parameter.keys)
        if optimizer.lr_scaling is not LrScaling.none:
            sources.append("optimizer.lr_scaling")
        why = " x ".join(sources)
    if parameter.is_epsilon:
        scaled = mup.scaled_epsilon(config, value)
        why += "" if scaled == value else " / mup.width_factor, as the gradients"
        value = scaled
    note = _NOTES.get(parameter.name)
    why += f": {note}" if note else ""
    return derived(f"optimizer.params.{parameter.name}", value, *sources, why=why)


_NOTES = {
    "lr": "the peak; the trainer sets the schedule's value at each step",
    "weight_decay": "the trainer's groups without decay override it",
}


def _precision_settings(config: RunConfig, mesh: Mesh) -> Iterator[DerivedValue]:
    precision, used = config.precision, number_formats(config.precision)
    compute = f"precision.compute={precision.compute}"
    of_weights = "the weights' format"
    on_wire = () if precision.communication is None else ("precision.communication",)
    wire_why = "" if on_wire else of_weights

    yield derived("bf16.enabled", used.weights is DataType.bf16, "precision.compute", why=compute)
    if used.weights is DataType.bf16:
        yield _overflow_check(config)
    yield from written_settings(BF16_KEYS, config)
    yield derived("fp16.enabled", used.weights is DataType.fp16, "precision.compute", why=compute)
    yield from written_settings(FP16_KEYS, config)

    yield derived("torch_autocast.enabled", precision.autocast, "precision.autocast")
    if precision.autocast:
        yield derived("torch_autocast.dtype", precision.compute, "precision.compute", why=compute)
        # ZeRO sends the gradients of these modules in the compute type, ignoring
        # communication_data_type (runtime/torch_autocast.py), and all others in fp32.
        lower = list(MATRIX_MODULES) if used.communication is precision_of(precision).format else []
        key = "torch_autocast.lower_precision_safe_modules"
        yield derived(key, lower, *on_wire, why=wire_why)

    accumulate = used.gradient_accumulation.value
    given = precision.gradient_accumulation is not None
    sources = ("precision.gradient_accumulation",) if given else ()
    why = "" if given else of_weights
    yield derived("data_types.grad_accum_dtype", accumulate, *sources, why=why)
    wire = used.communication.value
    yield derived("communication_data_type", wire, *on_wire, why=wire_why)


def _overflow_check(config: RunConfig) -> DerivedValue:
    """Return whether DeepSpeed looks for gradients that are not finite, in several kernels each."""
    key, hidden = "bf16.check_grad_overflow", gradient_conflict(config)
    if config.trains_itself and hidden is None:
        return derived(key, False, why="the trainer judges the norm before the update")
    why = "no update is made from gradients that are not finite"
    return derived(key, True, why=why if hidden is None else f"{why}; {hidden[0]} hides them")


def _zero_settings(config: RunConfig, hardware: Hardware) -> Iterator[DerivedValue]:
    zero, optimizer = config.zero_stage, spec_of(config.optimizer)
    yield derived("zero_optimization.stage", zero.stage, "zero_stage.stage")
    if zero.stage == 0:
        return
    for setting in written_settings(ZERO_KEYS, config):
        yield _with_next_block(config, setting) if setting.key == PREFETCH else setting
    if _uses_own_optimizer(config, hardware):
        name = optimizer.name
        why = f"{name} is trainctl's own, which DeepSpeed does not list as tested with ZeRO"
        yield derived("zero_allow_untested_optimizer", True, why=why)
    elif optimizer.deepspeed is None or not optimizer.deepspeed.is_zero_tested:
        why = f"DeepSpeed does not list {optimizer.name} as tested with ZeRO"
        yield derived("zero_allow_untested_optimizer", True, why=why)


def _with_next_block(config: RunConfig, setting: DerivedValue) -> DerivedValue:
    """Return the prefetch bucket, which takes at least the next block if blocks are gathered."""
    size = prefetched_elements(config)
    if size == setting.value:
        return setting
    return derived(PREFETCH, size, *setting.sources, KEY, why=f"{KEY}=blocks: the next block")


def _parallelism_settings(config: RunConfig, mesh: Mesh) -> Iterator[DerivedValue]:
    if mesh.pipeline > 1:
        why = "the trainer wraps the blocks that are recomputed"
        yield derived("pipeline.activation_checkpoint_interval", 0, why=why)
    if config.parallelism.is_folded:
        why = "DualPipeV sends whole activations and gradients"
        yield derived("pipeline.pipe_partitioned", False, why=why)
        yield derived("pipeline.grad_partitioned", False, why=why)
    if config.trains_itself:
        return  # the trainer passes DeepSpeed its own mesh (docs/decisions/009-*.md)
    if mesh.tensor > 1 and mesh.pipeline == 1:  # AutoTP refuses a PipelineModule
        yield derived("tensor_parallel.autotp_size", mesh.tensor, "parallelism.tensor")
    if mesh.sequence > 1:
        # data_parallel_size is left out: with both keys DeepSpeed builds its own mesh.
        yield derived("sequence_parallel_size", mesh.sequence, "parallelism.sequence")
        # With sequence ranks the engine sends gradients in this format (runtime/engine.py).
        wire = number_formats(config.precision).communication.value
        why = "as communication_data_type; its default is fp32"
        yield derived("seq_parallel_communication_data_type", wire, why=why)


def _compile_settings(kernels: KernelsConfig) -> Iterator[DerivedValue]:
    if kernels.compile is CompileKind.deepcompile:
        why = "kernels.compile=deepcompile"
        yield derived("compile.deepcompile", True, "kernels.compile", why=why)


def _reporting_settings(config: RunConfig) -> Iterator[DerivedValue]:
    own = "the trainer reports itself"
    if config.trains_itself:
        yield derived("steps_per_print", STEPS_PER_PRINT, why=own)
        yield derived("wall_clock_breakdown", False, why=own)
    else:
        yield derived("steps_per_print", config.logging.every_steps, "logging.every_steps")
    yield derived("log_level", config.logging.deepspeed_level, "logging.deepspeed_level")
