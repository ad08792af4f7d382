"""Rules about ZeRO's stages, its buffers and ZeRO++."""

from __future__ import annotations

from collections.abc import Iterator

from trainctl.config.suggest import words
from trainctl.plans.derive import choices, nearest_divisors
from trainctl.rules.deepspeed.case import Case, is_number, json_text
from trainctl.rules.rule import LEFT_OUT, WARNING, Problem, rule

ZERO = "zero_optimization"
QUANTIZED = (
    "zero_quantized_weights",
    "zero_quantized_nontrainable_weights",
    "zero_quantized_gradients",
)
NEEDS_STAGE = {
    **dict.fromkeys(
        words(
            "overlap_comm contiguous_gradients reduce_scatter reduce_bucket_size sub_group_size "
            "load_from_fp32_weights ignore_unused_parameters"
        ),
        (1, 2, 3),
    ),
    **dict.fromkeys(
        words(
            "allgather_bucket_size allgather_partitions round_robin_gradients parameter_alignment "
            "use_multi_rank_bucket_allreduce"
        ),
        (1, 2),
    ),
    **dict.fromkeys(
        words(
            "stage3_prefetch_bucket_size stage3_param_persistence_threshold "
            "stage3_model_persistence_threshold stage3_max_live_parameters "
            "stage3_max_reuse_distance stage3_gather_16bit_weights_on_model_save "
            "stage3_module_granularity_threshold stage3_use_all_reduce_for_fetch_params "
            "stage3_allgather_sequential zero_hpz_partition_size zero_quantized_weights "
            "zero_quantized_nontrainable_weights zero_quantized_gradients "
            "save_muon_momentum_buffer_in_memory"
        ),
        (3,),
    ),
}
"""ZeRO stages at which a key of `zero_optimization` has an effect."""


@rule(
    "TC275",
    "prescale_gradients",
    "gradient_predivide_factor",
    refused="runtime/zero/stage_1_and_2.py, runtime/zero/stage3.py",
    example={
        "zero_optimization.stage": 2,
        "zero_optimization.reduce_scatter": True,
        "prescale_gradients": True,
    },
)
def reduce_scatter_scales_afterwards(case: Case) -> Iterator[Problem]:
    """Gradients are not scaled before a reduce-scatter.

    Fix: Set reduce_scatter to false, or scale gradients afterwards.
    """
    if case.stage not in (2, 3) or not case.get(f"{ZERO}.reduce_scatter"):
        return
    if case.stage == 2 and case.get("gradient_allreduce_op") == "sum":
        return
    hint = f"{ZERO}.reduce_scatter=false"
    if case.get("prescale_gradients"):
        message = f"prescale_gradients with reduce_scatter at ZeRO stage {case.stage}"
        yield Problem(message, f"prescale_gradients=false, or {hint}")
    factor = case.get("gradient_predivide_factor")
    if is_number(factor) and factor != 1:
        yield Problem(
            f"gradient_predivide_factor={factor:g} with reduce_scatter at ZeRO stage {case.stage}",
            f"gradient_predivide_factor=1, or {hint}",
            key="gradient_predivide_factor",
        )


@rule(
    "TC431",
    "gradient_predivide_factor",
    silent="runtime/zero/stage3.py",
    example={
        "zero_optimization.stage": 3,
        "zero_optimization.reduce_scatter": False,
        "gradient_predivide_factor": 2,
    },
)
def stage_3_multiplies_back(case: Case) -> Iterator[Problem]:
    """gradient_predivide_factor is not the number of ranks at stage 3.

    Gradients are divided by it and by the number of ranks; where these are equal they are not
    multiplied back.

    Fix: Choose another factor than the number of ranks, or 1.
    """
    factor, ranks = case.get("gradient_predivide_factor"), case.counted_ranks
    if case.stage == 3 and is_number(factor) and factor == ranks and factor != 1:
        yield Problem(
            f"gradient_predivide_factor={factor:g}, the number of ranks: at ZeRO stage 3 the "
            f"gradients are {factor:g} times too small",
            "gradient_predivide_factor=1",
        )


