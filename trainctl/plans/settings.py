"""Settings with their defaults resolved: number formats, recomputed blocks, expert balancing, the
average of the weights, and the variables of deterministic runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from trainctl.config.derived import DerivedValue, derived
from trainctl.config.schema import (
    Accelerator,
    AttentionKind,
    CompileKind,
    DataType,
    OffloadDevice,
    PrecisionConfig,
    RunConfig,
)
from trainctl.hardware import Hardware
from trainctl.options.activation_checkpointing import Recomputing, recomputing_section
from trainctl.options.precision import precision_of
from trainctl.plans.shapes import anatomy, head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class Formats:
    """Number formats as DeepSpeed sees them."""

    weights: DataType
    """Format of the weights in forward and backward pass: fp32 under autocast, and bf16 under fp8,
    which casts for each matrix product.
    """
    gradient_accumulation: DataType
    """Format of accumulated gradients."""
    communication: DataType
    """Format of gradients in communication; under autocast, of the matrices' gradients only."""


def number_formats(precision: PrecisionConfig) -> Formats:
    """Return the formats that a precision config implies."""
    weights = DataType.fp32 if precision.autocast else precision_of(precision).format
    return Formats(
        weights=weights,
        gradient_accumulation=precision.gradient_accumulation or weights,
        communication=precision.communication or weights,
    )


def replay_tolerance(precision: PrecisionConfig) -> float:
    """Return the relative difference of a replayed loss that rounding explains.

    Another layout adds in another order, and another device or program rounds differently.
    """
    return 1e-5 if precision_of(precision).format is DataType.fp32 else 1e-3


def is_recomputed(block: int, settings: Recomputing) -> bool:
    """Return True if a block, counted from 0 over the whole model, is recomputed.

    The first block of every k is. The last block is then kept whole: its backward pass comes when
    memory is fullest and would need its activations again at once.
    """
    return block % settings.every_kth_block == 0


def recomputed_blocks(config: RunConfig) -> tuple[DerivedValue, ...]:
    """Return the number of recomputed blocks; empty if recomputation is off."""
    settings, layers = recomputing_section(config), config.model.num_layers
    if settings is None:
        return ()
    count = sum(is_recomputed(block, settings) for block in range(layers))
    which = "all" if settings.every_kth_block == 1 else f"one in {settings.every_kth_block}"
    mode = "activation_checkpointing.mode"
    why = f"{mode}={settings.mode}: {which} of {layers}"
    return (derived("activation_checkpointing.wrapped_blocks", count, mode, why=why),)


def auxiliary_loss(config: RunConfig) -> float:
    """Return the weight of the balancing loss: the config's, otherwise the model directory's."""
    own = config.experts.auxiliary_loss
    return own if own is not None else config.model.router_aux_loss_coef or 0.0


def expert_reasons(config: RunConfig) -> Iterator[DerivedValue]:
    """Yield the weight of the balancing loss if it comes from the model directory."""
    asked = config.model.router_aux_loss_coef
    if config.experts.auxiliary_loss is None and asked and config.trains_itself:
        why = "router_aux_loss_coef of config.json, whose output_router_logits is true"
        yield derived("experts.auxiliary_loss", asked, why=why)


DETERMINISTIC_VARIABLES = {
    # One of two workspace sizes that make cuBLAS reproducible; read when CUDA starts.
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    # FlashAttention's backward pass without atomic sums (modeling_flash_attention_utils.py).
    "FLASH_ATTENTION_DETERMINISTIC": "1",
    # torch.compile chooses kernels by rules, not by measured times (torch/_inductor/config.py).
    "TORCHINDUCTOR_DETERMINISTIC": "1",
}

EMA_METRIC = "ema_loss"
"""Name of the average's held-out loss, logged beside the held-out loss of the weights."""


def ema_decay(update: int, decay: float) -> float:
    """Return the decay at update t, counted from 1: ``min(decay, (1 + t) / (10 + t))``.

    The average starts as a copy of the first weights. With a constant decay of 0.999 it would still
    hold a third of them after a thousand updates. This ramp forgets them: 2/11 is left after the
    first update, and after t updates at most 10! / ((t + 2) ... (t + 10)). It is the ramp of
    TensorFlow's `ExponentialMovingAverage` with `num_updates`.
    """
    return min(decay, (1 + update) / (10 + update))


