"""Rules about parallelism, other parts of the engine, and monitoring."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from typing import Any

from trainctl.plan.nearest import choices, nearest_divisors
from trainctl.rules.deepspeed.case import Case
from trainctl.rules.deepspeed.rule import Enforcement, Problem, rule
from trainctl.rules.deepspeed.values import is_number, outside

ZERO = "zero_optimization"
STAGE = f"{ZERO}.stage"
MONITORS = {"tensorboard": "tensorboard", "wandb": "wandb", "comet": "comet_ml"}
RECOMPUTE = "activation_checkpointing"
RANDOM_LTD = "data_efficiency.data_routing.random_ltd"
RANDOM_LTD_NEEDS = ("total_layer_num", "random_ltd_layer_num", "random_ltd_schedule")
"""Required keys of random-LTD, without `global_batch_size`, which DeepSpeed fills in."""


@rule("TC215", file="runtime/pipe/engine.py", fix="Use ZeRO stage 0 or 1 with pipeline stages.")
def pipelines_keep_their_gradients(case: Case) -> Iterator[Problem]:
    """With pipeline stages the ZeRO stage is 0 or 1."""
    if case.around.pipeline_stages > 1 and case.stage in (2, 3):
        yield Problem(
            STAGE,
            f"{case.setting(STAGE)} with {case.names.stages(case.around.pipeline_stages)}: "
            "DeepSpeed's pipeline allows ZeRO 0 and 1 only",
            f"{case.names.fix(STAGE, 1)}, or {case.names.stages(1)}",
        )


@rule(
    "TC216",
    file="runtime/pipe/engine.py",
    meets=Enforcement.silent,
    fix="Use ZeRO stage 1, or gradient_clipping 0.",
)
def pipelines_clip_over_all_stages(case: Case) -> Iterator[Problem]:
    """With pipeline stages and without ZeRO, nothing is clipped: each stage would do it alone."""
    clipping = case.get("gradient_clipping")
    if case.around.pipeline_stages > 1 and case.stage == 0 and is_number(clipping) and clipping:
        yield Problem(
            "gradient_clipping",
            f"gradient_clipping={clipping:g} without ZeRO: each pipeline stage clips by its own "
            "norm, and the gradient is wrong",
            f"{ZERO}.stage=1, or gradient_clipping=0",
        )


@rule(
    "TC217",
    file="runtime/engine.py",
    fix="Leave managed_gradient_accumulation out.",
)
def the_engine_accumulates(case: Case) -> Iterator[Problem]:
    """managed_gradient_accumulation=false goes without pipeline, DeepCompile and early overlap."""
    key = "managed_gradient_accumulation"
    if case.get(key) is not False:
        return
    overlap = case.get(f"{ZERO}.overlap_comm")
    reasons = {
        "pipeline stages": case.around.pipeline_stages > 1,
        "DeepCompile": bool(case.get("compile.deepcompile")),
        f"overlap_comm at ZeRO stage {case.stage}": bool(overlap) and case.stage in (0, 1),
    }
    for reason, is_there in reasons.items():
        if is_there:
            yield Problem(key, f"{key}=false cannot go with {reason}", f"{key}=true")


@rule(
    "TC218",
    file="module_inject, sequence/layer.py",
    meets=Enforcement.later,
    fix="Choose a size that divides the attention heads.",
)
def heads_are_shared_evenly(case: Case) -> Iterator[Problem]:
    """Tensor and sequence ranks share the model's attention heads evenly."""
    model = case.around.model
    if model is None:
        return
    sizes = {
        "tensor_parallel.autotp_size": case.tensor_size,
        "sequence_parallel_size": case.get("sequence_parallel_size") or 1,
    }
    for key, size in sizes.items():
        heads = model.num_attention_heads
        if isinstance(size, int) and size > 1 and heads % size:
            near = choices(nearest_divisors(heads, size), key)
            yield Problem(key, f"{key}={size} does not divide the model's {heads} heads", near)


