"""Rules about the schedule of the learning rate."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from trainctl.config.suggest import nearest
from trainctl.rules.deepspeed.case import AUTO, Case
from trainctl.rules.deepspeed.rule import Enforcement, Problem, rule
from trainctl.rules.deepspeed.values import is_number, is_whole, shown
from trainctl.rules.deepspeed_schema import Arguments

TYPE = "scheduler.type"
WHOLE = ("warmup_num_steps", "lr_range_test_step_size")
POSITIVE = (*WHOLE, "total_num_steps", "cycle_first_step_size")
TEXTS = ("warmup_type", "mode", "anneal_strategy", "scale_mode", "threshold_mode")
FUNCTIONS = ("lr_lambda", "scale_fn", "schedulers")
"""Parameters that only code can pass, not JSON."""


@rule("TC265", file="runtime/engine.py", fix="Name a schedule of DeepSpeed's or of torch.")
def the_schedule_exists(case: Case) -> Iterator[Problem]:
    """scheduler.type is a schedule of DeepSpeed's or of torch.optim.lr_scheduler."""
    name = case.get(TYPE)
    known = [*case.schema.schedulers, *case.schema.torch_schedulers]
    if isinstance(name, str) and name not in known:
        close = nearest(name, known, count=1)
        yield Problem(
            TYPE,
            f"there is no schedule {shown(name)}",
            f"did you mean {close[0]}?" if close else f"one of {', '.join(case.schema.schedulers)}",
        )


@rule(
    "TC266", file="runtime/lr_schedules.py", fix="Give what the schedule takes, and all it needs."
)
def the_schedule_takes_its_parameters(case: Case) -> Iterator[Problem]:
    """scheduler.params holds what the schedule takes, and all that it has no default for."""
    name, takes = case.get(TYPE), _arguments(case)
    if takes is None:
        return
    block = case.json["scheduler"]
    if not isinstance(block.get("params"), Mapping):
        yield Problem(
            "scheduler.params", f"{name} has no params", '"params": {}, if none is needed'
        )
        return
    given = block["params"]
    for param in given:
        if param not in takes.names:
            close = nearest(param, takes.names, count=1)
            hint = f"did you mean {close[0]}?" if close else f"it takes {', '.join(takes.names)}"
            yield Problem(f"scheduler.params.{param}", f"{name} takes no {param}", hint)
    for param in takes.required:
        if param not in given:
            hint = f"give scheduler.params.{param}"
            if param in FUNCTIONS:
                hint = "make the schedule in the script"
            yield Problem(f"scheduler.params.{param}", f"{name} needs {param}", hint)


@rule("TC267", file="runtime/lr_schedules.py", fix="Write positive whole numbers of steps.")
def the_schedule_can_use_its_numbers(case: Case) -> Iterator[Problem]:
    """Steps are positive whole numbers, and rates are numbers."""
    if _arguments(case) is None:
        return
    for name, value in case.params("scheduler").items():
        key = f"scheduler.params.{name}"
        if value == AUTO or value is None:
            continue
        if name in FUNCTIONS:
            yield Problem(key, f"{name} is a function, which no JSON holds", "leave it out")
        elif name in WHOLE and not is_whole(value):
            yield Problem(
                key, f"{name}={shown(value)} is not a whole number", _without_quotes(value)
            )
        elif name in POSITIVE and is_number(value) and value <= 0:
            yield Problem(key, f"{name}={shown(value)} is not above 0", "1 or more")
        elif isinstance(value, str) and name not in TEXTS:
            yield Problem(key, f"{name}={shown(value)} is not a number", _without_quotes(value))


@rule(
    "TC268",
    file="runtime/lr_schedules.py",
    meets=Enforcement.silent,
    fix="Make the warmup shorter than the run.",
    warns=True,
)
def the_warmup_ends_in_the_run(case: Case) -> Iterator[Problem]:
    """The warmup is not longer than the schedule."""
    params = case.params("scheduler")
    total, warmup = params.get("total_num_steps"), params.get("warmup_num_steps", 1000)
    if is_number(total) and is_number(warmup) and warmup > total:
        default = "" if "warmup_num_steps" in params else " (DeepSpeed's default)"
        yield Problem(
            "scheduler.params.warmup_num_steps",
            f"warmup {warmup}{default} > total {total} optimizer steps: the learning rate never "
            "reaches its peak",
            f"scheduler.params.warmup_num_steps={max(1, int(total or 0) // 10)}",
        )


@rule(
    "TC269",
    file="runtime/engine.py",
    fix="Use a schedule of DeepSpeed's, or make torch's in the script.",
)
def torch_schedules_need_a_torch_optimizer(case: Case) -> Iterator[Problem]:
    """torch's schedules take torch's optimizers: not one that DeepSpeed has wrapped."""
    name = case.get(TYPE)
    if name not in case.schema.torch_schedulers or case.stage is None or case.weights is None:
        return
    if case.stage > 0 or case.weights != "fp32":
        what = f"ZeRO stage {case.stage}" if case.stage else f"{case.weights} weights"
        yield Problem(
            TYPE,
            f"{name} is torch's, and refuses the optimizer that DeepSpeed wraps for {what}",
            f"one of {', '.join(case.schema.schedulers)}",
        )


@rule(
    "TC270",
    file="runtime/lr_schedules.py",
    meets=Enforcement.silent,
    fix="Write scheduler.params.warmup_max_lr, the same as optimizer.params.lr.",
    warns=True,
)
def the_peak_is_the_optimizers(case: Case) -> Iterator[Problem]:
    """A warmup ends at the learning rate of the optimizer."""
    name, params = case.get(TYPE), case.params("scheduler")
    lr = case.params("optimizer").get("lr")
    if name not in ("WarmupLR", "WarmupDecayLR") or not is_number(lr):
        return
    peak = params.get("warmup_max_lr", 1e-3 if name == "WarmupDecayLR" else lr)
    if is_number(peak) and peak != lr:
        default = "" if "warmup_max_lr" in params else ", DeepSpeed's default,"
        yield Problem(
            "scheduler.params.warmup_max_lr",
            f"{name} goes up to {peak:g}{default} and optimizer.params.lr={lr:g} has no effect",
            f"scheduler.params.warmup_max_lr={lr:g}",
        )


@rule(
    "TC271",
    file="runtime/lr_schedules.py",
    meets=Enforcement.silent,
    fix="Write linear or log.",
)
def the_warmup_has_a_known_shape(case: Case) -> Iterator[Problem]:
    """warmup_type is linear or log; anything else is taken for log."""
    shape = case.params("scheduler").get("warmup_type", "log")
    known = case.get(TYPE) in ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR")
    if known and shape not in ("log", "linear"):
        yield Problem(
            "scheduler.params.warmup_type",
            f"warmup_type={shown(shape)} is not known, and log is taken",
            "linear or log",
        )


@rule(
    "TC272",
    file="runtime/engine.py",
    meets=Enforcement.silent,
    fix="Name an optimizer too, or make the schedule in the script.",
    warns=True,
)
def a_schedule_has_its_optimizer(case: Case) -> Iterator[Problem]:
    """A schedule in the JSON goes with an optimizer in the JSON."""
    has_optimizer = case.has("optimizer.type") or case.around.has_optimizer
    if case.given(TYPE) and not has_optimizer:
        yield Problem(
            TYPE,
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