@rule(
    "TC276",
    "zero_optimization.allgather_bucket_size",
    refused="runtime/zero/stage_1_and_2.py",
    example={"zero_optimization.stage": 2, "zero_optimization.allgather_bucket_size": 1001},
)
def the_gather_bucket_is_even(case: Case) -> Iterator[Problem]:
    """allgather_bucket_size is even at stages 1 and 2.

    DeepSpeed aligns each partition to 2 elements, and refuses a bucket of odd size.

    Fix: Choose an even number.
    """
    key = f"{ZERO}.allgather_bucket_size"
    size = case.get(key)
    # With bf16 weights and fp32 accumulation, stage 1 runs BF16_Optimizer: any size is legal.
    if case.stage in (1, 2) and isinstance(size, int) and size % 2 and not case.is_bf16_optimizer:
        yield Problem(
            f"{case.setting(key)} is odd; DeepSpeed aligns to 2 elements",
            f"{case.names.fix(key, size - 1)} or {size + 1}",
        )


@rule(
    "TC277",
    "gradient_allreduce_op",
    refused="runtime/config.py",
    example={"zero_optimization.stage": 3, "gradient_allreduce_op": "sum"},
)
def sums_are_supported(case: Case) -> Iterator[Problem]:
    """gradient_allreduce_op=sum is not combined with stage 3, ZenFlow or DeepCompile.

    Fix: Average the gradients.
    """
    op = case.get("gradient_allreduce_op")
    if not isinstance(op, str) or op.lower() != "sum":
        return
    others = {
        "ZeRO stage 3": case.stage == 3,
        "ZenFlow": case.has(f"{ZERO}.zenflow") and case.get(f"{ZERO}.zenflow") is not None,
        "DeepCompile": bool(case.get("compile.deepcompile")),
    }
    for name, is_there in others.items():
        if is_there:
            yield Problem(
                f"gradient_allreduce_op=sum cannot go with {name}", "gradient_allreduce_op=mean"
            )


@rule(
    "TC278",
    "zero_optimization.legacy_stage1",
    refused="runtime/engine.py",
    example={"zero_optimization.stage": 1, "zero_optimization.legacy_stage1": True},
)
def stage_1_is_the_new_one(case: Case) -> Iterator[Problem]:
    """The legacy implementation of ZeRO stage 1 is not requested.

    Fix: Leave legacy_stage1 out.
    """
    if case.stage and case.get(f"{ZERO}.legacy_stage1"):
        yield Problem("the old stage 1 is gone", "leave it out")


@rule(
    "TC279",
    "zero_optimization.compute_grad_norm",
    refused="runtime/zero/config.py, runtime/engine.py",
    example={"zero_optimization.stage": 3, "zero_optimization.compute_grad_norm": False},
)
def the_norm_is_computed_where_it_is_needed(case: Case) -> Iterator[Problem]:
    """compute_grad_norm=false is used at stage 1 or 2, without clipping.

    Fix: Leave compute_grad_norm out; or use stage 1 or 2, without clipping.
    """
    key = f"{ZERO}.compute_grad_norm"
    if case.get(key) is not False or case.stage is None:
        return
    clipping = case.get("gradient_clipping")
    if case.stage not in (1, 2):
        yield Problem(f"{key}=false at ZeRO stage {case.stage}", f"{key}=true")
    elif is_number(clipping) and clipping != 0:
        yield Problem(
            f"{key}=false with gradient_clipping={clipping:g}",
            f"{key}=true, or gradient_clipping=0",
        )
    elif case.is_bf16_optimizer:
        yield Problem(f"{key}=false with bf16 weights and fp32 sums at stage 1", f"{key}=true")


@rule(
    "TC280",
    "zero_optimization.zero_hpz_partition_size",
    later="utils/groups.py",
    example={"zero_optimization.stage": 3, "zero_optimization.zero_hpz_partition_size": 3},
)
def secondary_partitions_divide_a_node(case: Case) -> Iterator[Problem]:
    """zero_hpz_partition_size divides the ranks of a node.

    Fix: Choose a zero_hpz_partition_size that divides a node's ranks.
    """
    key = f"{ZERO}.zero_hpz_partition_size"
    size = case.get(key)
    node, world = case.around.devices_per_node, case.around.world_size
    ranks = node or world
    if case.stage == 3 and isinstance(size, int) and size > 1 and ranks and ranks % size:
        near = choices(nearest_divisors(ranks, size))
        what = f"a node's {node} devices" if node else f"the {world} ranks"
        yield Problem(f"{case.setting(key)} does not divide {what}", case.names.fix(key, near))


