"""Rules about ZeRO stages and offload, as DeepSpeed 0.19 enforces them, or should."""

from __future__ import annotations

from collections.abc import Iterator

from trainctl.config.schema import (
    Accelerator,
    CheckpointConfig,
    CompileKind,
    DataType,
    GatherUnit,
    OffloadDevice,
    RunConfig,
)
from trainctl.options.model import AXES
from trainctl.options.optimizer import spec_of
from trainctl.plans.derive import choices, nearest_divisors
from trainctl.plans.gathering import block_conflict, is_gathered_by_trainctl
from trainctl.plans.settings import number_formats
from trainctl.rules.deepspeed import offload, zero
from trainctl.rules.plan.draft import Draft, json_problems, on_json
from trainctl.rules.rule import WARNING, Problem, rule


@rule(
    "TC031",
    "zero_stage.stage",
    situation="A model with experts in bf16, `zero_stage=0 parallelism.expert=2`",
    message="zero_stage.stage=0 with parallelism.expert=2 in bf16 would clip by a gradient norm "
    "without experts",
)
def shards_clip_by_one_norm(draft: Draft) -> Iterator[Problem]:
    """Without ZeRO, gradients below fp32 are clipped only where DeepSpeed's norm is complete.

    Without ZeRO, DeepSpeed clips by a norm that misses the other stages, the other tensor ranks'
    shards, or the experts. It says nothing, and clips too little.

    Fix: Use zero_stage=1, which has the true norm.
    """
    config, axes = draft.config, draft.config.parallelism
    if config.zero_stage.stage > 0 or number_formats(config.precision).weights is DataType.fp32:
        return
    # What DeepSpeed flattens loses the mark of a tensor shard (fp16/unfused_optimizer.py,
    # get_weight_norm). In fp32 the trainer clips by itself.
    for axis, whose in (
        ("pipeline", "each stage's own gradient norm"),
        ("tensor", "the first tensor rank's gradient norm"),
        ("expert", "a gradient norm without experts"),
    ):
        if getattr(axes, axis) > 1:
            yield Problem(
                f"zero_stage.stage=0 with parallelism.{axis}={getattr(axes, axis)} in "
                f"{config.precision.compute} would clip by {whose}",
                "zero_stage=1",
            )


@rule("TC032", "offload.ratio", "offload.*", example="recipe=tiny offload.parameters=cpu")
def offload_has_its_stage(draft: Draft) -> Iterator[Problem]:
    """Offload is used at a ZeRO stage that supports it.

    Parameters can wait on the host only where they are sharded, which is stage 3; optimizer states
    from stage 1 on. DeepSpeed ignores the rest, and the run needs the memory that was to be saved.

    Fix: Use a higher zero_stage, or no offload.
    """
    yield from json_problems(draft, offload.offload_has_its_stage)
    settings, stage = draft.config.offload, draft.config.zero_stage.stage
    # The JSON has the ratio at stage 3 only.
    if settings.optimizer is not OffloadDevice.none and settings.ratio < 1 and stage < 3:
        yield Problem(
            f"offload.ratio={settings.ratio:g} needs ZeRO stage 3, and it is {stage}",
            "offload.ratio=1, or zero_stage=3",
        )


@rule(
    "TC034",
    "optimizer.kind",
    "offload.ratio",
    example="recipe=tiny zero_stage=3 optimizer=lamb offload.optimizer=cpu script=train.py",
    files={"train.py": ""},
)
def offloaded_optimizer_has_a_cpu_kernel(draft: Draft) -> Iterator[Problem]:
    """An offloaded optimizer has a CPU kernel.

    States in host memory are updated there, by a kernel for the CPU, which DeepSpeed has for Adam,
    Adagrad and Lion.

    Fix: Use optimizer=adamw, or no offload.
    """
    offload, spec = draft.config.offload, spec_of(draft.config.optimizer)
    if offload.optimizer is OffloadDevice.none:
        return
    if not spec.has_cpu_kernel and not draft.config.trains_itself:
        yield Problem(
            f"optimizer.kind={spec.name} has no CPU kernel, and its states are offloaded",
            "optimizer=adamw, or offload=none",
        )
    elif spec.has_cpu_kernel and offload.ratio < 1 and "ratio" not in spec.offload_variants:
        # The part on the device is always torch's AdamW (zero/stage3.py, backup_optimizer).
        yield Problem(
            f"offload.ratio={offload.ratio:g} is for adamw, not {spec.name}",
            "offload.ratio=1",
            key="offload.ratio",
        )


