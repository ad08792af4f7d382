"""Conversion of published measurements to trainctl's plans, and the memory of these plans.

The plan is the input of `trainctl estimate-memory`, so that a row is also a worked example. Rows of
DeepSpeed use the budget unchanged. For other frameworks `memory_trainers` says where the states
are; the rest (tensors, activations, logits, phases, runtime) is the budget's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import memory_megatron as megatron
from memory_devices import accelerator_of, capacity_of, devices_of, workspace_of
from memory_models import count_of, linear_stage, model_of, stages_of
from memory_rows import Metric, NotExpressible, Recompute, Row
from memory_settings import (
    context_of,
    offload_of,
    offloads_activations,
    partition_of,
    recompute_of,
    set_attention,
    set_buffers,
    set_loss,
    set_optimizer,
    set_precision,
    set_tiles,
    stage_blocks_of,
    without_init,
    zero_stage_of,
)
from memory_shapes import with_published_shape
from memory_trainers import Trainer, block_of, logit_bytes_of, trainer_of, update_temporaries

from trainctl.config.registry import new_section
from trainctl.config.schema import (
    CrossEntropyKind,
    ModelConfig,
    RunConfig,
)
from trainctl.hardware import Hardware
from trainctl.memory import constants
from trainctl.memory.activations import stage_activations, tokens_per_rank
from trainctl.memory.budget import (
    expected_fragmentation,
    peak_bounds,
    reserved_bytes,
    runtime_range,
)
from trainctl.memory.constants import Fragmentation, LogitBytes, Range
from trainctl.memory.engine import EngineMemory, read_engine
from trainctl.memory.phases import phases, resident_components
from trainctl.memory.rank import Components, loss_tokens
from trainctl.memory.stages import Stage
from trainctl.options.optimizer import KERNEL
from trainctl.plans.types import Batch, LayoutPlan, Mesh

FP32 = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Row converted to trainctl's terms."""

    row: Row
    plan: LayoutPlan
    """Configuration that the row describes."""
    engine: EngineMemory
    """DeepSpeed's engine of the plan, adapted to the row's program."""
    trainer: Trainer | megatron.Job | None
    """The framework's placement of states; None for DeepSpeed."""
    held: tuple[Stage, ...]
    """Pipeline stages to evaluate."""
    logit_bytes: LogitBytes
    """Bytes per logit that the row's loss holds."""
    kept_after_step: int
    """Bytes that variables of the row's program keep between steps."""
    gathered: int
    """Bytes of weights that stay gathered through the backward pass."""
    loads_whole: bool
    """Whether each device loads the whole model before partitioning."""
    runtime: Range
    """Memory outside of tensors."""
    notes: tuple[str, ...] = field(default=())


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Bytes of the fullest rank among the measured ones."""

    after_step: float
    peak: float
    reserved: float
    driver: float
    phase: str
    components: Components

    def of(self, metric: Metric) -> float:
        """Return the figure for a metric."""
        return {
            Metric.after_step: self.after_step,
            Metric.peak: self.peak,
            Metric.reserved: self.reserved,
        }.get(metric, self.driver)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensors:
    """Bytes of tensors on the fullest rank, independent of the fitted constants of the runtime."""

    after_step: float
    peak: float
    phase: str
    components: Components
    resident: Components


def tensors_of(case: Case) -> Tensors:
    """Return the tensors of the fullest of the measured pipeline stages."""
    best: Tensors | None = None
    workspace = 0 if isinstance(case.trainer, megatron.Job) else workspace_of(case.row)
    for stage in case.held:
        moments, base = _moments(case, stage)
        name = max(moments, key=lambda phase: moments[phase].total)
        peak = (
            max(
                moments[name].total,
                moments["step"].total + case.kept_after_step if "step" in moments else 0,
            )
            + workspace
        )
        current = Tensors(
            after_step=base.total + case.kept_after_step + workspace,
            peak=peak,
            phase=name,
            components=moments[name],
            resident=base,
        )
        if best is None or current.peak > best.peak:
            best = current
    assert best is not None  # a model has at least one stage
    return best


def estimate(case: Case, tensors: Tensors | None = None) -> Estimate:
    """Return the estimated figures of a case; known bytes of its tensors may be passed in."""
    held = tensors or tensors_of(case)
    reserved = reserved_bytes(
        int(held.peak), fragmentation(case), case.runtime, case.plan.hardware.device_memory_bytes
    )
    return Estimate(
        after_step=held.after_step,
        peak=held.peak,
        reserved=reserved,
        driver=reserved + case.runtime.usual - constants.LIBRARY_WORKSPACE.usual,
        phase=held.phase,
        components=held.components,
    )


def bounds(case: Case, tensors: Tensors) -> tuple[float, float]:
    """Return the lower and upper bound of a row's figure, from `trainctl.memory.budget.band`.

    The bounds cover tensors only, tensors with the allocator's waste, or everything, depending on
    the metric.
    """
    metric, none = case.row.metric, Range(low=0, usual=0, high=0)
    waste, outside = Fragmentation(low=0, usual=0, high=0), none
    if metric not in (Metric.after_step, Metric.peak):
        waste = fragmentation(case)
    if metric is Metric.driver:
        outside = case.runtime
    of_step = metric is Metric.after_step
    parts = tensors.resident if of_step else tensors.components
    missing = (tensors.after_step if of_step else tensors.peak) - parts.allocated
    low, high = peak_bounds(parts, outside, waste)
    return low + missing, high + missing * (1 + waste.high)


def fragmentation(case: Case) -> Fragmentation:
    """Return the allocator's waste, which is small where segments can grow."""
    text = case.row.words("caveat", "framework", "source_repo")
    if "expandable" in text or "torchtitan" in text:
        return constants.FRAGMENTATION_LARGE
    return expected_fragmentation(case.plan)


