"""Rules about the batch and how ranks are counted."""

from __future__ import annotations

from collections.abc import Iterator

from trainctl.plan.nearest import choices, nearest_divisors, nearest_multiples
from trainctl.rules.deepspeed.case import AUTO, Case
from trainctl.rules.deepspeed.values import is_whole
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
    total, micro, steps = (_size(case, name) for name in (TOTAL, MICRO, STEPS))
    if total is None or _is_open(case):
        return
    if ranks is None or not is_whole(ranks):
        factors = (micro or 1) * (steps or 1)
        if total % factors:
            yield _mismatch(total, micro, steps, None, factors)
        return
    ranks = int(ranks)
    if micro is not None and steps is not None:
        if total != micro * steps * ranks:
            yield _mismatch(total, micro, steps, ranks, micro * steps * ranks)
        return
    each = (micro or 1) * (steps or 1) * ranks
    if total % each:
        yield _mismatch(total, micro, steps, ranks, each)


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
            _divisors(world, size),
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
            else _divisors(world, sequence),
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
    total = _size(case, TOTAL)
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
            _divisors(world, size),
        )


def _size(case: Case, name: str) -> int | None:
    value = case.get(name)
    return value if isinstance(value, int) and value > 0 else None


def _is_open(case: Case) -> bool:
    """Return True if another program fills in a part of the batch, or a part is not a number."""
    given = [case.json.get(name) for name in (TOTAL, MICRO, STEPS)]
    return any(value == AUTO for value in given) or any(
        value is not None and _size(case, name) is None
        for name, value in zip((TOTAL, MICRO, STEPS), given, strict=True)
    )


def _mismatch(
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


def _divisors(number: int, wanted: int) -> str:
    return f"nearest legal: {choices(nearest_divisors(number, wanted))}"