@rule(
    "TC434",
    file="runtime/tensor_parallel/config.py",
    meets=Enforcement.silent,
    fix="Name a preset that DeepSpeed has, or leave it out.",
)
def the_preset_exists(case: Case) -> Iterator[Problem]:
    """tensor_parallel.preset_model is a preset of AutoTP's: any other name is none at all."""
    key = "tensor_parallel.preset_model"
    problem = outside(case.schema.keys[key], case.get(key))
    if problem:
        yield Problem(key, f"{key}: {problem[0]}", problem[1])


@rule(
    "TC219",
    file="module_inject/auto_ep_folding.py",
    fix="Leave expert_tensor_parallel_size at 1, and offload nothing beside AutoTP.",
)
def experts_go_with_the_rest(case: Case) -> Iterator[Problem]:
    """AutoEP beside AutoTP has more than one expert rank, and nothing offloaded or compiled."""
    if not case.get("expert_parallel.enabled"):
        return
    inner, size = "expert_parallel.expert_tensor_parallel_size", case.get(AUTOEP)
    if case.get(inner) not in (None, 1):
        yield Problem(inner, f"{inner} above 1 is not supported", f"{inner}=1")
    world = case.around.world_size
    if isinstance(size, int) and size > 0 and world is not None and world % size:
        near = choices(nearest_divisors(world, size), AUTOEP)
        yield Problem(AUTOEP, f"{AUTOEP}={size} does not divide the {world} ranks", near)
    if case.tensor_size < 2:
        return
    reasons = {
        f"{AUTOEP}=1": size == 1,
        "offload": case.is_offloaded or case.parameter_device != "none",
        "DeepCompile": bool(case.get("compile.deepcompile")),
        "sequence_parallel_size above 1": (case.get("sequence_parallel_size") or 1) > 1,
        "use_data_before_expert_parallelism": bool(case.get("use_data_before_expert_parallelism")),
    }
    for reason, is_there in reasons.items():
        if is_there:
            yield Problem(
                "expert_parallel.enabled",
                f"expert_parallel beside AutoTP cannot go with {reason}",
                "tensor_parallel.autotp_size=1",
            )


@rule(
    "TC295",
    file="runtime/activation_checkpointing/checkpointing.py",
    meets=Enforcement.later,
    fix="Partition the activations and give number_checkpoints, or leave it out.",
    warns=True,
)
def contiguous_checkpoints_have_a_size(case: Case) -> Iterator[Problem]:
    """Contiguous activation checkpoints are partitioned, and their number is given.

    Only a model that calls deepspeed.checkpointing fails without: for every other, DeepSpeed reads
    none of it (TC296).
    """
    key = f"{RECOMPUTE}.contiguous_memory_optimization"
    if not case.get(key):
        return
    if not case.get(f"{RECOMPUTE}.partition_activations"):
        yield Problem(
            key, f"{key} needs partition_activations", f"{RECOMPUTE}.partition_activations=true"
        )
    if case.get(f"{RECOMPUTE}.number_checkpoints") is None:
        yield Problem(
            key,
            f"{key} needs number_checkpoints, the number of layers",
            f"{RECOMPUTE}.number_checkpoints=32",
        )


@rule(
    "TC296",
    file="runtime/activation_checkpointing/checkpointing.py",
    meets=Enforcement.silent,
    fix="Switch activation checkpointing on in the model.",
    warns=True,
)
def recomputation_needs_the_model(case: Case) -> Iterator[Problem]:
    """The block activation_checkpointing recomputes nothing by itself."""
    if case.json.get(RECOMPUTE):
        yield Problem(
            RECOMPUTE,
            "activation_checkpointing recomputes nothing by itself: it is read only by a model "
            "that calls deepspeed.checkpointing",
            "model.gradient_checkpointing_enable() of transformers does not read it",
        )


