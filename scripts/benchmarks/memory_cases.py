"""From a published measurement to trainctl's own terms, and from those to its memory.

The plan is what `trainctl estimate-memory` works on, so a row is also a worked example. DeepSpeed's
rows go through the budget as they are; for other frameworks `memory_trainers` says where the states
are, and everything else (tensors, activations, logits, phases, runtime) is the budget's.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace

import memory_megatron as megatron
from memory_models import count_of, linear_stage, model_of, stages_of
from memory_rows import Metric, NotExpressible, Recompute, Row
from memory_settings import (
    capacity_of,
    offload_of,
    recompute_of,
    set_buffers,
    set_loss,
    set_precision,
    stage_blocks_of,
    without_init,
    zero_stage_of,
)
from memory_trainers import Trainer, block_of, logit_bytes_of, trainer_of

from trainctl.config.schema import Accelerator, CheckpointingMode, CrossEntropyKind, RunConfig
from trainctl.hardware import Hardware
from trainctl.memory import constants
from trainctl.memory.activations import stage_activations, tokens_per_rank
from trainctl.memory.components import Components
from trainctl.memory.constants import Fragmentation, LogitBytes, Range
from trainctl.memory.engine import Engine, read_engine
from trainctl.memory.loss import loss_tokens
from trainctl.memory.phases import phases, resident
from trainctl.memory.runtime import fragmentation_of, runtime_of
from trainctl.memory.stages import Stage
from trainctl.plan.types import Batch, Mesh, RunPlan

FP32 = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A row in our terms.

    Attributes:
        row: The row.
        plan: The configuration that it describes.
        engine: DeepSpeed's engine of the plan, with what the row's program did otherwise.
        trainer: The framework's way with states; None for DeepSpeed.
        held: The pipeline stages to look at.
        logit_bytes: What its loss holds of each logit.
        kept_after_step: Bytes that the program's own variables keep between steps.
        gathered: Bytes of weights that the program keeps gathered through a pass.
        loads_whole: Whether the model is whole on each device before it is divided.
        runtime: Memory in no tensor.
        notes: What was assumed.
    """

    row: Row
    plan: RunPlan
    engine: Engine
    trainer: Trainer | megatron.Job | None
    held: tuple[Stage, ...]
    logit_bytes: LogitBytes
    kept_after_step: int
    gathered: int
    loads_whole: bool
    runtime: Range
    notes: tuple[str, ...] = field(default=())


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Bytes of the fullest rank that the row looked at."""

    after_step: float
    peak: float
    reserved: float
    driver: float
    phase: str
    components: Components

    def of(self, metric: Metric) -> float:
        """The figure that a metric measured."""
        return {
            Metric.after_step: self.after_step,
            Metric.peak: self.peak,
            Metric.reserved: self.reserved,
        }.get(metric, self.driver)


def estimate(case: Case) -> Estimate:
    """The estimator's figures for a case."""
    best: Estimate | None = None
    workspace = 0 if isinstance(case.trainer, megatron.Job) else constants.LIBRARY_WORKSPACE.usual
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
        reserved = peak * (1 + fragmentation(case).usual)
        current = Estimate(
            after_step=base.total + case.kept_after_step + workspace,
            peak=peak,
            reserved=reserved,
            driver=reserved + case.runtime.usual - constants.LIBRARY_WORKSPACE.usual,
            phase=name,
            components=moments[name],
        )
        if best is None or current.peak > best.peak:
            best = current
    assert best is not None  # a model has at least one stage
    return best


def fragmentation(case: Case) -> Fragmentation:
    """What the allocator wastes: little where segments can grow."""
    text = case.row.words("caveat", "framework", "source_repo")
    if "expandable" in text or "torchtitan" in text:
        return constants.FRAGMENTATION_LARGE
    return fragmentation_of(case.plan)


def _moments(case: Case, stage: Stage) -> tuple[dict[str, Components], Components]:
    """Phases of a step, and what is there after it; without runtime."""
    if isinstance(case.trainer, megatron.Job):
        return megatron.moments(case.trainer)
    if case.trainer is None:
        moments = phases(case.plan, case.engine, stage, 0, logit_bytes=case.logit_bytes)
        for name in ("forward_end", "backward_start", "backward_end"):
            moments[name] = moments[name].plus(gathered_parameters=case.gathered)
        if case.loads_whole:
            # Weights are divided one by one, the largest first (zero/partition_parameters.py).
            whole = case.engine.weight_bytes * (stage.parameters + case.engine.share(stage.largest))
            moments["load"] = max(
                moments["load"], Components(parameters=whole), key=lambda moment: moment.total
            )
        return moments, resident(case.engine, stage, 0)
    return _other_trainer(case, case.trainer, stage)


