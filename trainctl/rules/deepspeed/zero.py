"""Rules about ZeRO's stages, its buffers and ZeRO++."""

from __future__ import annotations

from collections.abc import Iterator

from trainctl.plan.nearest import choices, nearest_divisors
from trainctl.rules.deepspeed.case import Case
from trainctl.rules.deepspeed.rule import Enforcement, Problem, rule
from trainctl.rules.deepspeed.values import is_number, shown, words

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
    file="runtime/zero/stage_1_and_2.py, runtime/zero/stage3.py",
    fix="Set reduce_scatter to false, or scale gradients afterwards.",
)
def reduce_scatter_scales_afterwards(case: Case) -> Iterator[Problem]:
    """Gradients are not scaled before they are reduced, where reduce_scatter is on."""
    if case.stage not in (2, 3) or not case.get(f"{ZERO}.reduce_scatter"):
        return
    if case.stage == 2 and case.get("gradient_allreduce_op") == "sum":
        return
    hint = f"{ZERO}.reduce_scatter=false"
    if case.get("prescale_gradients"):
        message = f"prescale_gradients with reduce_scatter at ZeRO stage {case.stage}"
        yield Problem("prescale_gradients", message, f"prescale_gradients=false, or {hint}")
    factor = case.get("gradient_predivide_factor")
    if is_number(factor) and factor != 1:
        yield Problem(
            "gradient_predivide_factor",
            f"gradient_predivide_factor={factor:g} with reduce_scatter at ZeRO stage {case.stage}",
            f"gradient_predivide_factor=1, or {hint}",
        )


@rule(
    "TC431",
    file="runtime/zero/stage3.py",
    meets=Enforcement.silent,
    fix="Choose another factor than the number of ranks, or 1.",
)
def stage_3_multiplies_back(case: Case) -> Iterator[Problem]:
    """At stage 3 gradient_predivide_factor is not the number of ranks.

    Gradients are divided by it, and by the number of ranks; with these equal they are not
    multiplied back.
    """
    factor, ranks = case.get("gradient_predivide_factor"), case.counted_ranks
    if case.stage == 3 and is_number(factor) and factor == ranks and factor != 1:
        yield Problem(
            "gradient_predivide_factor",
            f"gradient_predivide_factor={factor:g}, the number of ranks: at ZeRO stage 3 the "
            f"gradients are {factor:g} times too small",
            "gradient_predivide_factor=1",
        )


@rule("TC276", file="runtime/zero/stage_1_and_2.py", fix="Make allgather_bucket_size even.")
def the_gather_bucket_is_even(case: Case) -> Iterator[Problem]:
    """allgather_bucket_size is even at stages 1 and 2."""
    key = f"{ZERO}.allgather_bucket_size"
    size = case.get(key)
    # With bf16 weights and fp32 accumulation, stage 1 runs BF16_Optimizer: any size is legal.
    if case.stage in (1, 2) and isinstance(size, int) and size % 2 and not case.is_bf16_optimizer:
        yield Problem(
            key,
            f"{case.setting(key)} is odd; DeepSpeed aligns to 2 elements",
            f"{case.names.fix(key, size - 1)} or {size + 1}",
        )


@rule("TC277", file="runtime/config.py", fix="Average the gradients.")
def sums_are_supported(case: Case) -> Iterator[Problem]:
    """gradient_allreduce_op=sum does not go with stage 3, ZenFlow or DeepCompile."""
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
                "gradient_allreduce_op",
                f"gradient_allreduce_op=sum cannot go with {name}",
                "gradient_allreduce_op=mean",
            )


@rule("TC278", file="runtime/engine.py", fix="Leave legacy_stage1 out.")
def stage_1_is_the_new_one(case: Case) -> Iterator[Problem]:
    """The old ZeRO stage 1 is gone."""
    if case.stage and case.get(f"{ZERO}.legacy_stage1"):
        yield Problem(f"{ZERO}.legacy_stage1", "the old stage 1 is gone", "leave it out")


@rule(
    "TC279",
    file="runtime/zero/config.py, runtime/engine.py",
    fix="Leave compute_grad_norm out; or use stage 1 or 2, without clipping.",
)
def the_norm_is_computed_where_it_is_needed(case: Case) -> Iterator[Problem]:
    """compute_grad_norm=false goes with stage 1 or 2, and without clipping."""
    key = f"{ZERO}.compute_grad_norm"
    if case.get(key) is not False or case.stage is None:
        return
    clipping = case.get("gradient_clipping")
    if case.stage not in (1, 2):
        yield Problem(key, f"{key}=false at ZeRO stage {case.stage}", f"{key}=true")
    elif is_number(clipping) and clipping != 0:
        yield Problem(
            key,
            f"{key}=false with gradient_clipping={clipping:g}",
            f"{key}=true, or gradient_clipping=0",
        )
    elif case.is_bf16_optimizer:
        yield Problem(key, f"{key}=false with bf16 weights and fp32 sums at stage 1", f"{key}=true")