@rule(
    "TC246",
    file="runtime/model_checkpointing",
    fix="Give data_parallel below stage 3; on the CPU leave the writer out.",
)
def the_writer_can_be_made(case: Case) -> Iterator[Problem]:
    """checkpoint.writer names its data_parallel unit below stage 3, and writes from a GPU."""
    if case.get("checkpoint.writer") is None or case.stage is None:
        return
    unit = "checkpoint.writer.data_parallel"
    if case.on_cpu:
        yield Problem("checkpoint.writer", "checkpoint.writer is for GPUs, and the device is a CPU")
    elif case.stage < 3 and case.get(unit) is None:
        yield Problem(
            unit,
            f"checkpoint.writer without data_parallel fails at ZeRO stage {case.stage}",
            f"{unit}=replica",
        )


@rule("TC297", file="monitor", fix="Install the package, or set enabled to false.")
def monitors_are_installed(case: Case) -> Iterator[Problem]:
    """A monitor that is enabled has its package installed."""
    for section, package in MONITORS.items():
        if case.get(f"{section}.enabled") and find_spec(package) is None:
            yield Problem(
                f"{section}.enabled",
                f"{section}.enabled needs the package {package}, which is not installed here",
                f"pip install {package}, or {section}.enabled=false",
            )


@rule(
    "TC298",
    file="runtime/data_pipeline/config.py",
    fix="Give the keys that are needed, or set enabled to false.",
)
def data_efficiency_is_complete(case: Case) -> Iterator[Problem]:
    """What is enabled of data_efficiency has the keys that it cannot do without."""
    sampling = "data_efficiency.data_sampling"
    wanted = {
        f"{sampling}.curriculum_learning": "curriculum_metrics",
        f"{sampling}.dynamic_batching": "max_tokens",
    }
    for section, name in wanted.items():
        if case.get(f"{section}.enabled") and not case.has(f"{section}.{name}"):
            yield Problem(
                f"{section}.{name}", f"{section} needs {name}", f"{section}.enabled=false"
            )
    dropping = _inside(case.json, RANDOM_LTD)
    routes = case.get("data_efficiency.enabled") and case.get(
        "data_efficiency.data_routing.enabled"
    )
    for name in RANDOM_LTD_NEEDS if routes and dropping.get("enabled") else ():
        if name not in dropping:
            yield Problem(f"{RANDOM_LTD}.{name}", f"{RANDOM_LTD} needs {name}", "enabled=false")


@rule(
    "TC299",
    file="compile",
    fix="Choose one place for what is offloaded, and passes that go together.",
    meets=Enforcement.later,
)
def compiled_passes_go_together(case: Case) -> Iterator[Problem]:
    """DeepCompile offloads one thing that ZeRO does not, and the pass of AutoTP is alone."""
    if not case.get("compile.deepcompile"):
        return
    targets = [
        name
        for name in ("offload_activation", "offload_parameters", "offload_opt_states")
        if case.get(f"compile.{name}")
    ]
    if "offload_activation" in targets and len(targets) > 1:
        yield Problem(
            f"compile.{targets[1]}",
            f"compile.offload_activation cannot go with {' and '.join(targets[1:])}",
            "keep one of them",
        )
    if "offload_opt_states" in targets and case.is_offloaded:
        yield Problem(
            "compile.offload_opt_states",
            f"compile.offload_opt_states beside {ZERO}.offload_optimizer: both manage the states",
            "compile.offload_opt_states=false",
        )
    passes = case.get("compile.passes") or []
    if "autotp" in passes and {"autosp", "z1", "z3"} & set(passes):
        yield Problem(
            "compile.passes", "the pass autotp cannot go with others", 'compile.passes=["autotp"]'
        )


AUTOEP = "expert_parallel.autoep_size"


def _inside(json: Mapping[str, Any], section: str) -> Mapping[str, Any]:
    """Return a free-form section; empty if it is missing."""
    for name in section.split("."):
        inner = json.get(name)
        json = inner if isinstance(inner, Mapping) else {}
    return json
