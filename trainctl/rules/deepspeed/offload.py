"""Rules about states offloaded from the device."""

from __future__ import annotations

from collections.abc import Iterator

from trainctl.config.schema import Accelerator, ModelConfig
from trainctl.rules.deepspeed.case import Case, JsonContext, is_number, json_text
from trainctl.rules.rule import LEFT_OUT, Problem, rule

STAGE = "zero_optimization.stage"
OPTIMIZER = "zero_optimization.offload_optimizer"
PARAMETERS = "zero_optimization.offload_param"
ZENFLOW = "zero_optimization.zenflow"
ADAM_TENSORS = 4
"""Tensors that an Adam step reads and writes per parameter: weight, gradient and two moments."""

_EVERY_STEP = {"select_strategy": "step", "select_interval": 0, "update_interval": 1}
"""ZenFlow's settings of an update at each step."""


@rule(
    "TC286",
    "zero_optimization.offload_optimizer.device",
    "zero_optimization.offload_param.device",
    silent="runtime/engine.py",
    example={
        "zero_optimization.stage": 2,
        "zero_optimization.offload_param": {"device": "cpu", "pin_memory": False},
    },
)
def offload_has_its_stage(case: Case) -> Iterator[Problem]:
    """Parameters are offloaded at stage 3 only, optimizer states at stages 1 to 3.

    Fix: Use the stage that offloads it, or leave the block out.
    """
    if case.stage is None:
        return
    fix, stage, key = case.names.fix, case.stage, f"{PARAMETERS}.device"
    if case.parameter_device != "none" and stage < 3:
        yield Problem(
            f"{case.setting(key)} needs ZeRO stage 3, and it is {stage}, where DeepSpeed ignores "
            "it",
            f"{fix(STAGE, 3)}, or {fix(key, 'none')}",
            key,
        )
    key = f"{OPTIMIZER}.device"
    if case.is_offloaded and stage == 0:
        yield Problem(
            f"{case.setting(key)} needs ZeRO stage 1 or more, and it is 0, where DeepSpeed ignores "
            "it",
            f"{fix(STAGE, 1)}, or {fix(key, 'none')}",
        )
    if case.offload_device == "nvme" and stage in (1, 2):
        yield Problem(
            f"{case.setting(key)} needs ZeRO stage 3; at stage {stage} DeepSpeed keeps the states "
            "in host memory instead",
            f"{fix(STAGE, 3)}, or {fix(key, 'cpu')}",
        )


@rule(
    "TC287",
    "zero_optimization.offload_optimizer.ratio",
    refused="runtime/zero/config.py, runtime/zero/stage3.py",
    example={
        "zero_optimization.stage": 2,
        "zero_optimization.offload_optimizer": {"device": "cpu", "pin_memory": False, "ratio": 0.5},
    },
)
def a_part_is_offloaded_at_stage_3(case: Case) -> Iterator[Problem]:
    """Partial offload is used at stage 3, with DeepSpeed's CPU Adam.

    Fix: Leave ratio out; or use stage 3 and DeepSpeed's CPU Adam.
    """
    key = f"{OPTIMIZER}.ratio"
    ratio = case.get(key)
    if not is_number(ratio) or ratio >= 1 or case.stage is None:
        return
    torch_adam = case.params("optimizer").get("torch_adam")
    if case.stage < 3:
        yield Problem(f"{key}={ratio:g} needs ZeRO stage 3, and it is {case.stage}", "ratio=1")
    elif case.is_offloaded and (case.optimizer not in ("adam", "adamw", None) or torch_adam):
        yield Problem(
            f"{key}={ratio:g} needs DeepSpeed's CPU Adam",
            "ratio=1, or optimizer.type=AdamW with torch_adam=false",
        )


@rule(
    "TC288",
    "*.nvme_path",
    later="runtime/zero/partition_parameters.py, runtime/zero/stage3.py",
    example={"zero_optimization.stage": 3, "zero_optimization.offload_param": {"device": "nvme"}},
)
def nvme_has_a_path(case: Case) -> Iterator[Problem]:
    """Offload to NVMe has a folder.

    Offloaded states are read and written in every step. On a network drive, or without a folder,
    that fails after the model has been loaded.

    Fix: Name a folder on a local drive of every node.
    """
    for block, device in ((OPTIMIZER, case.offload_device), (PARAMETERS, case.parameter_device)):
        key = f"{block}.nvme_path"
        if device == "nvme" and key not in case.values:
            yield Problem(
                f"offload to nvme needs {case.names.key(key)}, a folder on a local drive",
                case.names.fix(key, "/local_nvme"),
                key=key,
            )


