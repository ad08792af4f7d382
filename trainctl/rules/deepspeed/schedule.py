"""Rules about the schedule of the learning rate."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from trainctl.config.suggest import nearest
from trainctl.rules.deepspeed.case import AUTO, Case
from trainctl.rules.deepspeed.values import is_number, is_whole, shown
from trainctl.rules.deepspeed_schema import Arguments
from trainctl.rules.rule import LEFT_OUT, WARNING, Problem, rule

TYPE = "scheduler.type"
WHOLE = ("warmup_num_steps", "lr_range_test_step_size")
POSITIVE = (*WHOLE, "total_num_steps", "cycle_first_step_size")
TEXTS = ("warmup_type", "mode", "anneal_strategy", "scale_mode", "threshold_mode")
FUNCTIONS = ("lr_lambda", "scale_fn", "schedulers")
"""Parameters that only code can pass, not JSON."""


@rule(
    "TC265",
    "scheduler.type",
    refused="runtime/engine.py",
    example={"scheduler": {"type": "WarmupLr", "params": {}}},
)
def the_schedule_exists(case: Case) -> Iterator[Problem]:
    """scheduler.type is a schedule of DeepSpeed or of torch.optim.lr_scheduler.

    Fix: Name a schedule of DeepSpeed's or of torch.
    """
    name = case.get(TYPE)
    known = [*case.schema.schedulers, *case.schema.torch_schedulers]
    if isinstance(name, str) and name not in known:
        close = nearest(name, known, count=1)
        yield Problem(
            f"there is no schedule {shown(name)}",
            f"did you mean {close[0]}?" if close else f"one of {', '.join(case.schema.schedulers)}",
        )


@rule(
    "TC266",
    "scheduler.params",
    "scheduler.params.*",
    refused="runtime/lr_schedules.py",
    example={"scheduler": {"type": "WarmupLR"}},
)
def the_schedule_takes_its_parameters(case: Case) -> Iterator[Problem]:
    """scheduler.params holds only parameters of the schedule, and all required ones.

    Fix: Give what the schedule takes, and all it needs.
    """
    name, takes = case.get(TYPE), _arguments(case)
    if takes is None:
        return
    block = case.json["scheduler"]
    if not isinstance(block.get("params"), Mapping):
        yield Problem(f"{name} has no params", '"params": {}, if none is needed')
        return
    given = block["params"]
    for param in given:
        if param not in takes.names:
            close = nearest(param, takes.names, count=1)
            hint = f"did you mean {close[0]}?" if close else f"it takes {', '.join(takes.names)}"
            yield Problem(f"{name} takes no {param}", hint, key=f"scheduler.params.{param}")
    for param in takes.required:
        if param not in given:
            hint = f"give scheduler.params.{param}"
            if param in FUNCTIONS:
                hint = "make the schedule in the script"
            yield Problem(f"{name} needs {param}", hint, key=f"scheduler.params.{param}")


@rule(
    "TC267",
    "scheduler.params.*",
    refused="runtime/lr_schedules.py",
    example={"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 0}}},
)
def the_schedule_can_use_its_numbers(case: Case) -> Iterator[Problem]:
    """Steps are positive whole numbers, and rates are numbers.

    Fix: Write positive whole numbers of steps.
    """
    if _arguments(case) is None:
        return
    for name, value in case.params("scheduler").items():
        key = f"scheduler.params.{name}"
        if value == AUTO or value is None:
            continue
        if name in FUNCTIONS:
            yield Problem(f"{name} is a function, which no JSON holds", "leave it out", key=key)
        elif name in WHOLE and not is_whole(value):
            yield Problem(
                f"{name}={shown(value)} is not a whole number", _without_quotes(value), key=key
            )
        elif name in POSITIVE and is_number(value) and value <= 0:
            yield Problem(f"{name}={shown(value)} is not above 0", "1 or more", key=key)
        elif isinstance(value, str) and name not in TEXTS:
            yield Problem(f"{name}={shown(value)} is not a number", _without_quotes(value), key=key)


@rule(
    "TC268",
    "scheduler.params.warmup_num_steps",
    severity=WARNING,
    silent="runtime/lr_schedules.py",
    example={
        "scheduler": {
            "type": "WarmupCosineLR",
            "params": {"total_num_steps": 10, "warmup_num_steps": 20},
        }
    },
)
def the_warmup_ends_in_the_run(case: Case) -> Iterator[Problem]:
    """The warmup is not longer than the schedule.

    Fix: Make the warmup shorter than the run.
    """
    params = case.params("scheduler")
    total, warmup = params.get("total_num_steps"), params.get("warmup_num_steps", 1000)
    if is_number(total) and is_number(warmup) and warmup > total:
        default = "" if "warmup_num_steps" in params else " (DeepSpeed's default)"
        yield Problem(
            f"warmup {warmup}{default} > total {total} optimizer steps: the learning rate never "
            "reaches its peak",
            f"scheduler.params.warmup_num_steps={max(1, int(total or 0) // 10)}",
        )


@rule(
    "TC269",
    "scheduler.type",
    refused="runtime/engine.py",
    example={
        "scheduler": {"type": "StepLR", "params": {"step_size": 3}},
        "zero_optimization.stage": 1,
    },
)
def torch_schedules_need_a_torch_optimizer(case: Case) -> Iterator[Problem]:
    """A schedule of torch is used with an optimizer of torch that DeepSpeed does not wrap.

    It refuses an optimizer that DeepSpeed has wrapped, as ZeRO and 16-bit formats do.

    Fix: Use a schedule of DeepSpeed's, or make torch's in the script.
    """
    name = case.get(TYPE)
    if name not in case.schema.torch_schedulers or case.stage is None or case.weights is None:
        return
    if case.stage > 0 or case.weights != "fp32":
        what = f"ZeRO stage {case.stage}" if case.stage else f"{case.weights} weights"
        yield Problem(
            f"{name} is torch's, and refuses the optimizer that DeepSpeed wraps for {what}",
            f"one of {', '.join(case.schema.schedulers)}",
        )


@rule(
    "TC270",
    "scheduler.params.warmup_max_lr",
    severity=WARNING,
    silent="runtime/lr_schedules.py",
    example={
        "optimizer.params.lr": 0.002,
        "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 10000}},
    },
)
def the_peak_is_the_optimizers(case: Case) -> Iterator[Problem]:
    """The warmup ends at the learning rate of the optimizer.

    Fix: Write scheduler.params.warmup_max_lr, the same as optimizer.params.lr.
    """
    name, params = case.get(TYPE), case.params("scheduler")
    lr = case.params("optimizer").get("lr")
    if name not in ("WarmupLR", "WarmupDecayLR") or not is_number(lr):
        return
    peak = params.get("warmup_max_lr", 1e-3 if name == "WarmupDecayLR" else lr)
    if is_number(peak) and peak != lr:
        default = "" if "warmup_max_lr" in params else ", DeepSpeed's default,"
        yield Problem(
            f"{name} goes up to {peak:g}{default} and optimizer.params.lr={lr:g} has no effect",
            f"scheduler.params.warmup_max_lr={lr:g}",
        )


@rule(
    "TC271",
    "scheduler.params.warmup_type",
    silent="runtime/lr_schedules.py",
    example={"scheduler": {"type": "WarmupLR", "params": {"warmup_type": "cosine"}}},
)
def the_warmup_has_a_known_shape(case: Case) -> Iterator[Problem]:
    """warmup_type is linear or log.

    Any other value is taken for log.

    Fix: Write linear or log.
    """
    shape = case.params("scheduler").get("warmup_type", "log")
    known = case.get(TYPE) in ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR")
    if known and shape not in ("log", "linear"):
        yield Problem(f"warmup_type={shown(shape)} is not known, and log is taken", "linear or log")


@rule(
    "TC272",
    "scheduler.type",
    severity=WARNING,
    silent="runtime/engine.py",
    example={"scheduler": {"type": "WarmupLR", "params": {}}, "optimizer": LEFT_OUT},
)
def a_schedule_has_its_optimizer(case: Case) -> Iterator[Problem]:
    """A schedule in the JSON has an optimizer in the JSON.

    Fix: Name an optimizer too, or make the schedule in the script.
    """
    has_optimizer = case.has("optimizer.type") or case.around.has_optimizer
    if case.given(TYPE) and not has_optimizer:
        yield Problem(
            "the JSON has a schedule and no optimizer: it schedules whatever the script passes, "
            "and nothing if that is nothing",
            "name the optimizer in the JSON too, or make the schedule in the script",
        )


def _arguments(case: Case) -> Arguments | None:
    name = case.get(TYPE)
    if not isinstance(name, str):
        return None
    return case.schema.schedulers.get(name) or case.schema.torch_schedulers.get(name)


def _without_quotes(value: Any) -> str:
    try:
        return f"write {float(value):g}, without quotes" if isinstance(value, str) else "1 or more"
    except ValueError:
        return "write a number"