@rule("TC035", "offload.super_offload", "*", example="recipe=tiny offload.zenflow=true")
def offload_variants_have_their_base(draft: Draft) -> Iterator[Problem]:
    """ZenFlow and SuperOffload are combined only with settings that they support.

    ZenFlow and SuperOffload are ways to update offloaded states while the device goes on. Without
    what they build on, DeepSpeed ignores them or fails in the first step.

    Fix: Set what the message names, or leave the variant out.
    """
    offload, stage = draft.config.offload, draft.config.zero_stage.stage
    if offload.zenflow and offload.optimizer is not OffloadDevice.cpu:
        yield Problem(
            f"offload.zenflow needs offload.optimizer=cpu, and it is {offload.optimizer.value}",
            "offload.optimizer=cpu",
            key="offload.zenflow",
        )
    yield from zenflow_findings(draft)
    if not offload.super_offload:
        return
    if offload.optimizer is not OffloadDevice.cpu or stage != 3:
        yield Problem(
            "offload.super_offload needs offload.optimizer=cpu and ZeRO stage 3; they are "
            f"{offload.optimizer.value} and {stage}",
            "offload.optimizer=cpu zero_stage=3",
        )
    if draft.hardware.accelerator is not Accelerator.cuda:
        yield Problem(
            f"offload.super_offload is for CUDA, and the hardware is {draft.hardware.name}",
            "offload.super_offload=false",
        )
    # SuperOffload builds a CPUAdam from lr, betas and decay alone (superoffload_utils.py). Without
    # clipping it updates during the backward pass, before gradients are unscaled.
    optimizer, precision = draft.config.optimizer, draft.config.precision
    spec = spec_of(optimizer)
    if "super_offload" not in spec.offload_variants:
        yield Problem(
            f"offload.super_offload updates by AdamW, and optimizer.kind is {spec.name}",
            "optimizer=adamw, or offload.super_offload=false",
            key="optimizer.kind",
        )
    if precision.master_weights is not DataType.fp32:
        yield Problem(
            "offload.super_offload updates fp32 master weights, and they are "
            f"{precision.master_weights.value}",
            "precision.master_weights=fp32",
            key="precision.master_weights",
        )
    if number_formats(precision).weights is DataType.fp16 and not optimizer.gradient_clipping:
        yield Problem(
            "offload.super_offload in fp16 without clipping updates by gradients that are still "
            "multiplied by the loss scale",
            "optimizer.gradient_clipping=1.0, or precision=bf16",
            key="optimizer.gradient_clipping",
        )
    if _saves(draft.config.checkpoint):
        yield Problem(
            "offload.super_offload keeps the moments in a process of its own that gives them to "
            "nobody: a checkpoint would lack them",
            "offload.super_offload=false, or no checkpoints: checkpoint.at_end=false "
            "checkpoint.every_minutes=null checkpoint.every_steps=null",
        )


def _saves(checkpoint: CheckpointConfig) -> bool:
    """Return True if a run saves anything by default."""
    intervals = (
        checkpoint.every_steps,
        checkpoint.every_minutes,
        checkpoint.best_of,
        checkpoint.weights_only_every_steps,
    )
    return checkpoint.at_end or any(interval is not None for interval in intervals)


@rule(
    "TC037",
    "zero_stage.hpz_partition_size",
    example="recipe=tiny zero_stage=3 zero_stage.hpz_partition_size=2 parallelism.tensor=2",
)
def secondary_partition_divides(draft: Draft) -> Iterator[Problem]:
    """hpZ groups have equal sizes and lie within a node.

    hpZ keeps a second copy of the weights inside each machine, so that backward gathers do not
    cross the network. Groups that span machines, or hold different tensor shards, would undo it.

    Fix: Choose a divisor of the devices of a node, with parallelism.tensor=1.
    """
    config = draft.config
    size = config.zero_stage.hpz_partition_size
    if config.zero_stage.stage != 3 or size == 1:
        return
    # DeepSpeed takes neighbouring ranks of the world (groups._create_zero_param_parallel_group).
    if config.parallelism.tensor > 1:
        yield Problem(
            f"zero_stage.hpz_partition_size={size} with parallelism.tensor="
            f"{config.parallelism.tensor}: DeepSpeed would spread a shard over tensor ranks that "
            "hold different ones",
            "zero_stage.hpz_partition_size=1, or parallelism.tensor=1",
        )
    if config.offload.parameters is not OffloadDevice.none:
        yield Problem(
            f"zero_stage.hpz_partition_size={size} keeps a copy of the parameters near, and "
            "offload.parameters sends them away",
            "zero_stage.hpz_partition_size=1, or offload.parameters=none",
        )
    yield from json_problems(draft, zero.secondary_partitions_divide_a_node)