def average_conflict(config: RunConfig) -> tuple[str, str] | None:
    """Return the setting that rules out an average, and the reason; None if one can be kept."""
    offload = config.offload
    if offload.zenflow:
        return "offload.zenflow=true", "the master weights lag behind those of the model"
    if offload.super_offload:
        return "offload.super_offload=true", "another process has the master weights"
    if offload.optimizer is OffloadDevice.nvme:
        return "offload.optimizer=nvme", "DeepSpeed's swapper holds the four tensors of Adam"
    if config.precision.master_weights is not DataType.fp32:
        return (
            f"precision.master_weights={config.precision.master_weights.value}",
            "the average is in fp32, and changes places with the master weights to be evaluated",
        )
    if config.kernels.compile is CompileKind.deepcompile:
        return (
            "kernels.compile=deepcompile",
            "the compiled graph keeps gathered weights, which would not follow an evaluation",
        )
    return None


def gradient_conflict(config: RunConfig) -> tuple[str, str] | None:
    """Return the setting that hides the gradients from the trainer, and the reason; None if it sees
    them before the update.
    """
    if config.offload.super_offload:
        return (
            "offload.super_offload=true",
            "another process has the gradients, and updates while the backward pass goes on",
        )
    if config.offload.zenflow:
        return (
            "offload.zenflow=true",
            "the columns that matter most are updated while the backward pass goes on",
        )
    if config.kernels.compile is CompileKind.deepcompile:
        return (
            "kernels.compile=deepcompile",
            "the compiled graph reduces the gradients in buffers of its own",
        )
    return None


WIDEST_HEAD = 256
"""Largest head width of torch's flash kernels."""


def reads_document_bounds(config: RunConfig, hardware: Hardware) -> bool:
    """Return True if masked documents reach attention as bounds, not as a mask of all pairs of
    tokens: by torch's `varlen_attn`, as by FlashAttention's package.

    A rank whose torch lacks the kernel, or whose model has dropout in attention, makes the mask.
    """
    model, read, flash = config.model, anatomy(config.model), AttentionKind.flash_attention_2
    is_apart = read is None or (
        flash.value in read.attentions and flash.value not in read.joined_attentions
    )
    width = head_dim(model)
    return (
        config.trains_itself
        and config.data.mask_documents
        and model.attention is AttentionKind.sdpa
        and model.factory is None
        and is_apart
        and width <= WIDEST_HEAD
        and width % 8 == 0
        and hardware.accelerator is Accelerator.cuda
        and hardware.supports_bf16
        and number_formats(config.precision).weights is not DataType.fp32
        and config.parallelism.sequence_parts == 1
    )


def document_reasons(config: RunConfig, hardware: Hardware) -> Iterator[DerivedValue]:
    """Yield how attention on a GPU keeps masked documents apart, if the section says sdpa."""
    is_asked = config.trains_itself and config.data.mask_documents
    on_gpu = hardware.accelerator is not Accelerator.cpu
    if is_asked and on_gpu and config.model.attention is AttentionKind.sdpa:
        if reads_document_bounds(config, hardware):
            how, why = "bounds", "read by torch's varlen_attn, a flash kernel"
        else:
            how, why = "mask", "of all pairs of tokens, which no flash kernel takes"
        sources = ("data.mask_documents", "model.attention")
        why = f"{' with '.join(sources)}=sdpa: {why}"
        yield derived("document_attention", how, *sources, why=why)


def uses_ring(config: RunConfig) -> bool:
    """Return True if attention is ring attention (`engines/ring_attention.py`).

    It knows documents, which sdpa inside Ulysses does not; FlashAttention reads them from
    positions.
    """
    is_masked = config.data.mask_documents and config.model.attention is AttentionKind.sdpa
    axes = config.parallelism
    return axes.context > 1 or (axes.sequence > 1 and is_masked)
