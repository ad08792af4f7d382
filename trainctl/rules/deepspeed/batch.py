"""Rules about the batch, how ranks are counted, and the schedule of the learning rate."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from trainctl.config.suggest import did_you_mean, nearest_names
from trainctl.plans.derive import choices, nearest_divisors, nearest_multiples
from trainctl.rules.deepspeed.case import AUTO, Case, is_number, is_whole, json_text
from trainctl.rules.deepspeed_schema import Arguments
from trainctl.rules.rule import LEFT_OUT, WARNING, Problem, rule

TOTAL, MICRO, STEPS = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
)


@rule(
    "TC220",
    "train_micro_batch_size_per_gpu",
    refused="runtime/config.py",
    example={"train_batch_size": LEFT_OUT, "train_micro_batch_size_per_gpu": LEFT_OUT},
)
def a_batch_is_given(case: Case) -> Iterator[Problem]:
    """A batch size is given.

    The number of accumulation steps alone is not enough.

    Fix: Give train_batch_size or train_micro_batch_size_per_gpu.
    """
    if any(case.json.get(name) is not None for name in (TOTAL, MICRO)):
        return
    yield Problem(
        f"neither {TOTAL} nor {MICRO} is given", f"{MICRO}: 1, and DeepSpeed computes the rest"
    )


@rule("TC221", "train_batch_size", refused="runtime/config.py", example={"train_batch_size": 7})
def the_batch_is_a_product(case: Case) -> Iterator[Problem]:
    """train_batch_size = micro batch x accumulation steps x data-parallel ranks.

    Fix: Make train_batch_size the product of micro batch, accumulation steps and ranks.
    """
    ranks = case.counted_ranks
    total, micro, steps = (_batch_size(case, name) for name in (TOTAL, MICRO, STEPS))
    if total is None or _is_undetermined(case):
        return
    if ranks is None or not is_whole(ranks):
        factors = (micro or 1) * (steps or 1)
        if total % factors:
            yield _mismatch_problem(total, micro, steps, None, factors)
        return
    ranks = int(ranks)
    if micro is not None and steps is not None:
        if total != micro * steps * ranks:
            yield _mismatch_problem(total, micro, steps, ranks, micro * steps * ranks)
        return
    each = (micro or 1) * (steps or 1) * ranks
    if total % each:
        yield _mismatch_problem(total, micro, steps, ranks, each)


@rule(
    "TC222",
    "sequence_parallel_size",
    later="runtime/config.py",
    example={"sequence_parallel_size": 3, "train_micro_batch_size_per_gpu": LEFT_OUT},
)
def sequence_groups_divide_the_ranks(case: Case) -> Iterator[Problem]:
    """sequence_parallel_size divides the number of ranks.

    Fix: Choose a sequence_parallel_size that divides the ranks.
    """
    size, world = case.get("sequence_parallel_size"), case.around.world_size
    if not isinstance(size, int) or size < 1 or world is None or case.has("data_parallel_size"):
        return
    if world % size:
        yield Problem(
            f"sequence_parallel_size={size} does not divide the {world} ranks: DeepSpeed counts "
            f"{world / size:.3g} data-parallel ranks",
            _nearest_divisors_hint(world, size),
        )


@rule(
    "TC223",
    "data_parallel_size",
    refused="__init__.py",
    example={"sequence_parallel_size": 2, "data_parallel_size": 2},
)
def the_mesh_holds_all_ranks(case: Case) -> Iterator[Problem]:
    """data_parallel_size x sequence_parallel_size is the number of ranks.

    Fix: Give sizes whose product is the number of ranks.
    """
    data, sequence = case.get("data_parallel_size"), case.get("sequence_parallel_size")
    world = case.around.world_size
    if not isinstance(data, int) or not isinstance(sequence, int) or world is None:
        return
    if min(data, sequence) >= 1 and data * sequence != world:
        yield Problem(
            f"data_parallel_size={data} x sequence_parallel_size={sequence} is {data * sequence}, "
            f"and there are {world} ranks",
            f"data_parallel_size={world // sequence}"
            if world % sequence == 0
            else _nearest_divisors_hint(world, sequence),
        )


@rule(
    "TC224",
    "data_parallel_size",
    severity=WARNING,
    silent="__init__.py",
    example={"data_parallel_size": 4},
)
def the_data_size_has_an_effect(case: Case) -> Iterator[Problem]:
    """data_parallel_size is read only beside sequence_parallel_size.

    Fix: Leave data_parallel_size out, or give sequence_parallel_size too.
    """
    if case.given("data_parallel_size") and not case.has("sequence_parallel_size"):
        yield Problem(
            "data_parallel_size has no effect without sequence_parallel_size: DeepSpeed counts "
            "the ranks itself",
            "leave it out",
        )


@rule(
    "TC225",
    "tensor_parallel.autotp_size",
    severity=WARNING,
    silent="runtime/engine.py",
    example={
        "tensor_parallel": {
            "autotp_size": 2,
            "partition_config": {
                "use_default_specs": False,
                "layer_specs": [
                    {"patterns": [".*second.weight$"], "partition_type": "row"},
                    {"patterns": [".*first.weight$"], "partition_type": "column"},
                ],
            },
        },
        "zero_optimization.stage": 1,
    },
)
def tensor_ranks_share_their_samples(case: Case) -> Iterator[Problem]:
    """train_batch_size counts the ranks of an AutoTP group once.

    Ranks of a tensor-parallel group see the same samples, and DeepSpeed counts each of them, unless
    the script passes an mpu.

    Fix: Read train_batch_size as tensor_parallel.autotp_size times what is really trained on.
    """
    size, without_mpu = case.tensor_size, case.around.data_parallel_size is None
    if size < 2 or not without_mpu:
        return
    total = _batch_size(case, TOTAL)
    real = f": {total // size} samples, not {total}" if total and total % size == 0 else ""
    yield Problem(
        f"the {size} ranks of a tensor-parallel group see the same samples, and DeepSpeed counts "
        f"them as {size}: a step trains on 1/{size} of train_batch_size{real}",
        f"for a true batch of B write train_batch_size={size}*B",
    )


@rule(
    "TC226",
    "tensor_parallel.autotp_size",
    refused="utils/groups.py",
    example={"tensor_parallel": {"autotp_size": 3}},
)
def tensor_groups_divide_the_ranks(case: Case) -> Iterator[Problem]:
    """tensor_parallel.autotp_size divides the number of ranks.

    Fix: Choose an autotp_size that divides the ranks.
    """
    size, world = case.tensor_size, case.around.world_size
    if world is not None and world % size:
        yield Problem(
            f"tensor_parallel.autotp_size={size} does not divide the {world} ranks",
            _nearest_divisors_hint(world, size),
        )


def _batch_size(case: Case, name: str) -> int | None:
    value = case.get(name)
    return value if isinstance(value, int) and value > 0 else None


def _is_undetermined(case: Case) -> bool:
    """Return True if another program fills in a part of the batch, or a part is not a number."""
    given = [case.json.get(name) for name in (TOTAL, MICRO, STEPS)]
    return any(value == AUTO for value in given) or any(
        value is not None and _batch_size(case, name) is None
        for name, value in zip((TOTAL, MICRO, STEPS), given, strict=True)
    )


def _mismatch_problem(
    total: int, micro: int | None, steps: int | None, ranks: int | None, product: int
) -> Problem:
    factors = [
        f"{name} {value}"
        for name, value in (
            ("micro", micro),
            ("accumulation", steps),
            ("data-parallel ranks", ranks),
        )
        if value is not None
    ]
    is_whole_product = micro is not None and steps is not None and ranks is not None
    relation = "but" if is_whole_product else "is not a multiple of"
    message = f"train_batch_size={total} {relation} {' x '.join(factors)} = {product}"
    near = nearest_multiples(total, product)
    if is_whole_product:
        each = product // (steps or 1)
        near = nearest_multiples(total, each) if total % each else [total]
        legal = " or ".join(f"{value} (accumulation {value // each})" for value in near)
    else:
        legal = choices(near)
    return Problem(message, f"nearest legal: {legal}", key=TOTAL)


def _nearest_divisors_hint(number: int, wanted: int) -> str:
    return f"nearest legal: {choices(nearest_divisors(number, wanted))}"


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
        yield Problem(
            f"there is no schedule {json_text(name)}",
            did_you_mean(nearest_names(name, known, count=1))
            or f"one of {', '.join(case.schema.schedulers)}",
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
            hint = did_you_mean(nearest_names(param, takes.names, count=1))
            hint = hint or f"it takes {', '.join(takes.names)}"
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
                f"{name}={json_text(value)} is not a whole number", _without_quotes(value), key=key
            )
        elif name in POSITIVE and is_number(value) and value <= 0:
            yield Problem(f"{name}={json_text(value)} is not above 0", "1 or more", key=key)
        elif isinstance(value, str) and name not in TEXTS:
            yield Problem(
                f"{name}={json_text(value)} is not a number", _without_quotes(value), key=key
            )


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
        yield Problem(
            f"warmup_type={json_text(shape)} is not known, and log is taken", "linear or log"
        )


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