@rule(
    "TC590",
    "zero_stage.gather",
    example="recipe=tiny zero_stage=3 zero_stage.gather=blocks offload.parameters=nvme "
    "offload.nvme_path=/nvme",
)
def blocks_can_be_gathered(draft: Draft) -> Iterator[Problem]:
    """Parameters are gathered by decoder block only where DeepSpeed can take a whole block.

    DeepSpeed's swap buffers for NVMe hold the parameters of a module at a time, and DeepCompile
    gathers each parameter in the graph that it compiles.

    Fix: Leave zero_stage.gather out: trainctl then gathers by block where it can.
    """
    config = draft.config
    conflict = block_conflict(config)
    if config.zero_stage.gather is not GatherUnit.blocks or conflict is None:
        return
    if is_gathered_by_trainctl(config):
        yield Problem(
            f"zero_stage.gather=blocks with {conflict[0]}: {conflict[1]}",
            "zero_stage.gather=null",
        )


@rule(
    "TC530",
    "zero_stage.shard_group_size",
    example="recipe=tiny engine=fsdp2 zero_stage=3 hardware=1x8xh100-80g "
    "zero_stage.shard_group_size=3",
)
def shard_groups_divide_the_replicas(draft: Draft) -> Iterator[Problem]:
    """HSDP's shard groups divide the data-parallel ranks.

    Every group holds all shards, so all groups have the same size.

    Fix: Choose a divisor of the data-parallel ranks, usually the devices of a node.
    """
    size = draft.config.zero_stage.shard_group_size
    if size is not None and draft.mesh is not None and draft.mesh.data % size:
        sizes = [each for each in nearest_divisors(draft.mesh.data, size) if each > 1]
        yield Problem(
            f"zero_stage.shard_group_size={size} does not divide the {draft.mesh.data} "
            "data-parallel ranks",
            choices(sizes, "zero_stage.shard_group_size") or "zero_stage.shard_group_size=null",
        )


@rule(
    "TC531",
    "zero_stage.shard_group_size",
    severity=WARNING,
    example="recipe=tiny engine=fsdp2 zero_stage=3 hardware=2x6xh100-80g launcher=slurm "
    "zero_stage.shard_group_size=4",
)
def shard_groups_stay_in_a_node(draft: Draft) -> Iterator[Problem]:
    """HSDP's shard groups lie within a node, or are whole nodes.

    A group gathers weights in every block. A group that is partly in another node sends these over
    the network, which the groups are there to avoid.

    Fix: Choose a divisor or a multiple of the devices of a node.
    """
    size, node = draft.config.zero_stage.shard_group_size, draft.hardware.devices_per_node
    if size is None or draft.hardware.nodes == 1 or size % node == 0 or node % size == 0:
        return
    yield Problem(
        f"shard groups of {size} devices cross nodes of {node} devices",
        f"zero_stage.shard_group_size={node}",
    )


on_json(
    "TC033", offload.nvme_has_a_path, arguments="recipe=tiny zero_stage=3 offload.optimizer=nvme"
)


on_json(
    "TC036",
    zero.the_gather_bucket_is_even,
    arguments="recipe=tiny zero_stage.allgather_bucket_size=1001",
)


on_json(
    "TC038",
    zero.quantized_communication_has_a_kernel,
    arguments="recipe=tiny zero_stage=3 zero_stage.quantized_weights=true",
)


def zenflow_findings(draft: Draft) -> Iterator[Problem]:
    """Yield a problem for every setting that ZenFlow (arXiv:2505.12242) excludes.

    ZenFlow updates a part of the columns during the backward pass, before DeepSpeed's work at the
    end of a step: clipping, unscaling, the check for non-finite gradients. What it would silently
    do differently is refused; what can be corrected is in `trainctl.engines.deepspeed.engine`.
    """
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
    for axis in AXES:
        size = getattr(config.parallelism, axis)
        if size > 1:
            yield Problem(
                f"offload.zenflow with parallelism.{axis}={size}: it chooses columns among "
                "data-parallel ranks only",
                f"parallelism.{axis}=1",
                key=f"parallelism.{axis}",
            )


def _precision(config: RunConfig) -> Iterator[Problem]:
    used, precision = number_formats(config.precision), config.precision
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
