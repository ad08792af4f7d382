"""Rules about parallelism, other parts of the engine, and monitoring."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from typing import Any

from trainctl.config.extras import install_command
from trainctl.config.schema import ModelConfig
from trainctl.plans.derive import choices, nearest_divisors
from trainctl.rules.deepspeed.case import Case, JsonContext, is_number, outside
from trainctl.rules.rule import WARNING, Problem, rule

ZERO = "zero_optimization"
STAGE = f"{ZERO}.stage"
MONITORS = {"tensorboard": "tensorboard", "wandb": "wandb", "comet": "comet_ml"}
RECOMPUTE = "activation_checkpointing"
RANDOM_LTD = "data_efficiency.data_routing.random_ltd"
RANDOM_LTD_NEEDS = ("total_layer_num", "random_ltd_layer_num", "random_ltd_schedule")
"""Required keys of random-LTD, without `global_batch_size`, which DeepSpeed fills in."""


@rule(
    "TC215",
    "zero_optimization.stage",
    refused="runtime/pipe/engine.py",
    example={"stages": 2, "zero_optimization.stage": 2},
)
def pipelines_keep_their_gradients(case: Case) -> Iterator[Problem]:
    """Pipeline stages run with ZeRO stage 0 or 1.

    A pipeline accumulates gradients over many micro-batches; ZeRO 2 and 3 would reduce and free
    them after each, which DeepSpeed refuses once the processes run.

    Fix: Use ZeRO stage 1 with pipeline stages.
    """
    if case.around.pipeline_stages > 1 and case.stage in (2, 3):
        yield Problem(
            f"{case.setting(STAGE)} with {case.names.stages(case.around.pipeline_stages)}: "
            "DeepSpeed's pipeline allows ZeRO 0 and 1 only",
            f"{case.names.fix(STAGE, 1)}, or {case.names.stages(1)}",
        )


@rule(
    "TC216",
    "gradient_clipping",
    silent="runtime/pipe/engine.py",
    example={"stages": 2, "zero_optimization.stage": 0, "gradient_clipping": 1.0},
)
def pipelines_clip_over_all_stages(case: Case) -> Iterator[Problem]:
    """Gradients are not clipped over pipeline stages without ZeRO.

    Each pipeline stage would clip its part of the gradient by its own norm.

    Fix: Use ZeRO stage 1, or gradient_clipping 0.
    """
    clipping = case.get("gradient_clipping")
    if case.around.pipeline_stages > 1 and case.stage == 0 and is_number(clipping) and clipping:
        yield Problem(
            f"gradient_clipping={clipping:g} without ZeRO: each pipeline stage clips by its own "
            "norm, and the gradient is wrong",
            f"{ZERO}.stage=1, or gradient_clipping=0",
        )


@rule(
    "TC217",
    "managed_gradient_accumulation",
    refused="runtime/engine.py",
    example={
        "managed_gradient_accumulation": False,
        "zero_optimization.stage": 1,
        "zero_optimization.overlap_comm": True,
    },
)
def the_engine_accumulates(case: Case) -> Iterator[Problem]:
    """managed_gradient_accumulation=false is not combined with a pipeline, DeepCompile or early
    overlap.

    Fix: Leave managed_gradient_accumulation out.
    """
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
            yield Problem(f"{key}=false cannot go with {reason}", f"{key}=true")


@rule(
    "TC218",
    "tensor_parallel.autotp_size",
    "sequence_parallel_size",
    later="module_inject, sequence/layer.py",
    example={"tensor_parallel.autotp_size": 3},
    around=JsonContext(model=ModelConfig(num_attention_heads=4)),
    situation="With `--model DIR`, a model of 4 attention heads",
)
def heads_are_shared_evenly(case: Case) -> Iterator[Problem]:
    """Tensor-parallel and sequence-parallel sizes divide the attention heads.

    Fix: Choose a size that divides the attention heads.
    """
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
            yield Problem(f"{key}={size} does not divide the model's {heads} heads", near, key=key)


@rule(
    "TC434",
    "tensor_parallel.preset_model",
    silent="runtime/tensor_parallel/config.py",
    example={"tensor_parallel.preset_model": "lama"},
)
def the_preset_exists(case: Case) -> Iterator[Problem]:
    """tensor_parallel.preset_model is a preset of AutoTP.

    DeepSpeed uses no preset for any other name.

    Fix: Name a preset that DeepSpeed has, or leave it out.
    """
    key = "tensor_parallel.preset_model"
    problem = outside(case.schema.keys[key], case.get(key))
    if problem:
        yield Problem(f"{key}: {problem[0]}", problem[1])


@rule(
    "TC219",
    "expert_parallel.expert_tensor_parallel_size",
    "expert_parallel.autoep_size",
    "expert_parallel.enabled",
    refused="module_inject/auto_ep_folding.py",
    example={"expert_parallel": {"enabled": True, "autoep_size": 3}},
)
def experts_go_with_the_rest(case: Case) -> Iterator[Problem]:
    """AutoEP beside AutoTP has several expert ranks, and neither offload nor compilation.

    Fix: Leave expert_tensor_parallel_size at 1, and offload nothing beside AutoTP.
    """
    if not case.get("expert_parallel.enabled"):
        return
    inner, size = "expert_parallel.expert_tensor_parallel_size", case.get(AUTOEP)
    if case.get(inner) not in (None, 1):
        yield Problem(f"{inner} above 1 is not supported", f"{inner}=1")
    world = case.around.world_size
    if isinstance(size, int) and size > 0 and world is not None and world % size:
        near = choices(nearest_divisors(world, size), AUTOEP)
        yield Problem(f"{AUTOEP}={size} does not divide the {world} ranks", near, key=AUTOEP)
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
                f"expert_parallel beside AutoTP cannot go with {reason}",
                "tensor_parallel.autotp_size=1",
                key="expert_parallel.enabled",
            )


@rule(
    "TC295",
    "activation_checkpointing.contiguous_memory_optimization",
    severity=WARNING,
    later="runtime/activation_checkpointing/checkpointing.py",
    example={"activation_checkpointing": {"contiguous_memory_optimization": True}},
)
def contiguous_checkpoints_have_a_size(case: Case) -> Iterator[Problem]:
    """Contiguous activation checkpoints are partitioned and have a number.

    Without, a model that calls deepspeed.checkpointing fails; for every other model DeepSpeed
    ignores the section (TC296).

    Fix: Partition the activations and give number_checkpoints, or leave it out.
    """
    key = f"{RECOMPUTE}.contiguous_memory_optimization"
    if not case.get(key):
        return
    if not case.get(f"{RECOMPUTE}.partition_activations"):
        yield Problem(
            f"{key} needs partition_activations", f"{RECOMPUTE}.partition_activations=true"
        )
    if case.get(f"{RECOMPUTE}.number_checkpoints") is None:
        yield Problem(
            f"{key} needs number_checkpoints, the number of layers",
            f"{RECOMPUTE}.number_checkpoints=32",
        )


@rule(
    "TC296",
    "activation_checkpointing",
    severity=WARNING,
    silent="runtime/activation_checkpointing/checkpointing.py",
    example={"activation_checkpointing": {"partition_activations": True}},
)
def recomputation_needs_the_model(case: Case) -> Iterator[Problem]:
    """Activation checkpointing is switched on in the model too.

    The block activation_checkpointing is read only by a model that calls deepspeed.checkpointing.

    Fix: Switch activation checkpointing on in the model.
    """
    if case.json.get(RECOMPUTE):
        yield Problem(
            "activation_checkpointing recomputes nothing by itself: it is read only by a model "
            "that calls deepspeed.checkpointing",
            "model.gradient_checkpointing_enable() of transformers does not read it",
        )


@rule(
    "TC246",
    "checkpoint.writer",
    "checkpoint.writer.data_parallel",
    refused="runtime/model_checkpointing",
    example={"checkpoint.writer": {"type": "python"}},
)
def the_writer_can_be_made(case: Case) -> Iterator[Problem]:
    """checkpoint.writer names its data_parallel unit below stage 3, and runs on a GPU.

    Fix: Give data_parallel below stage 3; on the CPU leave the writer out.
    """
    if case.get("checkpoint.writer") is None or case.stage is None:
        return
    unit = "checkpoint.writer.data_parallel"
    if case.on_cpu:
        yield Problem("checkpoint.writer is for GPUs, and the device is a CPU")
    elif case.stage < 3 and case.get(unit) is None:
        yield Problem(
            f"checkpoint.writer without data_parallel fails at ZeRO stage {case.stage}",
            f"{unit}=replica",
            key=unit,
        )


@rule("TC297", "*.enabled", refused="monitor", example={"comet.enabled": True})
def monitors_are_installed(case: Case) -> Iterator[Problem]:
    """The package of each enabled monitor is installed.

    Fix: Install the package, or set enabled to false.
    """
    for section, package in MONITORS.items():
        if case.get(f"{section}.enabled") and find_spec(package) is None:
            yield Problem(
                f"{section}.enabled needs the package {package}, which is not installed here",
                f"{install_command(package)}, or {section}.enabled=false",
                key=f"{section}.enabled",
            )


@rule(
    "TC298",
    "*.*",
    "data_efficiency.data_routing.random_ltd.*",
    refused="runtime/data_pipeline/config.py",
    example={"data_efficiency": {"data_sampling": {"dynamic_batching": {"enabled": True}}}},
)
def data_efficiency_is_complete(case: Case) -> Iterator[Problem]:
    """Each enabled part of data_efficiency has its required keys.

    Fix: Give the keys that are needed, or set enabled to false.
    """
    sampling = "data_efficiency.data_sampling"
    wanted = {
        f"{sampling}.curriculum_learning": "curriculum_metrics",
        f"{sampling}.dynamic_batching": "max_tokens",
    }
    for section, name in wanted.items():
        if case.get(f"{section}.enabled") and not case.has(f"{section}.{name}"):
            yield Problem(
                f"{section} needs {name}", f"{section}.enabled=false", key=f"{section}.{name}"
            )
    dropping = _free_form_section(case.json, RANDOM_LTD)
    routes = case.get("data_efficiency.enabled") and case.get(
        "data_efficiency.data_routing.enabled"
    )
    for name in RANDOM_LTD_NEEDS if routes and dropping.get("enabled") else ():
        if name not in dropping:
            yield Problem(f"{RANDOM_LTD} needs {name}", "enabled=false", key=f"{RANDOM_LTD}.{name}")


@rule(
    "TC299",
    "compile.offload_opt_states",
    "compile.*",
    "compile.passes",
    later="compile",
    example={
        "compile.deepcompile": True,
        "compile.offload_activation": True,
        "compile.offload_parameters": True,
    },
)
def compiled_passes_go_together(case: Case) -> Iterator[Problem]:
    """DeepCompile offloads one thing that ZeRO does not, and runs the AutoTP pass alone.

    Fix: Choose one place for what is offloaded, and passes that go together.
    """
    if not case.get("compile.deepcompile"):
        return
    targets = [
        name
        for name in ("offload_activation", "offload_parameters", "offload_opt_states")
        if case.get(f"compile.{name}")
    ]
    if "offload_activation" in targets and len(targets) > 1:
        yield Problem(
            f"compile.offload_activation cannot go with {' and '.join(targets[1:])}",
            "keep one of them",
            key=f"compile.{targets[1]}",
        )
    if "offload_opt_states" in targets and case.is_offloaded:
        yield Problem(
            f"compile.offload_opt_states beside {ZERO}.offload_optimizer: both manage the states",
            "compile.offload_opt_states=false",
        )
    passes = case.get("compile.passes") or []
    if "autotp" in passes and {"autosp", "z1", "z3"} & set(passes):
        yield Problem(
            "the pass autotp cannot go with others",
            'compile.passes=["autotp"]',
            key="compile.passes",
        )


AUTOEP = "expert_parallel.autoep_size"


def _free_form_section(json: Mapping[str, Any], section: str) -> Mapping[str, Any]:
    """Return a free-form section; empty if it is missing."""
    for name in section.split("."):
        inner = json.get(name)
        json = inner if isinstance(inner, Mapping) else {}
    return json