def _moments(case: Case, stage: Stage) -> tuple[dict[str, Components], Components]:
    """Return memory by phase of a step, and memory after the step; without runtime."""
    if isinstance(case.trainer, megatron.Job):
        return megatron.moments(case.trainer)
    if case.trainer is None:
        moments = phases(case.plan, case.engine, stage, 0, logit_bytes=case.logit_bytes)
        for name in ("backward_start", "backward_end"):
            moments[name] = moments[name].plus(gathered_parameters=case.gathered)
        if case.loads_whole:
            # ZeRO divides whole weights among ranks one by one, the largest first
            # (zero/partition_parameters.py).
            whole = case.engine.weight_bytes * (stage.parameters + case.engine.share(stage.largest))
            moments["load"] = max(
                moments["load"], Components(parameters=whole), key=lambda moment: moment.total
            )
        return moments, resident_components(case.engine, stage, 0)
    return _other_trainer(case, case.trainer, stage)


def _other_trainer(
    case: Case, trainer: Trainer, stage: Stage
) -> tuple[dict[str, Components], Components]:
    plan, elements = case.plan, stage.parameters
    share = case.engine.share(elements)
    moments = _moments_of(case.engine, stage) / max(elements, 1)
    states = moments * (trainer.states * elements + trainer.state_shard * share)
    base = Components(
        parameters=int(trainer.weights * elements + trainer.weight_shard * share),
        gradients=int(trainer.gradients * elements),
        optimizer_states=int(states),
        communication_buffers=int(trainer.buckets * elements),
    )
    late = int(trainer.late_gradients * elements + trainer.late_shard * share)
    element = 2 if case.engine.weight_bytes == 2 or case.engine.autocast else 4
    activations = stage_activations(
        plan,
        blocks=stage.blocks,
        in_flight=min(plan.batch.gradient_accumulation_steps, plan.mesh.pipeline - stage.index),
        element=element,
        autocast=case.engine.autocast,
        traced=stage.traced,
    )
    blocks_gathered = min(trainer.gathered, stage.blocks) * stage.block_parameters
    root = stage.embedding + stage.head
    gathered = (
        element * (elements if trainer.keeps_gathered else min(blocks_gathered + root, elements))
        if trainer.gathered and case.engine.ranks > 1
        else 0
    )
    turning = base.plus(
        activations=activations.forward_end,
        gathered_parameters=gathered,
        retained_weights=int(trainer.cast * elements),
    )
    vocabulary = -(-plan.config.model.vocab_size // plan.mesh.tensor)
    logits = loss_tokens(plan) * vocabulary if stage.has_head else 0
    head = 4 * element * tokens_per_rank(plan) * plan.config.model.hidden_size * stage.has_head
    unit = stage.block_parameters if trainer.gathered else stage.largest_in_block
    flying = trainer.in_flight * unit
    table = trainer.in_flight * max(stage.embedding, stage.head)
    blocks_done = 1 / max(stage.blocks, 1)
    return {
        "forward_end": turning.plus(logits=logits * case.logit_bytes.forward, activations=head),
        "backward_start": max(
            turning.plus(logits=logits * case.logit_bytes.backward, activations=head),
            turning.plus(
                activations=activations.block_backward,
                gradients=flying
                + (table if not trainer.gradients else 0)
                + int(late * blocks_done),
            ),
            key=lambda moment: moment.total,
        ),
        "backward_end": base.plus(
            activations=activations.last_block,
            gradients=late + max(flying, table),
            gathered_parameters=gathered,
            retained_weights=int(trainer.cast * elements),
        ),
        "step": base.plus(
            gradients=late,
            step_transient=int(update_temporaries(case.row, case.engine) * states / 2),
        ),
    }, base


def _moments_of(engine: EngineMemory, stage: Stage) -> float:
    """Return the elements whose two fp32 Adam moments have the size of the row's states."""
    if engine.optimizer.kind == "adafactor":
        engine = replace(engine, factors=True)  # whole tensors: Adafactor factors its second moment
    return replace(engine, moment_bytes=FP32).moments(stage) / (2 * FP32)


def case_of(row: Row) -> Case:
    """Convert a row to trainctl's terms.

    Raises:
        NotExpressible: The row cannot be converted.
    """
    if row.unread:
        raise NotExpressible(row.unread)
    if row.words("framework").startswith("kernel"):
        raise NotExpressible("a kernel of its own, not a training job")
    row = with_published_shape(row)
    accelerator, model = accelerator_of(row), model_of(row)
    config = RunConfig(model=model)
    trainer = trainer_of(row)
    _set_config(row, config, is_deepspeed=trainer is None)
    mesh, world = _mesh_of(row, is_deepspeed="deepspeed" in row.words("framework"))
    axes = config.parallelism
    axes.tensor, axes.pipeline, axes.sequence = mesh.tensor, mesh.pipeline, mesh.sequence
    set_tiles(row, config)
    length, micro = config.training.sequence_length, config.training.micro_batch_size
    # Pipelines usually run more micro-batches than stages; elsewhere a row rarely gives the number.
    accumulation = mesh.pipeline if mesh.pipeline > 1 else 1
    plan = LayoutPlan(
        config=config,
        hardware=Hardware(
            name=row["gpu"] or "unknown",
            accelerator=accelerator,
            nodes=max(1, world // 8),
            devices_per_node=min(world, 8),
            device_memory_bytes=capacity_of(row),
        ),
        mesh=mesh,
        batch=Batch(
            global_batch_size=micro * accumulation * mesh.data,
            micro_batch_size=micro,
            gradient_accumulation_steps=accumulation,
            sequence_length=length,
        ),
        stage_blocks=stage_blocks_of(row, model, mesh.pipeline),
    )
    engine = _engine_of(row, plan)
    held = stages_of(row, model, mesh.tensor, plan.stage_blocks)
    if not row["heads"]:
        held = (linear_stage(row),)
    elif not isinstance(trainer, megatron.Job):
        held = tuple(replace(stage, traced=block_of(row, plan, engine)) for stage in held)
    if "last rank" in row.words("metric"):
        held = held[-1:]
    kept = 0
    if model.name == "SimpleTransformer":
        # Variables of the row's training loop keep the last logits.
        kept = 2 * micro * length * model.vocab_size
    return Case(
        row=row,
        plan=plan,
        engine=engine,
        trainer=trainer,
        held=held,
        logit_bytes=logit_bytes_of(row, engine),
        kept_after_step=kept,
        gathered=_gathered(config, held),
        loads_whole=trainer is None and config.zero_stage.stage == 3 and without_init(row),
        runtime=runtime_range(plan),
        notes=tuple(_notes(row, model)),
    )


def _engine_of(row: Row, plan: LayoutPlan) -> EngineMemory:
    """Return DeepSpeed's engine, changed where the row's program differs from trainctl's
    trainer.
    """
    engine = read_engine(plan)
    if without_init(row):
        engine = replace(engine, memory_efficient_linear=False)
    if engine.optimizer.kind != "adamw":
        # Kernels of libraries, not trainctl's own rules; and on ZeRO's flat pieces an Adafactor
        # that does not know them has nothing to factor.
        engine = replace(engine, update=KERNEL, factors=False)
    return engine


def _set_config(row: Row, config: RunConfig, *, is_deepspeed: bool) -> None:
    """Set the configuration keys that a row determines, except the mesh."""
    set_precision(row, config)
    set_optimizer(row, config)
    set_loss(row, config)
    set_attention(row, config)
    config.zero_stage.stage = zero_stage_of(row)
    if is_deepspeed:
        set_buffers(row, config)
    recompute, every = recompute_of(row)
    mode = {
        Recompute.none: "none",
        Recompute.full: "full",
        Recompute.operations: "selective",
        Recompute.attention: "none",
    }[recompute]
    own = {} if mode == "none" else {"every_kth_block": every}
    if offloads_activations(row):
        if recompute is not Recompute.full:
            raise NotExpressible("activations offloaded, but not recomputed: no term for it")
        own["offload_to_cpu"] = True
    config.activation_checkpointing = new_section("activation_checkpointing", mode, **own)
    config.offload.optimizer, config.offload.parameters = offload_of(row)
    config.training.sequence_length = row.size("seq_len") if row["heads"] else 1
    config.training.micro_batch_size = row.size("micro_batch", 1)


def _mesh_of(row: Row, *, is_deepspeed: bool) -> tuple[Mesh, int]:
    """Return how a row divides its devices, and the number of devices."""
    tensor, pipeline = (max(1, row.number(name, 1)) for name in ("tp", "pp"))
    cp = context_of(row)
    world = row.number("world_gpus", 0) or devices_of(row)
    world = max(world, tensor * pipeline * cp)
    data = row.number("dp", 0) or world // (tensor * pipeline * cp)
    if data * tensor * pipeline * cp != world and is_deepspeed:
        data = max(1, world // (tensor * pipeline * cp))
    mesh = Mesh(data=partition_of(row) or data, tensor=tensor, pipeline=pipeline, sequence=cp)
    return mesh, world


def _notes(row: Row, model: ModelConfig) -> Iterator[str]:
    stated = (row.quantity("params_b") or 0) * 1e9
    if stated and row["heads"]:
        count = count_of(row, model)
        if abs(count / stated - 1) > 0.02:
            yield f"{count:,} parameters by shape, {stated:,.0f} stated"
    if not row["precision"]:
        yield "precision is not given: bf16"
    if row["heads"] and row.quantity("micro_batch") is None:
        yield "micro_batch is not given: one sequence"


def _gathered(config: RunConfig, held: tuple[Stage, ...]) -> int:
    """Return the bytes of the output projection where a fused loss reads it.

    The loss reads the projection outside its module, so ZeRO-3 registers it as a parameter of the
    whole model (`register_external_parameter`). It stays gathered for the whole backward pass,
    beside the usual limit of live parameters.
    """
    fused = config.kernels.cross_entropy is CrossEntropyKind.liger_fused
    return 2 * held[-1].head if fused and config.zero_stage.stage == 3 else 0