@rule(
    "TC289",
    "zero_optimization.offload_optimizer.buffer_count",
    "zero_optimization.offload_param.buffer_size",
    later="runtime/swap_tensor",
    example={
        "zero_optimization.stage": 3,
        "zero_optimization.offload_optimizer": {
            "device": "nvme",
            "nvme_path": "/local_nvme",
            "buffer_count": 3,
        },
    },
    around=JsonContext(world_size=8, accelerator=Accelerator.cuda),
    situation="Read on 8 GPUs",
)
def nvme_buffers_hold_a_parameter(case: Case) -> Iterator[Problem]:
    """Buffers for NVMe hold the largest parameter, and the number that Adam needs.

    Fix: Make the buffers as large as the largest parameter, and as many as a step needs.
    """
    if case.stage != 3:
        return
    count = case.get(f"{OPTIMIZER}.buffer_count")
    is_adam = case.optimizer in ("adam", "adamw")
    if case.offload_device == "nvme" and is_adam and is_number(count) and count < ADAM_TENSORS:
        yield Problem(
            f"{OPTIMIZER}.buffer_count={count}: Adam needs {ADAM_TENSORS} for a parameter",
            f"{OPTIMIZER}.buffer_count={ADAM_TENSORS}",
        )
    size, ranks = case.get(f"{PARAMETERS}.buffer_size"), case.around.world_size
    if case.parameter_device != "nvme" or case.around.model is None or not is_number(size):
        return
    largest = -(-_largest_parameter(case.around.model) // (ranks or 1))
    if ranks and size < largest:
        yield Problem(
            f"{PARAMETERS}.buffer_size={size} elements; a rank's part of the largest parameter "
            f"has {largest}",
            f"{PARAMETERS}.buffer_size={largest} or more",
            key=f"{PARAMETERS}.buffer_size",
        )


@rule(
    "TC290",
    "aio.use_gds",
    refused="runtime/swap_tensor/aio_config.py",
    example={"aio.use_gds": True},
)
def gds_is_for_cuda(case: Case) -> Iterator[Problem]:
    """GPUDirect Storage is used on CUDA.

    Fix: Set aio.use_gds to false.
    """
    if case.get("aio.use_gds") and case.is_not_cuda:
        yield Problem("aio.use_gds is for CUDA, and the device is not", "false")


@rule(
    "TC291",
    "zero_optimization.offload_optimizer.super_offload",
    refused="runtime/superoffload/superoffload_stage3.py",
    example={
        "zero_optimization.stage": 3,
        "zero_optimization.offload_optimizer": {
            "device": "cpu",
            "pin_memory": False,
            "super_offload": True,
        },
    },
)
def super_offload_is_for_cuda(case: Case) -> Iterator[Problem]:
    """SuperOffload runs on CUDA.

    Fix: Use stage 3 on CUDA, or leave super_offload out.
    """
    key = f"{OPTIMIZER}.super_offload"
    if case.get(key) and case.stage == 3 and case.is_not_cuda:
        yield Problem(f"{key} is for CUDA, and the device is not", f"{key}=false")


@rule(
    "TC292",
    "zero_optimization.offload_optimizer.super_offload",
    silent="runtime/engine.py",
    example={
        "zero_optimization.stage": 2,
        "zero_optimization.offload_optimizer": {
            "device": "cpu",
            "pin_memory": False,
            "super_offload": True,
        },
    },
)
def super_offload_has_its_stage(case: Case) -> Iterator[Problem]:
    """SuperOffload is used with the optimizer offloaded at stage 3.

    Elsewhere DeepSpeed ignores it.

    Fix: Use stage 3 with offload_optimizer.device=cpu, or leave super_offload out.
    """
    key = f"{OPTIMIZER}.super_offload"
    if case.get(key) and case.stage in (0, 1, 2):
        yield Problem(
            f"{key} is ignored at ZeRO stage {case.stage}",
            "zero_optimization.stage=3, or leave it out",
        )


@rule(
    "TC293",
    "zero_optimization.zenflow",
    "zero_optimization.zenflow.offload",
    "zero_optimization.zenflow.select_interval",
    refused="runtime/zenflow",
    example={
        "zero_optimization.stage": 2,
        "zero_optimization.offload_optimizer": LEFT_OUT,
        "zero_optimization.zenflow": {},
    },
)
def zenflow_has_what_it_needs(case: Case) -> Iterator[Problem]:
    """ZenFlow has an offloaded optimizer, and intervals that its strategy uses.

    Fix: Offload the optimizer to cpu, and give intervals as the strategy wants them.
    """
    if not _has_zenflow(case) or case.stage is None:
        return
    yield from _zenflow_intervals(case)
    if case.stage == 0:
        return
    if case.stage < 3 and case.offload_device == "none":
        yield Problem("ZenFlow needs an offloaded optimizer", f"{OPTIMIZER}.device=cpu")
    overlap = case.get("zero_optimization.overlap_comm")
    overlaps = case.stage == 3 if overlap is None else overlap
    if case.get(f"{ZENFLOW}.offload") and not overlaps:
        yield Problem(
            f"{ZENFLOW}.offload needs overlap_comm",
            "zero_optimization.overlap_comm=true",
            key=f"{ZENFLOW}.offload",
        )


@rule(
    "TC294",
    "zero_optimization.zenflow",
    later="runtime/zenflow",
    example={"zero_optimization.stage": 0, "zero_optimization.zenflow": {}},
)
def zenflow_has_its_stage(case: Case) -> Iterator[Problem]:
    """ZenFlow is used at stages 1 to 3.

    At stage 0 it does nothing, or fails in a step.

    Fix: Leave zenflow out at stage 0.
    """
    if _has_zenflow(case) and case.stage == 0:
        yield Problem("zenflow does nothing at ZeRO stage 0, or fails", "leave it out")


@rule(
    "TC247",
    "zero_optimization.zenflow",
    later="runtime/zenflow/engine_stage3.py",
    example={
        "zero_optimization.stage": 3,
        "zero_optimization.offload_optimizer": {"device": "cpu", "pin_memory": False},
        "zero_optimization.zenflow": _EVERY_STEP,
    },
)
def zenflow_is_for_gpus_at_stage_3(case: Case) -> Iterator[Problem]:
    """ZenFlow at stage 3 runs on CUDA.

    It creates its tensors on a CUDA device, whatever the device is.

    Fix: On the CPU use stage 1 or 2, or leave zenflow out.
    """
    if _has_zenflow(case) and case.stage == 3 and case.on_cpu:
        yield Problem(
            "at ZeRO stage 3 zenflow is for CUDA, and the device is a CPU",
            "zero_optimization.stage=2, or leave it out",
        )


@rule(
    "TC248",
    "optimizer.params.*",
    refused="runtime/zenflow/zenflow_stage_1_and_2.py",
    example={
        "zero_optimization.stage": 1,
        "zero_optimization.offload_optimizer": {"device": "cpu", "pin_memory": False},
        "zero_optimization.zenflow": {"topk_ratio": 0.2},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.001, "torch_adam": True}},
    },
)
def zenflow_takes_the_parameters(case: Case) -> Iterator[Problem]:
    """Under ZenFlow, optimizer.params holds only parameters of torch's AdamW.

    ZenFlow passes optimizer.params to torch's AdamW, which takes fewer than DeepSpeed's.

    Fix: Keep only what torch's AdamW takes.
    """
    if not _has_zenflow(case) or case.stage not in (1, 2):
        return
    for name in case.params("optimizer"):
        if name not in case.schema.torch_optimizers["AdamW"]:
            yield Problem(
                f"ZenFlow's AdamW takes no {name}", "leave it out", key=f"optimizer.params.{name}"
            )


