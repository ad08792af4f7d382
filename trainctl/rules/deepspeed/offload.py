"""Rules about states offloaded from the device."""

from __future__ import annotations

from collections.abc import Iterator

from trainctl.config.schema import ModelConfig
from trainctl.rules.deepspeed.case import Case
from trainctl.rules.deepspeed.rule import Enforcement, Problem, rule
from trainctl.rules.deepspeed.values import is_number, shown

STAGE = "zero_optimization.stage"
OPTIMIZER = "zero_optimization.offload_optimizer"
PARAMETERS = "zero_optimization.offload_param"
ZENFLOW = "zero_optimization.zenflow"
ADAM_TENSORS = 4
"""Tensors that an Adam step reads and writes per parameter: weight, gradient and two moments."""


@rule(
    "TC286",
    file="runtime/engine.py",
    meets=Enforcement.silent,
    fix="Use the stage that offloads it, or leave the block out.",
)
def offload_has_its_stage(case: Case) -> Iterator[Problem]:
    """Parameters are offloaded at stage 3 only, optimizer states at stages 1 to 3."""
    if case.stage is None:
        return
    fix, stage, key = case.names.fix, case.stage, f"{PARAMETERS}.device"
    if case.parameter_device != "none" and stage < 3:
        yield Problem(
            key,
            f"{case.setting(key)} needs ZeRO stage 3, and it is {stage}, where DeepSpeed ignores "
            "it",
            f"{fix(STAGE, 3)}, or {fix(key, 'none')}",
        )
    key = f"{OPTIMIZER}.device"
    if case.is_offloaded and stage == 0:
        yield Problem(
            key,
            f"{case.setting(key)} needs ZeRO stage 1 or more, and it is 0, where DeepSpeed ignores "
            "it",
            f"{fix(STAGE, 1)}, or {fix(key, 'none')}",
        )
    if case.offload_device == "nvme" and stage in (1, 2):
        yield Problem(
            key,
            f"{case.setting(key)} needs ZeRO stage 3; at stage {stage} DeepSpeed keeps the states "
            "in host memory instead",
            f"{fix(STAGE, 3)}, or {fix(key, 'cpu')}",
        )


@rule(
    "TC287",
    file="runtime/zero/config.py, runtime/zero/stage3.py",
    fix="Leave ratio out; or use stage 3 and DeepSpeed's CPU Adam.",
)
def a_part_is_offloaded_at_stage_3(case: Case) -> Iterator[Problem]:
    """A part of the states is offloaded at stage 3 only, and by DeepSpeed's CPU Adam."""
    key = f"{OPTIMIZER}.ratio"
    ratio = case.get(key)
    if not is_number(ratio) or ratio >= 1 or case.stage is None:
        return
    torch_adam = case.params("optimizer").get("torch_adam")
    if case.stage < 3:
        yield Problem(key, f"{key}={ratio:g} needs ZeRO stage 3, and it is {case.stage}", "ratio=1")
    elif case.is_offloaded and (case.optimizer not in ("adam", "adamw", None) or torch_adam):
        yield Problem(
            key,
            f"{key}={ratio:g} needs DeepSpeed's CPU Adam",
            "ratio=1, or optimizer.type=AdamW with torch_adam=false",
        )


@rule(
    "TC288",
    file="runtime/zero/partition_parameters.py, runtime/zero/stage3.py",
    meets=Enforcement.later,
    fix="Give nvme_path, a folder on a local drive.",
)
def nvme_has_a_path(case: Case) -> Iterator[Problem]:
    """What is offloaded to NVMe has a folder there."""
    for block, device in ((OPTIMIZER, case.offload_device), (PARAMETERS, case.parameter_device)):
        key = f"{block}.nvme_path"
        if device == "nvme" and key not in case.values:
            yield Problem(
                key,
                f"offload to nvme needs {case.names.key(key)}, a folder on a local drive",
                case.names.fix(key, "/local_nvme"),
            )