@rule(
    "TC281",
    "zero_optimization.zero_quantized_*",
    later="op_builder/cpu",
    example={"zero_optimization.stage": 3, "zero_optimization.zero_quantized_weights": True},
)
def quantized_communication_has_a_kernel(case: Case) -> Iterator[Problem]:
    """ZeRO++ quantizes communication on GPUs only.

    The kernels that quantize what is communicated are CUDA code.

    Fix: Leave quantized communication out on other devices.
    """
    for name in QUANTIZED if case.on_cpu and case.stage == 3 else ():
        key = f"{ZERO}.{name}"
        if case.get(key):
            yield Problem(
                f"{case.names.key(key)} uses GPU kernels, and the device is a CPU",
                case.names.fix(key, False),
                key=key,
            )


@rule(
    "TC282",
    "zero_optimization.*",
    severity=WARNING,
    silent="runtime/zero/config.py",
    example={"zero_optimization.stage": 2, "zero_optimization.stage3_prefetch_bucket_size": 1000},
)
def keys_of_zero_have_an_effect(case: Case) -> Iterator[Problem]:
    """Keys of zero_optimization have an effect at the stage.

    Fix: Leave the key out, or use the stage it is for.
    """
    if case.stage is None:
        return
    for name, stages in NEEDS_STAGE.items():
        key = f"{ZERO}.{name}"
        is_set = case.given(key) and case.get(key) != case.schema.keys[key].default
        if is_set and case.stage not in stages:
            yield Problem(
                f"{key}={json_text(case.get(key))} has no effect at ZeRO stage {case.stage}",
                f"leave it out, or {choices(stages, f'{ZERO}.stage')}",
                key=key,
            )


@rule(
    "TC283",
    "zero_optimization.stage3_gather_16bit_weights_on_model_save",
    severity=WARNING,
    later="runtime/engine.py",
    example={
        "zero_optimization.stage": 3,
        "zero_optimization.stage3_gather_16bit_weights_on_model_save": LEFT_OUT,
    },
)
def saved_models_have_weights(case: Case) -> Iterator[Problem]:
    """The 16-bit model saved at stage 3 contains the weights.

    Fix: Set stage3_gather_16bit_weights_on_model_save, or gather the weights in the script.
    """
    key = f"{ZERO}.stage3_gather_16bit_weights_on_model_save"
    if case.stage == 3 and case.get(key) is False:
        yield Problem(
            "save_16bit_model saves nothing at ZeRO stage 3 without it, and only returns false",
            f"{key}=true",
        )


@rule(
    "TC284",
    "zero_optimization.pipeline_loading_checkpoint",
    later="runtime/engine.py",
    example={"zero_optimization.stage": 2, "zero_optimization.pipeline_loading_checkpoint": True},
)
def staged_loading_has_its_stage(case: Case) -> Iterator[Problem]:
    """pipeline_loading_checkpoint is used at stage 3.

    At other stages the checkpoint cannot be loaded.

    Fix: Leave pipeline_loading_checkpoint out below stage 3.
    """
    key = f"{ZERO}.pipeline_loading_checkpoint"
    if case.get(key) and case.stage in (0, 1, 2):
        yield Problem(
            f"{key} at ZeRO stage {case.stage}: loading a checkpoint fails", "leave it out"
        )


@rule(
    "TC285",
    "zero_optimization.elastic_checkpoint",
    severity=WARNING,
    silent="runtime/zero/config.py",
    example={"zero_optimization.stage": 3, "zero_optimization.elastic_checkpoint": True},
)
def checkpoints_are_not_elastic(case: Case) -> Iterator[Problem]:
    """Stage 3 has no elastic checkpoints.

    Fix: Leave elastic_checkpoint out, and convert to a universal checkpoint.
    """
    key = f"{ZERO}.elastic_checkpoint"
    if case.stage == 3 and case.get(key):
        yield Problem(f"{key} has no effect at ZeRO stage 3", "leave it out")