def _other_trainer(
    case: Case, trainer: Trainer, stage: Stage
) -> tuple[dict[str, Components], Components]:
    plan, elements = case.plan, stage.parameters
    share = case.engine.share(elements)
    base = Components(
        parameters=int(trainer.weights * elements + trainer.weight_shard * share),
        gradients=int(trainer.gradients * elements),
        optimizer_states=int(trainer.states * elements + trainer.state_shard * share),
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
            step_transient=trainer.temporaries
            * FP32
            * (share if trainer.state_shard else elements),
        ),
    }, base


def case_of(row: Row) -> Case:
    """A row in our terms.

    Raises:
        NotExpressible: With the reason.
    """
    if row.words("framework").startswith("kernel"):
        raise NotExpressible("a kernel of its own, not a training job")
    framework = row.words("framework")
    model = model_of(row)
    notes: list[str] = []
    config = RunConfig(model=model)
    recompute, every = recompute_of(row)
    set_precision(row, config)
    sizes = {name: max(1, row.number(name, 1)) for name in ("tp", "pp", "world_gpus")}
    cp = max(1, row.number("cp_sp", 1))
    tensor, pipeline = sizes["tp"], sizes["pp"]
    world = max(sizes["world_gpus"], tensor * pipeline * cp)
    data = row.number("dp", 0) or world // (tensor * pipeline * cp)
    if data * tensor * pipeline * cp != world and framework.startswith("deepspeed"):
        data = max(1, world // (tensor * pipeline * cp))
    config.zero_stage.stage = zero_stage_of(row)
    if "deepspeed" in framework:
        set_buffers(row, config)
    config.activation_checkpointing.mode = {
        Recompute.none: CheckpointingMode.none,
        Recompute.full: CheckpointingMode.full,
        Recompute.operations: CheckpointingMode.selective,
        Recompute.attention: CheckpointingMode.none,
    }[recompute]
    config.activation_checkpointing.every_kth_block = every
    set_loss(row, config)
    if re.search(r"act|ckpt.*cpu", row.words("offload")) and recompute is Recompute.full:
        config.activation_checkpointing.offload_to_cpu = True
    optimizer, parameters = offload_of(row)
    config.offload.optimizer, config.offload.parameters = optimizer, parameters
    config.parallelism.tensor, config.parallelism.pipeline = tensor, pipeline
    config.parallelism.sequence = cp
    length, micro = row.number("seq_len", 1), row.number("micro_batch", 1)
    config.training.micro_batch_size = micro
    config.training.sequence_length = length
    # Pipelines are run with more micro batches than stages; elsewhere a row rarely says.
    accumulation = pipeline if pipeline > 1 else 1
    plan = RunPlan(
        config=config,
        hardware=Hardware(
            name=row["gpu"] or "unknown",
            accelerator=Accelerator.cuda,
            nodes=max(1, world // 8),
            devices_per_node=min(world, 8),
            device_memory_bytes=capacity_of(row),
        ),
        mesh=Mesh(data=data, tensor=tensor, pipeline=pipeline, sequence=cp),
        batch=Batch(
            global_batch_size=micro * accumulation * data,
            micro_batch_size=micro,
            gradient_accumulation_steps=accumulation,
            sequence_length=length,
        ),
        total_steps=1,
        stop_step=1,
        warmup_steps=0,
        stage_blocks=stage_blocks_of(row, model, pipeline),
        deepspeed={"optimizer": {"params": {}}},
    )
    engine = read_engine(plan)
    if without_init(row):
        engine = replace(engine, memory_efficient_linear=False)
    trainer = trainer_of(row)
    held = stages_of(row, model, tensor, plan.stage_blocks)
    if not row["heads"]:
        held = (linear_stage(row),)
    elif not isinstance(trainer, megatron.Job):
        held = tuple(replace(stage, traced=block_of(row, plan, engine)) for stage in held)
    if "last rank" in row.words("metric"):
        held = held[-1:]
    logit_bytes = logit_bytes_of(row, engine)
    kept = 0
    if model.name == "SimpleTransformer":
        # Its training loop's variables keep the last logits.
        kept = 2 * micro * length * model.vocab_size
    count = count_of(row, model) if row["heads"] else 0
    if row["params_b"] and row["heads"]:
        stated = float(row["params_b"]) * 1e9
        if abs(count / stated - 1) > 0.02:
            notes.append(f"{count:,} parameters by shape, {stated:,.0f} stated")
    return Case(
        row=row,
        plan=plan,
        engine=engine,
        trainer=trainer,
        held=held,
        logit_bytes=logit_bytes,
        kept_after_step=kept,
        gathered=_gathered(config, held),
        loads_whole=trainer is None and config.zero_stage.stage == 3 and without_init(row),
        runtime=runtime_of(plan),
        notes=tuple(notes),
    )


def _gathered(config: RunConfig, held: tuple[Stage, ...]) -> int:
    """A fused loss reads the output projection outside its module, so ZeRO-3 takes it for one of
    the whole model's own and keeps it gathered (`register_external_parameter`)."""
    fused = config.kernels.cross_entropy is CrossEntropyKind.liger_fused
    return 2 * held[-1].head if fused and config.zero_stage.stage == 3 else 0