@rule(
    "TC289",
    file="runtime/swap_tensor",
    meets=Enforcement.later,
    fix="Make the buffers as large as the largest parameter, and as many as a step needs.",
)
def nvme_buffers_hold_a_parameter(case: Case) -> Iterator[Problem]:
    """The buffers for NVMe hold the largest parameter, and all that Adam needs of it."""
    if case.stage != 3:
        return
    count = case.get(f"{OPTIMIZER}.buffer_count")
    is_adam = case.optimizer in ("adam", "adamw")
    if case.offload_device == "nvme" and is_adam and is_number(count) and count < ADAM_TENSORS:
        yield Problem(
            f"{OPTIMIZER}.buffer_count",
            f"{OPTIMIZER}.buffer_count={count}: Adam needs {ADAM_TENSORS} for a parameter",
            f"{OPTIMIZER}.buffer_count={ADAM_TENSORS}",
        )
    size, ranks = case.get(f"{PARAMETERS}.buffer_size"), case.around.world_size
    if case.parameter_device != "nvme" or case.around.model is None or not is_number(size):
        return
    largest = -(-_largest_parameter(case.around.model) // (ranks or 1))
    if ranks and size < largest:
        yield Problem(
            f"{PARAMETERS}.buffer_size",
            f"{PARAMETERS}.buffer_size={size} elements; a rank's part of the largest parameter "
            f"has {largest}",
            f"{PARAMETERS}.buffer_size={largest} or more",
        )


@rule("TC290", file="runtime/swap_tensor/aio_config.py", fix="Set aio.use_gds to false.")
def gds_is_for_cuda(case: Case) -> Iterator[Problem]:
    """GPUDirect Storage is for CUDA."""
    if case.get("aio.use_gds") and case.is_not_cuda:
        yield Problem("aio.use_gds", "aio.use_gds is for CUDA, and the device is not", "false")


@rule(
    "TC291",
    file="runtime/superoffload/superoffload_stage3.py",
    fix="Use stage 3 on CUDA, or leave super_offload out.",
)
def super_offload_is_for_cuda(case: Case) -> Iterator[Problem]:
    """SuperOffload runs on CUDA."""
    key = f"{OPTIMIZER}.super_offload"
    if case.get(key) and case.stage == 3 and case.is_not_cuda:
        yield Problem(key, f"{key} is for CUDA, and the device is not", f"{key}=false")


@rule(
    "TC292",
    file="runtime/engine.py",
    meets=Enforcement.silent,
    fix="Use stage 3 with offload_optimizer.device=cpu, or leave super_offload out.",
)
def super_offload_has_its_stage(case: Case) -> Iterator[Problem]:
    """SuperOffload is a kind of optimizer offload at stage 3; elsewhere it is ignored."""
    key = f"{OPTIMIZER}.super_offload"
    if case.get(key) and case.stage in (0, 1, 2):
        yield Problem(
            key,
            f"{key} is ignored at ZeRO stage {case.stage}",
            "zero_optimization.stage=3, or leave it out",
        )


@rule(
    "TC293",
    file="runtime/zenflow",
    fix="Offload the optimizer to cpu, and give intervals as the strategy wants them.",
)
def zenflow_has_what_it_needs(case: Case) -> Iterator[Problem]:
    """ZenFlow goes with optimizer offload, and its intervals with its strategy."""
    if not _has_zenflow(case) or case.stage is None:
        return
    yield from _zenflow_intervals(case)
    if case.stage == 0:
        return
    if case.stage < 3 and case.offload_device == "none":
        yield Problem(ZENFLOW, "ZenFlow needs an offloaded optimizer", f"{OPTIMIZER}.device=cpu")
    overlap = case.get("zero_optimization.overlap_comm")
    overlaps = case.stage == 3 if overlap is None else overlap
    if case.get(f"{ZENFLOW}.offload") and not overlaps:
        yield Problem(
            f"{ZENFLOW}.offload",
            f"{ZENFLOW}.offload needs overlap_comm",
            "zero_optimization.overlap_comm=true",
        )


@rule(
    "TC294",
    file="runtime/zenflow",
    meets=Enforcement.later,
    fix="Leave zenflow out at stage 0.",
)
def zenflow_has_its_stage(case: Case) -> Iterator[Problem]:
    """ZenFlow is for stages 1 to 3: at stage 0 it does nothing, or fails at a step."""
    if _has_zenflow(case) and case.stage == 0:
        yield Problem(ZENFLOW, "zenflow does nothing at ZeRO stage 0, or fails", "leave it out")


@rule(
    "TC247",
    file="runtime/zenflow/engine_stage3.py",
    meets=Enforcement.later,
    fix="On the CPU use stage 1 or 2, or leave zenflow out.",
)
def zenflow_is_for_gpus_at_stage_3(case: Case) -> Iterator[Problem]:
    """At stage 3 ZenFlow makes its tensors on a CUDA device, whatever the device is."""
    if _has_zenflow(case) and case.stage == 3 and case.on_cpu:
        yield Problem(
            ZENFLOW,
            "at ZeRO stage 3 zenflow is for CUDA, and the device is a CPU",
            "zero_optimization.stage=2, or leave it out",
        )


@rule(
    "TC248",
    file="runtime/zenflow/zenflow_stage_1_and_2.py",
    fix="Keep only what torch's AdamW takes.",
)
def zenflow_takes_the_parameters(case: Case) -> Iterator[Problem]:
    """ZenFlow hands optimizer.params on to torch's AdamW, which takes less than DeepSpeed's."""
    if not _has_zenflow(case) or case.stage not in (1, 2):
        return
    for name in case.params("optimizer"):
        if name not in case.schema.torch_optimizers["AdamW"]:
            yield Problem(
                f"optimizer.params.{name}", f"ZenFlow's AdamW takes no {name}", "leave it out"
            )


@rule(
    "TC249",
    file="runtime/zero/stage_1_and_2.py",
    meets=Enforcement.silent,
    fix="Leave zenflow out, or train with trainctl's own trainer, which puts it right.",
)
def zenflow_keeps_the_weights(case: Case) -> Iterator[Problem]:
    """ZenFlow at stages 1 and 2 takes transposed weights for the weights, from the first step on.

    Its flat buffer holds every matrix transposed, and `_update_model_bit16_weights` cuts the
    model's weights out of it as if it did not.
    """
    if _has_zenflow(case) and case.stage in (1, 2) and not case.around.trainctl_trainer:
        yield Problem(
            ZENFLOW,
            f"zenflow at ZeRO stage {case.stage} scrambles the weights of every matrix "
            "(DeepSpeed 0.19.8)",
            "leave it out",
        )


def _has_zenflow(case: Case) -> bool:
    return case.has(ZENFLOW) and case.get(ZENFLOW) is not None


def _zenflow_intervals(case: Case) -> Iterator[Problem]:
    strategy = case.get(f"{ZENFLOW}.select_strategy")
    select, update = (case.get(f"{ZENFLOW}.{name}_interval") for name in ("select", "update"))
    key = f"{ZENFLOW}.select_interval"
    if strategy == "auto" and is_number(select):
        yield Problem(
            key,
            f'{key}={select} with select_strategy="auto", which decides it',
            f'{ZENFLOW}.select_strategy="step"',
        )
    elif strategy in ("step", "epoch") and not is_number(select):
        yield Problem(
            key,
            f"{key}={shown(select)}, and select_strategy={strategy} needs a number",
            "such as 4",
        )
    elif strategy == "step" and is_number(update) and select != 0 and select < update:
        yield Problem(
            key,
            f"{key}={select} is smaller than update_interval={update}",
            f"{key}={update} or more",
        )


def _largest_parameter(model: ModelConfig) -> int:
    """Return the elements of the largest matrix: the embedding, or a block's feed-forward."""
    return max(model.vocab_size, model.intermediate_size) * model.hidden_size