@rule(
    "TC280",
    file="utils/groups.py",
    meets=Enforcement.later,
    fix="Choose a zero_hpz_partition_size that divides a node's ranks.",
)
def secondary_partitions_divide_a_node(case: Case) -> Iterator[Problem]:
    """zero_hpz_partition_size divides the ranks of a node."""
    key = f"{ZERO}.zero_hpz_partition_size"
    size = case.get(key)
    node, world = case.around.devices_per_node, case.around.world_size
    ranks = node or world
    if case.stage == 3 and isinstance(size, int) and size > 1 and ranks and ranks % size:
        near = choices(nearest_divisors(ranks, size))
        what = f"a node's {node} devices" if node else f"the {world} ranks"
        yield Problem(key, f"{case.setting(key)} does not divide {what}", case.names.fix(key, near))


@rule(
    "TC281",
    file="op_builder/cpu",
    meets=Enforcement.later,
    fix="Leave quantised communication to GPUs.",
)
def quantized_communication_has_a_kernel(case: Case) -> Iterator[Problem]:
    """ZeRO++ quantises with kernels for GPUs."""
    for name in QUANTIZED if case.on_cpu and case.stage == 3 else ():
        key = f"{ZERO}.{name}"
        if case.get(key):
            yield Problem(
                key,
                f"{case.names.key(key)} uses GPU kernels, and the device is a CPU",
                case.names.fix(key, False),
            )


@rule(
    "TC282",
    file="runtime/zero/config.py",
    meets=Enforcement.silent,
    fix="Leave the key out, or use the stage it is for.",
    warns=True,
)
def keys_of_zero_have_an_effect(case: Case) -> Iterator[Problem]:
    """A key of zero_optimization is one that the stage reads."""
    if case.stage is None:
        return
    for name, stages in NEEDS_STAGE.items():
        key = f"{ZERO}.{name}"
        is_set = case.given(key) and case.get(key) != case.schema.keys[key].default
        if is_set and case.stage not in stages:
            yield Problem(
                key,
                f"{key}={shown(case.get(key))} has no effect at ZeRO stage {case.stage}",
                f"leave it out, or {choices(stages, f'{ZERO}.stage')}",
            )


@rule(
    "TC283",
    file="runtime/engine.py",
    meets=Enforcement.later,
    fix="Set stage3_gather_16bit_weights_on_model_save, or gather the weights in the script.",
    warns=True,
)
def saved_models_have_weights(case: Case) -> Iterator[Problem]:
    """At stage 3 the 16-bit model that is saved has its weights in it."""
    key = f"{ZERO}.stage3_gather_16bit_weights_on_model_save"
    if case.stage == 3 and case.get(key) is False:
        yield Problem(
            key,
            "save_16bit_model saves nothing at ZeRO stage 3 without it, and only returns false",
            f"{key}=true",
        )


@rule(
    "TC284",
    file="runtime/engine.py",
    meets=Enforcement.later,
    fix="Leave pipeline_loading_checkpoint out below stage 3.",
)
def staged_loading_has_its_stage(case: Case) -> Iterator[Problem]:
    """pipeline_loading_checkpoint is for stage 3; elsewhere the checkpoint cannot be loaded."""
    key = f"{ZERO}.pipeline_loading_checkpoint"
    if case.get(key) and case.stage in (0, 1, 2):
        yield Problem(
            key, f"{key} at ZeRO stage {case.stage}: loading a checkpoint fails", "leave it out"
        )


@rule(
    "TC285",
    file="runtime/zero/config.py",
    meets=Enforcement.silent,
    fix="Leave elastic_checkpoint out, and convert to a universal checkpoint.",
    warns=True,
)
def checkpoints_are_not_elastic(case: Case) -> Iterator[Problem]:
    """Stage 3 has no elastic checkpoints."""
    key = f"{ZERO}.elastic_checkpoint"
    if case.stage == 3 and case.get(key):
        yield Problem(key, f"{key} has no effect at ZeRO stage 3", "leave it out")