@rule(
    "TC249",
    "zero_optimization.zenflow",
    silent="runtime/zero/stage_1_and_2.py",
    example={
        "zero_optimization.stage": 2,
        "zero_optimization.offload_optimizer": {"device": "cpu", "pin_memory": False},
        "zero_optimization.zenflow": _EVERY_STEP,
    },
)
def zenflow_keeps_the_weights(case: Case) -> Iterator[Problem]:
    """ZenFlow is not used at stages 1 and 2.

    ZenFlow's flat buffer holds every matrix transposed, and `_update_model_bit16_weights` copies
    the model's weights out of it as if it did not: they are scrambled from the first step on.

    Fix: Leave zenflow out, or train with trainctl's own trainer, which puts it right.
    """
    if _has_zenflow(case) and case.stage in (1, 2) and not case.around.trainctl_trainer:
        yield Problem(
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
            f'{key}={select} with select_strategy="auto", which decides it',
            f'{ZENFLOW}.select_strategy="step"',
            key=key,
        )
    elif strategy in ("step", "epoch") and not is_number(select):
        yield Problem(
            f"{key}={json_text(select)}, and select_strategy={strategy} needs a number",
            "such as 4",
            key=key,
        )
    elif strategy == "step" and is_number(update) and select != 0 and select < update:
        yield Problem(
            f"{key}={select} is smaller than update_interval={update}",
            f"{key}={update} or more",
            key=key,
        )


def _largest_parameter(model: ModelConfig) -> int:
    """Return the elements of the largest matrix: the embedding, or a block's feed-forward."""
    return max(model.vocab_size, model.intermediate_size) * model.hidden_size
