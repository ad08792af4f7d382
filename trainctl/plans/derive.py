"""Arithmetic of a plan: mesh, batch, steps, blocks of the pipeline stages, nearest legal numbers.

Pure. What derives a value returns its reasons too, and ``None`` where no legal value exists:
`trainctl.rules.plan` reports the problem and the legal values, so that one impossible choice does
not hide the other problems of a config.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import ceil, floor, isqrt

from trainctl.config.derived import DerivedValue, derived
from trainctl.config.schema import (
    ModelConfig,
    ObjectiveConfig,
    ParallelismConfig,
    PipelinePartition,
    RunConfig,
    ScheduleConfig,
    TrainingConfig,
)
from trainctl.hardware import Hardware
from trainctl.options.objective.grpo import answers_per_prompt
from trainctl.options.schedule import WithDecay, WithFloor, floor_ratio, spec_of
from trainctl.plans import shapes
from trainctl.plans.schedule import Curve, decay_length, warmup_length
from trainctl.plans.types import Batch, Batches, BatchPhase, Mesh

Reasons = tuple[DerivedValue, ...]
UNCOUNTED_STEPS = 1000
"""Placeholder length of a plan in epochs of an unread corpus; a launch reads the corpus first."""


def derive_mesh(parallelism: ParallelismConfig, hardware: Hardware) -> tuple[Mesh | None, Reasons]:
    """Return the process mesh; the data axis takes the devices that the other axes leave."""
    taken = parallelism.tensor * parallelism.pipeline * parallelism.sequence_parts
    data, left_over = divmod(hardware.world_size, taken)
    if left_over or data == 0 or parallelism.data not in (None, data):
        return None, ()
    mesh = Mesh(
        data=data,
        tensor=parallelism.tensor,
        pipeline=parallelism.pipeline,
        sequence=parallelism.sequence,
        expert=parallelism.expert,
        context=parallelism.context,
    )
    devices = f"nodes {hardware.nodes} x devices {hardware.devices_per_node} ({hardware.name})"
    reasons = [derived("world_size", mesh.world_size, why=devices)]
    if parallelism.data is None:
        share = (
            f"world_size {mesh.world_size} / (tensor {mesh.tensor} x pipeline {mesh.pipeline}"
            f" x sequence {mesh.sequence}"
            + (f" x context {mesh.context})" if mesh.context > 1 else ")")
        )
        reasons.append(derived("parallelism.data", data, why=share))
    return mesh, tuple(reasons)


_SMALLEST = "neither given nor implied: the smallest"


def derive_batch(training: TrainingConfig, data: int) -> tuple[Batch | None, Reasons]:
    """Return the batch triple, with ``global = micro x accumulation x data``.

    Each of the three sizes may be None in `training`. If two are given, the third is derived;
    otherwise an open size is 1, except that with only a global size the accumulation takes the
    rest. A global size in tokens is rounded to a multiple that the ranks can share. `data` is the
    size of the mesh's data axis.
    """
    micro = training.micro_batch_size
    accumulation = training.gradient_accumulation_steps
    reasons: list[DerivedValue] = []
    asked = training.global_batch_size
    if asked is None and training.global_batch_tokens is not None:
        asked, why = _whole_sequences(training, training.global_batch_tokens, data)
        source = "training.global_batch_tokens"
        reasons.append(derived("training.global_batch_size", asked, source, why=why))

    if micro is None and (accumulation is None or asked is None):
        micro = 1
        reasons.append(derived("training.micro_batch_size", micro, why=_SMALLEST))
    if micro is None:
        assert asked is not None and accumulation is not None
        micro = asked // (accumulation * data)
        why = f"global {asked} / (accumulation {accumulation} x data {data})"
        reasons.append(derived("training.micro_batch_size", micro, why=why))
    if accumulation is None:
        accumulation = 1 if asked is None else asked // (micro * data)
        why = _SMALLEST if asked is None else f"global {asked} / (micro {micro} x data {data})"
        reasons.append(derived("training.gradient_accumulation_steps", accumulation, why=why))
    product = micro * accumulation * data
    if asked is None:
        why = f"micro {micro} x accumulation {accumulation} x data {data}"
        reasons.append(derived("training.global_batch_size", product, why=why))
    elif asked != product:
        return None, ()

    batch = Batch(
        global_batch_size=product,
        micro_batch_size=micro,
        gradient_accumulation_steps=accumulation,
        sequence_length=training.sequence_length,
    )
    why = f"global {product} x sequence_length {training.sequence_length}"
    reasons.append(derived("tokens_per_step", batch.tokens_per_step, why=why))
    return batch, tuple(reasons)


def derive_stages(config: RunConfig) -> tuple[tuple[int, ...], Reasons]:
    """Return the number of blocks of each pipeline stage."""
    parallelism = config.parallelism
    blocks = blocks_of_stages(
        config.model, parallelism, sequence_length=config.training.sequence_length
    )
    if parallelism.pipeline == 1:
        return blocks, ()
    source = (
        "parallelism.stage_blocks" if parallelism.stage_blocks else "parallelism.pipeline_partition"
    )
    partition = parallelism.pipeline_partition
    why = source if parallelism.stage_blocks else f"{source}={partition.value}"
    if not parallelism.stage_blocks and partition is not PipelinePartition.uniform:
        why += ": the heaviest stage is made as light as possible"
    return blocks, (derived("parallelism.stage_blocks", list(blocks), source, why=why),)


def derive_ramp(training: TrainingConfig, batch: Batch | None) -> tuple[Batches | None, Reasons]:
    """Return the batch of every step: `batch`, preceded by the smaller ones of
    `training.batch_ramp`.

    The micro-batch size is constant, so a smaller batch has fewer accumulation steps. Returns None
    if an entry of the ramp is not possible.
    """
    if batch is None:
        return None, ()
    each = batch.global_batch_size // batch.gradient_accumulation_steps
    batches, first, reasons = Batches.of((), batch), 0, []
    phases: list[BatchPhase] = []
    for index, entry in enumerate(training.batch_ramp):
        size = entry.get("global_batch_size", 0)
        if size <= 0 or size % each or not is_ramp_entry(entry):
            return None, ()
        smaller = replace(batch, global_batch_size=size, gradient_accumulation_steps=size // each)
        phases.append(BatchPhase(first_step=first, batch=smaller))
        batches = Batches(tuple(phases))
        last, first = first, entry.get("until_steps", 0)
        why = f"training.batch_ramp[{index}]: "
        if "until_tokens" in entry:
            first = batches.steps_for(entry["until_tokens"])
            why += f"until_tokens {entry['until_tokens']:_}, rounded up to a step"
        else:
            why += f"until_steps {first}"
        if first <= last:
            return None, ()
        key = f"global_batch_size of steps {last + 1} to {first}"
        reasons.append(derived(key, size, "training.batch_ramp", why=why))
    if not phases:
        return batches, ()
    batches = Batches((*phases, BatchPhase(first_step=first, batch=batch)))
    return batches, tuple(reasons)


def is_ramp_entry(entry: dict[str, int]) -> bool:
    """Return True if an entry of `training.batch_ramp` has exactly the required keys."""
    return set(entry) in (
        {"until_steps", "global_batch_size"},
        {"until_tokens", "global_batch_size"},
    )


def derive_total_steps(
    training: TrainingConfig, batches: Batches | None, objective: ObjectiveConfig
) -> tuple[int | None, Reasons]:
    """Return the optimizer steps of the whole run: `training.steps`, otherwise from tokens or
    epochs, rounded up. An epoch of prompts has all answers to each.
    """
    if training.steps is not None:
        return training.steps, (derived("total_steps", training.steps, "training.steps"),)
    if batches is None:
        return None, ()
    if is_counted_in_epochs(training):
        return _steps_of_epochs(training, batches, answers_per_prompt(objective))
    if training.tokens is None:
        return None, ()
    steps = batches.steps_for(training.tokens)
    each, ramp = _ramp_in_words(batches, f"/ {batches.at(0).tokens_per_step:_} tokens per step")
    why = f"training.tokens {training.tokens:_} {each}, rounded up"
    return steps, (derived("total_steps", steps, "training.tokens", *ramp, why=why),)


def uncounted_steps(training: TrainingConfig) -> tuple[int, Reasons]:
    """Return placeholder steps for `training.epochs` while the epoch length is unknown."""
    why = f"stands for training.epochs {training.epochs:g} until the corpus is read"
    return UNCOUNTED_STEPS, (derived("total_steps", UNCOUNTED_STEPS, "training.epochs", why=why),)


def _ramp_in_words(batches: Batches, otherwise: str) -> tuple[str, tuple[str, ...]]:
    """Return in words how a total is divided into steps, with the config keys it depends on."""
    if len(batches.phases) > 1:
        return "with the batches of training.batch_ramp", ("training.batch_ramp",)
    return otherwise, ()


def is_counted_in_epochs(training: TrainingConfig) -> bool:
    """Return True if the length of the run depends on the corpus."""
    return training.epochs is not None and training.steps is None and training.tokens is None


def samples_of_epoch(training: TrainingConfig) -> int:
    """Return the packed samples in the corpus; each ends with the label of its last token."""
    return max(0, ((training.epoch_tokens or 0) - 1) // training.sequence_length)


def _steps_of_epochs(
    training: TrainingConfig, batches: Batches, answers: int
) -> tuple[int | None, Reasons]:
    """Return the steps after which every sample was seen `training.epochs` times; None if the
    corpus is unread.
    """
    samples = samples_of_epoch(training)
    if training.epochs is None or samples == 0:
        return None, ()
    seen = ceil(training.epochs * samples) * answers
    steps = batches.steps_for(seen * training.sequence_length)
    each, ramp = _ramp_in_words(batches, f"/ {batches.at(0).global_batch_size:_} per step")
    why = (
        f"training.epochs {training.epochs:g} x {samples:_} samples (training.epoch_tokens"
        f" {training.epoch_tokens:_} / sequence_length {training.sequence_length})"
        f"{f' x {answers} objective.samples' if answers > 1 else ''} {each}, rounded up"
    )
    sources = ("training.epochs", "training.epoch_tokens", *ramp)
    return steps, (derived("total_steps", steps, *sources, why=why),)


def derive_stop_step(training: TrainingConfig, total_steps: int) -> tuple[int, Reasons]:
    """Return the step at which this launch ends."""
    if training.stop_after_steps is None or training.stop_after_steps >= total_steps:
        why = "total_steps: this launch goes to the end"
        return total_steps, (derived("stop_step", total_steps, why=why),)
    stop = training.stop_after_steps
    return stop, (derived("stop_step", stop, "training.stop_after_steps"),)


def derive_warmup_steps(
    schedule: ScheduleConfig, total_steps: int, batches: Batches
) -> tuple[int, Reasons]:
    """Return the steps of the linear warmup; a fraction is rounded to the nearest step."""
    steps, why = warmup_length(schedule, total_steps, batches)
    return steps, (derived("warmup_steps", steps, _length_key(schedule, "warmup"), why=why),)


def _length_key(schedule: ScheduleConfig, phase: str) -> str:
    """Return the key that sets the warmup's or decay's length: steps, else tokens, else
    fraction.
    """
    names = (f"{phase}_steps", f"{phase}_tokens")
    given = (name for name in names if getattr(schedule, name) is not None)
    return f"schedule.{next(given, f'{phase}_fraction')}"


def derive_stable_steps(
    schedule: ScheduleConfig, total_steps: int, warmup_steps: int, batches: Batches
) -> Reasons:
    """Return the length and the start of the `wsd` decay; a run can be extended from the checkpoint
    at its start (`Curve`).
    """
    if not isinstance(schedule, WithDecay):
        return ()
    decay, why = decay_length(schedule, total_steps, batches)
    curve = Curve(
        config=schedule,
        batches=batches,
        total_steps=total_steps,
        warmup_steps=warmup_steps,
        decay_steps=decay,
    )
    is_kept = (
        f"total_steps {total_steps} - decay_steps {decay}, not before the warmup's end; the"
        " checkpoint there is kept: a longer run can go on from it"
    )
    return (
        derived("decay_steps", decay, _length_key(schedule, "decay"), why=why),
        derived("stable_steps", min(total_steps, curve.stable_steps), why=is_kept),
    )


def derive_shape(
    schedule: ScheduleConfig, total_steps: int, warmup_steps: int, batches: Batches
) -> Reasons:
    """Return the schedule's default floor, if not configured, and the steps where its curve
    jumps.
    """
    found = []
    if isinstance(schedule, WithFloor) and schedule.floor_ratio is None:
        floor, why = floor_ratio(schedule)
        found.append(derived("schedule.floor_ratio", floor, "schedule.kind", why=why))
    curve = Curve(
        config=schedule, batches=batches, total_steps=total_steps, warmup_steps=warmup_steps
    )
    turns = spec_of(schedule).turns
    if turns is not None and curve.turns:
        why = f"schedule.kind={schedule.kind}, {turns.why}"
        found.append(derived(turns.key, list(curve.turns), "schedule.kind", why=why))
    return tuple(found)


def _whole_sequences(training: TrainingConfig, tokens: int, data: int) -> tuple[int, str]:
    """Return the global batch in sequences nearest to `tokens` tokens, and the reason.

    It is a positive multiple of `data` times the micro-batch size (if unset, the accumulation).
    """
    sizes = (training.micro_batch_size, training.gradient_accumulation_steps)
    known = {"micro": sizes[0], "accumulation": None if sizes[0] else sizes[1]}
    each = data * (sizes[0] or sizes[1] or 1)
    shared = " x ".join(
        [f"{name} {size}" for name, size in known.items() if size] + [f"data {data}"]
    )
    wanted = tokens / training.sequence_length
    count = max(1, floor(wanted / each + 0.5)) * each
    why = (
        f"training.global_batch_tokens {tokens:_} / sequence_length {training.sequence_length} ="
        f" {wanted:.10g}"
    )
    return count, why if count == wanted else f"{why}, to the nearest multiple of {shared}"


def divisors(number: int) -> list[int]:
    """Return the divisors of a positive number, ascending, in square-root time."""
    small = [size for size in range(1, isqrt(number) + 1) if number % size == 0]
    large = [number // size for size in reversed(small) if size * size != number]
    return small + large


def nearest_divisors(number: int, wanted: int) -> list[int]:
    """Return the divisors of `number` next to `wanted`: the largest up to it, the smallest
    above.
    """
    sizes = divisors(number)
    below = [size for size in sizes if size <= wanted]
    above = [size for size in sizes if size > wanted]
    return below[-1:] + above[:1]


def nearest_multiples(number: int, step: int) -> list[int]:
    """Return the positive multiples of `step` around `number`, without `number` itself."""
    below = (number - 1) // step * step
    return [value for value in (below, below + step) if value > 0 and value != number] or [step]


def idle_micro_batches(parallelism: ParallelismConfig) -> float:
    """Return the time for which a pipeline rank is idle in a step, in micro-batches.

    p − 1 under 1F1B; 5p/6 − 1 under DeepSpeed's DualPipeV (runtime/pipe/schedule.py), which leaves
    gradients of weights in the backward pass, of twice the time of the forward pass.
    """
    ranks = parallelism.pipeline
    return 5 * ranks / 6 - 1 if parallelism.is_folded else ranks - 1


def bubble_share(parallelism: ParallelismConfig, micro_batches: int) -> float:
    """Return the share of a step in which a pipeline rank is idle."""
    idle = idle_micro_batches(parallelism)
    return idle / (micro_batches + idle)


def choices(values: Iterable[int], key: str = "") -> str:
    """Return `key=4 or 8` as text for hints."""
    text = " or ".join(str(value) for value in values)
    return f"{key}={text}" if key else text


def blocks_of_stages(
    model: ModelConfig, parallelism: ParallelismConfig, *, sequence_length: int
) -> tuple[int, ...]:
    """Return the number of blocks of each pipeline stage, at least one each.

    `parallelism.stage_blocks` is used if it is set. Otherwise the heaviest stage is made as light
    as possible, as in `partition_balanced` of deepspeed/runtime/utils.py; among equal cuts, the one
    with most blocks on the early stages. With fewer blocks than stages, which a rule refuses, some
    stages have none. The time of attention depends on `sequence_length`.
    """
    if parallelism.stage_blocks:
        return tuple(parallelism.stage_blocks)
    layers, stages = model.num_layers, parallelism.stages
    uniform = parallelism.pipeline_partition is PipelinePartition.uniform
    if uniform or stages == 1 or layers < stages:
        return tuple((layers + stages - 1 - stage) // stages for stage in range(stages))
    if parallelism.pipeline_partition is PipelinePartition.parameters:
        first, block, last = _parameters_by_position(model)
    else:
        first, block, last = _multiply_adds_by_position(model, sequence_length)
    fixed = [0] * stages
    fixed[0] += first
    fixed[-1] += last
    return balanced_stages(layers, fixed, max(1, block))


def balanced_stages(layers: int, fixed: Sequence[int], block: int) -> tuple[int, ...]:
    """Return the number of blocks of each stage, at least one, so that the heaviest is lightest.

    `layers` is the total number of blocks, at least the number of stages. `fixed` is the weight of
    each stage without blocks. `block` is the weight of a block, above 0.
    """
    low = max(max(fixed) + block, -(-(sum(fixed) + layers * block) // len(fixed)))
    high = max(fixed) + layers * block
    while low < high:
        limit = (low + high) // 2
        if sum((limit - load) // block for load in fixed) >= layers:
            high = limit
        else:
            low = limit + 1
    counts: list[int] = []
    for stage, load in enumerate(fixed):
        later = len(fixed) - stage - 1  # each later stage needs at least one block
        counts.append(min((low - load) // block, layers - sum(counts) - later))
    return tuple(counts)


def _parameters_by_position(model: ModelConfig) -> tuple[int, int, int]:
    """Return the parameters before the blocks, of one block, and after the blocks."""
    count, read = shapes.count_parameters(model), shapes.anatomy(model)
    head = shapes.head_tensor(model).numel if read is None else read.head
    return count.embeddings, count.block, count.final_norm + head


def _multiply_adds_by_position(model: ModelConfig, sequence_length: int) -> tuple[int, int, int]:
    """Return the multiply-adds per token before the blocks, in one block, and after the blocks.

    A matrix takes one per element. Attention takes two per element of a query and each earlier key,
    on average half the sequence (arXiv:2001.08361, section 2.1).
    """
    read = shapes.anatomy(model)
    if read is not None:
        inside = read.multiplied - read.head + read.attention_products(sequence_length) // 2
        return 0, inside // len(read.blocks), read.head
    matrices = sum(t.numel for t in shapes.block_tensors(model) if t.is_matrix)
    attention = model.num_attention_heads * shapes.head_dim(model) * sequence_length
    return 0, matrices + attention, shapes.head_tensor(model).numel
