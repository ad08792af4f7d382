"""Checks of the settings that ZenFlow (arXiv:2505.12242) in DeepSpeed 0.19 can be combined with.

ZenFlow updates a part of the columns during the backward pass, before DeepSpeed's work at the end
of a step: clipping, unscaling, the check for non-finite gradients. What it would silently do
differently is refused here; what can be corrected is in `trainctl.engines.deepspeed.zenflow`.
"""

from __future__ import annotations

from collections.abc import Iterator

from trainctl.config.schema import CompileKind, DataType, RunConfig
from trainctl.options.optimizer import spec_of
from trainctl.plan.precision import formats
from trainctl.rules.plan.draft import Draft
from trainctl.rules.rule import Problem


def zenflow_findings(draft: Draft) -> Iterator[Problem]:
    """Yield a finding for every setting that ZenFlow excludes."""
    config = draft.config
    if not config.offload.zenflow or not config.trains_itself:
        return
    yield from _stage_and_axes(config)
    yield from _precision(config)
    if draft.batch is not None and draft.batch.gradient_accumulation_steps > 1:
        steps = draft.batch.gradient_accumulation_steps
        yield Problem(
            f"offload.zenflow with training.gradient_accumulation_steps={steps}: it makes an "
            "update of each micro-batch",
            "training.gradient_accumulation_steps=1",
            key="training.gradient_accumulation_steps",
        )
    limit = config.optimizer.gradient_clipping
    if limit > 0:
        yield Problem(
            f"offload.zenflow with optimizer.gradient_clipping={limit:g}: its columns are updated "
            "before the norm is known, unclipped",
            "optimizer.gradient_clipping=0",
            key="optimizer.gradient_clipping",
        )
    if config.offload.zenflow_overlap_step:
        yield Problem(
            "offload.zenflow_overlap_step has another process keep the moments, which gives them "
            "to no checkpoint, and outlives a rank that is killed",
            "offload.zenflow_overlap_step=false",
            key="offload.zenflow_overlap_step",
        )
    if "zenflow" not in spec_of(config.optimizer).offload_variants:
        yield Problem(
            f"offload.zenflow is for adamw, not {config.optimizer.kind}",
            "optimizer=adamw",
            key="optimizer.kind",
        )
    if config.kernels.compile is CompileKind.deepcompile:
        yield Problem(
            "offload.zenflow works in hooks that kernels.compile=deepcompile compiles away",
            "kernels.compile=none",
            key="kernels.compile",
        )


def _stage_and_axes(config: RunConfig) -> Iterator[Problem]:
    zero = config.zero_stage
    if zero.stage == 0:
        yield Problem(
            "offload.zenflow needs ZeRO stage 1 or 2", "zero_stage=2", key="zero_stage.stage"
        )
    elif zero.stage == 3:
        yield Problem(
            "offload.zenflow at ZeRO stage 3 partitions matrices transposed, which the trainer's "
            "are not",
            "zero_stage=2",
            key="zero_stage.stage",
        )
    for name in ("contiguous_gradients", "reduce_scatter"):
        if not getattr(zero, name):
            yield Problem(
                f"offload.zenflow finds its columns in what zero_stage.{name} makes",
                f"zero_stage.{name}=true",
                key=f"zero_stage.{name}",
            )
    for axis in ("tensor", "pipeline", "sequence"):
        size = getattr(config.parallelism, axis)
        if size > 1:
            yield Problem(
                f"offload.zenflow with parallelism.{axis}={size}: it chooses columns among "
                "data-parallel ranks only",
                f"parallelism.{axis}=1",
                key=f"parallelism.{axis}",
            )


def _precision(config: RunConfig) -> Iterator[Problem]:
    used, precision = formats(config.precision), config.precision
    if used.weights is DataType.fp16:
        yield Problem(
            "offload.zenflow updates its columns from gradients that still carry fp16's loss "
            "scale, and before an overflow is seen",
            "precision=bf16",
            key="precision.compute",
        )
    for name in ("master_weights", "optimizer_states"):
        if getattr(precision, name) is not DataType.fp32:
            yield Problem(
                f"offload.zenflow with precision.{name}={getattr(precision, name).value}: its "
                "CPUAdam keeps them in fp32 only",
                f"precision.{name}=fp32",
                key=f"precision.{name}",
            )
    if used.communication is not used.weights:
        yield Problem(
            f"offload.zenflow with precision.communication={used.communication.value}: it takes "
            f"gradients in the weights' format, {used.weights.value}",
            "precision.communication=null",
            key="precision.communication",
        )
    if precision.autocast:
        yield Problem(
            "offload.zenflow with precision.autocast: gradients in two formats, of which it takes "
            "one",
            "precision=bf16",
            key="precision.autocast",
        )
