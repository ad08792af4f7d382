"""Rules about number formats."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

from trainctl.rules.deepspeed.case import Case, is_number, json_text
from trainctl.rules.rule import LEFT_OUT, WARNING, Problem, rule

STAGE = "zero_optimization.stage"
LARGEST_POWER = 127
"""Exponent of the largest power of two in fp32."""

SHORT = {"float16": "fp16", "half": "fp16", "bfloat16": "bf16", "float32": "fp32", "float": "fp32"}
"""DeepSpeed's short name of a number format, by torch's name."""


@rule(
    "TC230",
    "fp16.enabled",
    refused="runtime/config.py",
    example={"fp16": {"enabled": True}, "bf16": {"enabled": True}},
)
def one_format_of_16_bits(case: Case) -> Iterator[Problem]:
    """fp16 and bf16 are not both enabled.

    Fix: Enable one of fp16 and bf16.
    """
    if case.get("fp16.enabled") and case.get("bf16.enabled"):
        yield Problem(
            "fp16.enabled and bf16.enabled are both true",
            "fp16.enabled=false: bf16 needs no loss scale",
        )


@rule(
    "TC231",
    "fp16.enabled",
    refused="runtime/engine.py",
    example={"fp16": {"enabled": True}, "bf16": LEFT_OUT},
)
def device_supports_the_format(case: Case) -> Iterator[Problem]:
    """The device computes in the format of the weights.

    Fix: Train in a format that the device computes in.
    """
    if case.get("fp16.enabled") and case.on_cpu:
        yield Problem(
            "fp16.enabled: DeepSpeed does not train in fp16 on the CPU",
            "bf16.enabled=true, or neither for fp32",
        )


@rule(
    "TC432",
    "zero_optimization.stage",
    silent="runtime/engine.py, runtime/fp16/fused_optimizer.py",
    example={"zero_optimization.stage": 0, "fp16": {"enabled": True}, "bf16": LEFT_OUT},
)
def the_loss_is_scaled_where_the_gradient_is_unscaled(case: Case) -> Iterator[Problem]:
    """Training in fp16 uses ZeRO stage 1 or higher.

    Without ZeRO, DeepSpeed divides the gradients by a loss scale that it has not multiplied the
    loss by: `engine.backward` scales for a ZeROOptimizer only, which
    runtime/fp16/fused_optimizer.py is not. Steps are too small by that factor, without a message.

    Fix: Use ZeRO stage 1, or bf16, which needs no loss scale.
    """
    has_scale = case.get("fp16.loss_scale") != 1 or case.around.trainctl_trainer
    if case.weights == "fp16" and case.stage == 0 and has_scale:
        yield Problem(
            f"{case.setting(STAGE)} with fp16 weights: DeepSpeed divides the gradients by a loss "
            "scale that it never multiplied the loss with",
            case.names.fix(STAGE, 1),
        )


@rule("TC228", "fp16.auto_cast", later="runtime/engine.py", example={"fp16": {"auto_cast": True}})
def inputs_are_cast_to_the_weights_format(case: Case) -> Iterator[Problem]:
    """fp16.auto_cast is used with fp16 weights.

    It casts the inputs even where fp16 is not enabled.

    Fix: Leave fp16.auto_cast out, or set fp16.enabled.
    """
    if case.get("fp16.auto_cast") and case.get("fp16.enabled") is False:
        yield Problem(
            f"fp16.auto_cast casts the inputs to fp16, and the weights are {case.weights}",
            "fp16.auto_cast=false",
        )


@rule(
    "TC229",
    "fp16.initial_scale_power",
    later="runtime/precision_config.py",
    example={"fp16": {"initial_scale_power": 20000}},
)
def the_first_loss_scale_is_a_number(case: Case) -> Iterator[Problem]:
    """fp16.initial_scale_power is a power of two that fp32 can hold.

    Fix: Write a power that fp32 can hold, such as 16.
    """
    power = case.get("fp16.initial_scale_power")
    if is_number(power) and power > LARGEST_POWER:
        yield Problem(
            f"fp16.initial_scale_power={json_text(power)}: fp32 ends at 2**{LARGEST_POWER}",
            "fp16.initial_scale_power=16",
        )


@rule(
    "TC232",
    "bf16.*",
    "fp16.*",
    refused="runtime/config.py",
    example={
        "zero_optimization.stage": 0,
        "bf16": {"enabled": True, "bf16_master_weights_and_grads": True},
    },
)
def low_precision_states_need_zero(case: Case) -> Iterator[Problem]:
    """Master weights or optimizer states below fp32 use ZeRO.

    Fix: Use ZeRO, or keep master weights and optimizer states in fp32.
    """
    if case.stage != 0:
        return
    for name in (*MASTERS.values(), STATES):
        if case.get(name):
            yield Problem(
                f"{name} needs ZeRO, and the stage is 0", "zero_optimization.stage=1", key=name
            )


@rule(
    "TC233",
    "bf16.bf16_optimizer_states",
    refused="runtime/config.py",
    example={
        "zero_optimization.stage": 2,
        "bf16": {"enabled": True, "bf16_optimizer_states": True},
    },
)
def low_precision_states_need_masters(case: Case) -> Iterator[Problem]:
    """bf16 optimizer states have bf16 master weights.

    Fix: Enable bf16_master_weights_and_grads too.
    """
    if case.get(STATES) and not case.get(MASTERS["bf16"]):
        yield Problem(f"{STATES} needs {MASTERS['bf16']}", f"{MASTERS['bf16']}=true")


@rule(
    "TC234",
    "bf16.*",
    "fp16.*",
    refused="runtime/base_optimizer.py",
    example={
        "zero_optimization.stage": 2,
        "bf16": {"enabled": True, "bf16_master_weights_and_grads": True},
    },
)
def low_precision_masters_are_updated_by_cpu_adam(case: Case) -> Iterator[Problem]:
    """Low-precision master weights are updated by DeepSpeed's CPU Adam, or all states are bf16.

    Fix: Offload the optimizer with DeepSpeed's CPU Adam, or keep bf16 states beside bf16 masters.
    """
    if not case.stage or case.is_bf16_optimizer:
        return
    by_cpu_adam = case.is_offloaded and _is_cpu_adam(case)
    for format_, name in MASTERS.items():
        if not case.get(name) or by_cpu_adam:
            continue
        on_device = format_ == "bf16" and case.get(STATES) and not case.is_offloaded
        if not on_device:
            hint = f"{STATES}=true, or " if format_ == "bf16" and not case.is_offloaded else ""
            yield Problem(
                f"{name} needs the optimizer offloaded to DeepSpeed's CPU Adam",
                f"{hint}zero_optimization.offload_optimizer.device=cpu with DeepSpeed's AdamW",
                key=name,
            )


@rule(
    "TC235",
    "fp16.*",
    refused="runtime/base_optimizer.py",
    example={
        "zero_optimization.stage": 2,
        "bf16": {
            "enabled": True,
            "bf16_master_weights_and_grads": True,
            "bf16_optimizer_states": True,
        },
        "fp16": {"fp16_master_weights_and_grads": True},
    },
)
def one_kind_of_masters(case: Case) -> Iterator[Problem]:
    """Master weights are in fp16 or in bf16, not both.

    Fix: Keep one of the two.
    """
    both = all(case.get(name) for name in MASTERS.values())
    if case.stage and both and not case.is_bf16_optimizer:
        fp16, bf16 = MASTERS.values()
        yield Problem(f"{fp16} and {bf16} are both true", f"{fp16}=false", key=fp16)


@rule(
    "TC236",
    "data_types.param_dtype",
    refused="runtime/engine.py",
    example={"data_types.param_dtype": "fp16"},
)
def the_weights_have_one_format(case: Case) -> Iterator[Problem]:
    """data_types.param_dtype agrees with fp16 and bf16.

    Fix: Leave data_types.param_dtype out.
    """
    asked = _number_format(case, "data_types.param_dtype")
    if asked is not None and case.weights is not None and asked != case.weights:
        yield Problem(
            f"data_types.param_dtype={asked}, and the weights are {case.weights}",
            "leave it out, and enable bf16 or fp16",
        )


@rule(
    "TC237",
    "data_types.grad_accum_dtype",
    refused="runtime/engine.py",
    example={
        "zero_optimization.stage": 0,
        "bf16": {"enabled": True},
        "data_types.grad_accum_dtype": "fp32",
    },
)
def without_zero_gradients_have_the_weights_format(case: Case) -> Iterator[Problem]:
    """Without ZeRO, gradients accumulate in the weights' format.

    Fix: Accumulate in the weights' format, or use ZeRO.
    """
    key, stage, fix = "data_types.grad_accum_dtype", "zero_optimization.stage", case.names.fix
    asked = _number_format(case, key)
    if case.stage == 0 and asked is not None and case.weights not in (None, asked):
        yield Problem(
            f"{case.setting(key)} with {case.weights} weights needs ZeRO; "
            f"{case.names.key(stage)} is 0",
            f"{fix(stage, 1)}, or {fix(key, case.weights)}",
        )


@rule(
    "TC238",
    "data_types.grad_accum_dtype",
    severity=WARNING,
    silent="runtime/zero/stage_1_and_2.py",
    example={
        "zero_optimization.stage": 2,
        "bf16": {"enabled": True},
        "data_types.grad_accum_dtype": "fp16",
    },
)
def gradients_accumulate_in_a_wide_format(case: Case) -> Iterator[Problem]:
    """Gradients accumulate in the weights' format or in fp32.

    Fix: Accumulate in the weights' format or in fp32.
    """
    asked = _number_format(case, "data_types.grad_accum_dtype")
    if case.stage and asked not in (None, "fp32", case.weights) and case.weights is not None:
        yield Problem(
            f"data_types.grad_accum_dtype={asked} while the weights are {case.weights}: sums lose "
            "what the gradients had",
            "data_types.grad_accum_dtype=fp32",
        )


@rule(
    "TC239",
    "zero_optimization.zero_quantized_weights",
    refused="runtime/torch_autocast.py",
    example={"torch_autocast": {"enabled": True}, "zero_optimization.zero_quantized_weights": True},
)
def autocast_without_quantized_weights(case: Case) -> Iterator[Problem]:
    """torch_autocast is not combined with quantized weights.

    Fix: Choose one of the two.
    """
    quantized, autocast = "zero_optimization.zero_quantized_weights", "torch_autocast.enabled"
    if case.get(autocast) and case.get(quantized):
        key = case.names.key
        yield Problem(
            f"{key(quantized)} with {key(autocast)} is refused by DeepSpeed",
            case.names.fix(quantized, False),
        )


@rule(
    "TC240",
    "torch_autocast.enabled",
    "torch_autocast.dtype",
    severity=WARNING,
    silent="runtime/engine.py",
    example={"bf16": {"enabled": True}, "torch_autocast": {"enabled": True, "dtype": "bf16"}},
)
def autocast_has_something_to_lower(case: Case) -> Iterator[Problem]:
    """torch_autocast has fp32 weights to lower.

    Fix: Use torch_autocast with fp32 weights, or bf16 without it.
    """
    if not case.get("torch_autocast.enabled"):
        return
    if case.weights in ("bf16", "fp16"):
        yield Problem(
            f"torch_autocast beside {case.weights}.enabled: the weights are {case.weights} already",
            f"torch_autocast.enabled=false, or {case.weights}.enabled=false",
        )
    if _number_format(case, "torch_autocast.dtype") == "fp32":
        yield Problem(
            "torch_autocast to fp32 does nothing",
            "torch_autocast.dtype=bf16",
            key="torch_autocast.dtype",
        )


@rule(
    "TC241",
    "fp16.*",
    refused="runtime/precision_config.py",
    example={"fp16": {"enabled": True, "loss_scale_window": 0}, "bf16": LEFT_OUT},
)
def an_adaptive_loss_scale_can_move(case: Case) -> Iterator[Problem]:
    """An adaptive loss scale has a window and a minimum above 0.

    Fix: Give positive numbers.
    """
    if not case.get("fp16.enabled") or case.get("fp16.loss_scale") != 0:
        return
    for name in ("fp16.loss_scale_window", "fp16.min_loss_scale"):
        value = case.get(name)
        if is_number(value) and value <= 0:
            yield Problem(
                f"{name}={value} with an adaptive loss scale", f"{name}=1 or more", key=name
            )


@rule(
    "TC242",
    "fp16.*",
    severity=WARNING,
    silent="runtime/engine.py",
    example={"fp16": {"initial_scale_power": 8}},
)
def a_loss_scale_has_an_effect(case: Case) -> Iterator[Problem]:
    """Loss scaling is set only where a loss is scaled.

    Fix: Leave them out, or set fp16.enabled.
    """
    if case.get("fp16.enabled") is not False:
        return
    others = ("enabled", "auto_cast")
    names = [f"fp16.{name}" for name in case.schema.inside(("fp16",)) if name not in others]
    for name in names:
        if case.given(name) and case.get(name) != case.schema.keys[name].default:
            yield Problem(f"{name} has no effect: fp16 is not enabled", "leave it out", key=name)


@rule(
    "TC243",
    "torch_autocast.lower_precision_safe_modules",
    "data_types.keep_in_fp32_modules",
    refused="runtime/config.py, runtime/torch_autocast.py",
    example={"data_types.keep_in_fp32_modules": "norm"},
)
def lists_of_names_are_lists(case: Case) -> Iterator[Problem]:
    """keep_in_fp32_modules and lower_precision_safe_modules are lists of names.

    Fix: Write "auto" or a list of patterns; of modules, their dotted names.
    """
    kept = case.get("data_types.keep_in_fp32_modules")
    if kept is not None and kept != "auto" and not _is_list_of_names(kept):
        yield Problem(
            f'data_types.keep_in_fp32_modules={json_text(kept)} is not a list of names, nor "auto"',
            f"[{json_text(kept)}]" if isinstance(kept, str) else "",
            key="data_types.keep_in_fp32_modules",
        )
    name = "torch_autocast.lower_precision_safe_modules"
    lowered = case.get(name)
    if isinstance(lowered, list):
        for module in lowered:
            if not isinstance(module, str) or "." not in module:
                yield Problem(
                    f"{name}: {json_text(module)} is not the dotted name of a class",
                    "such as torch.nn.Linear",
                )
            elif find_spec(module.partition(".")[0]) is None:
                yield Problem(
                    f"{name}: {module} is of a package that is not installed here",
                    "such as torch.nn.Linear",
                )


@rule(
    "TC244",
    "bf16.check_grad_overflow",
    severity=WARNING,
    silent="runtime/precision_config.py",
    example={"bf16": {"enabled": True, "check_grad_overflow": False}},
)
def gradients_are_checked(case: Case) -> Iterator[Problem]:
    """Gradients that are not finite are caught before the update.

    Fix: Leave bf16.check_grad_overflow out.
    """
    if case.get("bf16.enabled") and case.get("bf16.check_grad_overflow") is False:
        yield Problem(
            "bf16.check_grad_overflow=false: a NaN in one gradient makes all weights NaN",
            "leave it out",
        )


@rule(
    "TC245",
    "bf16.*",
    "fp16.*",
    severity=WARNING,
    silent="runtime/bf16_optimizer.py",
    example={
        "zero_optimization.stage": 1,
        "zero_optimization.offload_optimizer": LEFT_OUT,
        "bf16": {"enabled": True, "bf16_master_weights_and_grads": True},
        "data_types.grad_accum_dtype": "fp32",
    },
)
def low_precision_states_have_an_effect(case: Case) -> Iterator[Problem]:
    """Low-precision master weights and states have an effect.

    With bf16 weights and fp32 accumulation at stage 1, master weights and states are fp32, whatever
    is set.

    Fix: Leave them out, or accumulate gradients in bf16.
    """
    for name in (*MASTERS.values(), STATES) if case.is_bf16_optimizer else ():
        if case.get(name):
            yield Problem(
                f"{name} has no effect at ZeRO stage 1 with data_types.grad_accum_dtype=fp32",
                "data_types.grad_accum_dtype=bf16, or leave it out",
                key=name,
            )


MASTERS = {
    "fp16": "fp16.fp16_master_weights_and_grads",
    "bf16": "bf16.bf16_master_weights_and_grads",
}
STATES = "bf16.bf16_optimizer_states"


def _number_format(case: Case, name: str) -> str | None:
    """Return a number format by DeepSpeed's short name; None if the key is missing or not legal."""
    value = case.get(name)
    if not isinstance(value, str) or value not in case.schema.keys[name].choices:
        return None
    short = value.removeprefix("torch.")
    return SHORT.get(short, short)


def _is_cpu_adam(case: Case) -> bool:
    torch_adam = case.params("optimizer").get("torch_adam", False)
    return case.optimizer in ("adam", "adamw") and not torch_adam


def _is_list_of_names(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)
