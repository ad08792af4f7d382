"""Training steps with DeepSpeed's engine around the model, and the folder of its swap files."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScalerBase
from deepspeed.utils import set_z3_leaf_module
from torch import nn
from torch.utils.hooks import RemovableHandle

from trainctl.config.schema import CompileKind, DataType
from trainctl.engines.deepspeed.process_groups import model_parallel_unit, register_experts
from trainctl.engines.deepspeed.sequence_attention import SequenceParallelAttention
from trainctl.engines.deepspeed.wrapper_base import Wrapper
from trainctl.engines.deepspeed.wrappers import wrapper_adapter
from trainctl.engines.micro_batch import MicroBatch, StepSums
from trainctl.engines.process import Process
from trainctl.engines.protocol import Engine, Job
from trainctl.errors import ExitCode, TrainctlError
from trainctl.plans.gathering import gathers_blocks
from trainctl.plans.settings import number_formats
from trainctl.plans.types import Batch, RunPlan
from trainctl.runs.layout import RunPaths

_COUNTERS = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
"""State of a dynamic loss scale (deepspeed/runtime/fp16/loss_scaler.py)."""


class DeepSpeedLossScale:
    """DeepSpeed's loss scale, behind the trainer's `LossScale`."""

    def __init__(self, scaler: LossScalerBase) -> None:
        self._scaler = scaler

    @classmethod
    def of(cls, wrapper: Any, weights: DataType) -> DeepSpeedLossScale | None:
        """Return the loss scale of DeepSpeed's optimizer; None if the weights are not fp16."""
        return cls(wrapper.loss_scaler) if weights is DataType.fp16 else None

    @property
    def value(self) -> float:
        return float(self._scaler.cur_scale)

    def state(self) -> dict[str, float]:
        if not isinstance(self._scaler, DynamicLossScaler):
            return {}
        return {name: float(getattr(self._scaler, name)) for name in _COUNTERS}

    def restore(self, state: Mapping[str, float]) -> None:
        if isinstance(self._scaler, DynamicLossScaler) and state:
            # This launch may have a higher precision.min_loss_scale than the saved one.
            self._scaler.cur_scale = max(state["cur_scale"], float(self._scaler.min_scale))
            for name in _COUNTERS[1:]:
                setattr(self._scaler, name, int(state[name]))

    def is_smallest(self) -> bool:
        """Return True if the scale cannot become smaller: DeepSpeed raises at the next overflow."""
        scaler = self._scaler
        return isinstance(scaler, DynamicLossScaler) and scaler.cur_scale <= scaler.min_scale


@contextmanager
def stop_at_smallest(scale: DeepSpeedLossScale | None) -> Iterator[None]:
    """Turn DeepSpeed's exception for an exhausted loss scale, raised in an update, into a run's
    error.

    Raises:
        TrainctlError: The update overflowed at the smallest scale; on all ranks, because they share
            the overflow flag.
    """
    try:
        yield
    except Exception as error:
        if scale is None or not scale.is_smallest():
            raise
        raise TrainctlError(
            f"the gradients overflow fp16 even at the smallest loss scale, {scale.value:g}",
            hint="the run diverges: a lower optimizer.lr, or precision=bf16",
            exit_code=ExitCode.training_failed,
        ) from error


@contextmanager
def without_hooks(handles: Collection[RemovableHandle]) -> Iterator[None]:
    """Disable hooks of modules within the context; afterwards they have their old order."""
    tables = {id(table): table for each in handles if (table := each.hooks_dict_ref()) is not None}
    before = {key: dict(table) for key, table in tables.items()}
    for each in handles:
        tables[id(each.hooks_dict_ref())].pop(each.id, None)
    try:
        yield
    finally:
        for key, table in tables.items():
            table.clear()
            table.update(before[key])


class DeepSpeedEngine(Engine):
    """Data, tensor, sequence and context parallelism, at any ZeRO stage.

    Attributes:
        deepspeed: DeepSpeed's own engine.
    """

    states: Wrapper
    loss_scale: DeepSpeedLossScale | None

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        plan, mesh = job.plan, job.mesh
        self._has_flash_attention = job.flash_attention
        self._attention = None if mesh.part.is_whole else SequenceParallelAttention(plan, mesh)
        for parameter, piece in job.pieces.items():
            # DeepSpeed's norm counts a parameter that is not split on the first tensor rank only.
            is_whole = piece.shard.is_whole or piece.is_expert
            is_repeated = piece.gradient_parts > 1 and not piece.is_saved_here
            parameter.model_parallel = not (is_whole or is_repeated)
        module = self._wrap(job)
        if mesh.expert.size > 1:
            register_experts(module, job)
        for block in job.blocks if gathers_blocks(plan.config) else ():
            set_z3_leaf_module(block, True)
        self.deepspeed, *_ = deepspeed.initialize(
            model=module,
            optimizer=job.optimizer,
            model_parameters=job.groups if job.optimizer is None else None,
            config=plan.deepspeed,
            mpu=model_parallel_unit(mesh) if mesh.pipeline.size == 1 else None,
            dist_init_required=False,
        )
        is_compiled = plan.config.kernels.compile is CompileKind.deepcompile
        if is_compiled:
            self.deepspeed.compile()
        wrapper = self.deepspeed.optimizer
        self.states = wrapper_adapter(wrapper)(self.deepspeed, job.pieces, mesh)
        self.states.has_readable_gradients &= not is_compiled
        weights = number_formats(plan.config.precision).weights
        self.loss_scale = DeepSpeedLossScale.of(wrapper, weights)

    def _wrap(self, job: Job) -> nn.Module:
        """Return the module to give to DeepSpeed."""
        return job.module

    @property
    def module(self) -> nn.Module:
        return self.deepspeed

    def set_batch(self, batch: Batch) -> None:
        """Change the batch of the following steps.

        The engine is built for the largest batch, because DeepSpeed's allocations depend on whether
        it accumulates gradients.
        """
        if batch == self._batch:
            return
        self._batch, engine = batch, self.deepspeed
        # Samples of a micro-step as DeepSpeed counts them.
        each = engine.train_micro_batch_size_per_gpu() * engine.dp_world_size
        engine.set_train_batch_size(batch.gradient_accumulation_steps * each)
        # DeepSpeed ends a step at each multiple of the accumulation steps since the start.
        engine.micro_steps = 0

    def run(self, batches: Sequence[MicroBatch], num_labels: float) -> StepSums:
        """Run forward and backward of each micro-batch.

        DeepSpeed averages gradients over the replicas, so the loss is scaled by their number to get
        a sum.
        """
        scale = self.mesh.replicas.size / num_labels
        sums = StepSums(self._process.device)
        for index, batch in enumerate(batches):
            with self.times.part("forward"):
                loss = self.output(batch)
            with self.times.part("backward"):
                self.deepspeed.backward(loss * scale, scale_wrt_gas=False)
                sums.add(loss, self.deepspeed.module)
                if index + 1 < len(batches):
                    self.deepspeed.step()  # before the boundary it only counts the micro-step
        return sums

    def update(self, *, norm: float | None, clip_at: float | None) -> None:
        with self.times.part("optimizer"):
            self.states.clip(norm, clip_at)
            with stop_at_smallest(self.loss_scale):
                self._step()

    def discard(self) -> None:
        """Let DeepSpeed count the step and clear the gradients, without an update."""
        with self.states.without_update():
            self._step()

    def _step(self) -> None:
        self.deepspeed.step()

    @property
    def norm_of_update(self) -> float | None:
        return float(self.deepspeed.get_global_grad_norm())

    @property
    def was_skipped(self) -> bool:
        return not self.deepspeed.was_step_applied()

    def output(self, batch: MicroBatch) -> torch.Tensor:
        return self.deepspeed(*self._arguments(batch))

    def scores_at(self, batch: MicroBatch, position: int) -> torch.Tensor | None:
        inputs, *_ = self._arguments(batch)
        scores = self.deepspeed(inputs)
        own = self.mesh.part.of(torch.arange(batch.labels.shape[1]).unsqueeze(0))
        (found,) = (own[0] == position).nonzero(as_tuple=True)
        return scores[0, int(found)] if len(found) else None

    @contextmanager
    def whole_weights(self) -> Iterator[None]:
        if self.deepspeed.zero_optimization_stage() < 3:
            yield
            return
        # These hooks gather weights before each module of the model, and partition them behind it.
        offload = self.deepspeed.optimizer.parameter_offload
        hooks = [offload.fwd_pre_hook, *offload.forward_hooks, *offload.backward_hooks]
        weights = self.deepspeed.module.parameters()
        with deepspeed.zero.GatheredParameters(weights), without_hooks(hooks):
            yield

    def _arguments(self, batch: MicroBatch) -> tuple[dict[str, Any], torch.Tensor, dict[str, Any]]:
        """Return the arguments of a model call for this rank's part of the batch, on its device.

        Attention of all ranks is made ready for the batch.
        """
        device, part = self._process.device, self.mesh.part
        inputs = batch.model_inputs(
            device,
            part=part,
            flash_attention=self._has_flash_attention,
            compiled=self._plan.config.kernels.is_compiled,
        )
        own = batch.part(part)
        if self._attention is not None:
            self._attention.expect(batch)
        return inputs, self._on_device(own.labels), self._objective_inputs(own)

    def _on_device(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self._process.device, non_blocking=True)

    def close(self) -> None:
        self.deepspeed.destroy()
        if self._attention is not None:
            self._attention.close()
        remove_swap_folders(self._plan.deepspeed)


class ZenFlowEngine(DeepSpeedEngine):
    """Engine with ZenFlow's optimizer (arXiv:2505.12242): data-parallel, one micro-batch per step.

    At each step, during the backward pass, AdamW on the device updates all vectors and the selected
    columns: those with the largest gradients at the time of selection. The other gradients
    accumulate in host memory, where CPUAdam makes one update of them per interval.

    DeepSpeed 0.19.8 does four things silently wrong. `trainctl.engines.deepspeed.changes` corrects
    the first and the last, this class the others:

    - Its flat buffers hold matrices transposed, but the model's weights are cut out of them as if
      they were not: every matrix is scrambled (zero/stage_1_and_2.py,
      `_update_model_bit16_weights`).
    - The optimizer on the device has one weight decay for all groups (zenflow_stage_1_and_2.py).
    - The optimizer on the device uses the learning rate of the previous step (engine.py, `step`).
    - Each selection of columns rounds all master weights to the weights' format
      (`sync_fp32_param_from_gpu`), although only those of the updated columns are out of date.
    """

    updates_in_backward = True

    def __init__(self, job: Job) -> None:
        matrix = min((p for p in job.pieces if p.dim() == 2), key=torch.numel)
        before = matrix.detach().clone()
        super().__init__(job)
        assert torch.equal(matrix, before), "ZenFlow changed the weights that it was given"
        self._zenflow = self.deepspeed.optimizer
        groups = (self._zenflow.selective_optimizer.param_groups, self._zenflow.param_groups)
        for on_device, group in zip(*groups, strict=True):
            on_device["weight_decay"] = group["weight_decay"]
        self._steps_since_update = 0
        self._was_skipped = False
        self._norm: float | None = None

    def set_learning_rate(self, factor: float) -> None:
        super().set_learning_rate(factor)
        # The engine's `step` does this only after the backward pass, which has used the rate.
        self._zenflow._sync_selective_optimizer_lr()

    def update(self, *, norm: float | None, clip_at: float | None) -> None:
        """Update in host memory at the end of an interval; columns on the device are updated
        already.
        """
        assert norm is None and clip_at is None
        self._steps_since_update += 1
        is_time = self.deepspeed.is_gradient_accumulation_boundary()
        with self.times.part("optimizer"):
            self._step()
        self._was_skipped = is_time and not self.deepspeed.was_step_applied()
        self._norm = None
        if is_time:
            self._norm = float(self.deepspeed.get_global_grad_norm()) / self._steps_since_update
            self._steps_since_update = 0

    @property
    def norm_of_update(self) -> float | None:
        """Norm of the mean gradient of the interval's steps, if the last step updated in host
        memory.
        """
        return self._norm

    @property
    def was_skipped(self) -> bool:
        return self._was_skipped

    def resume_at(self, step: int) -> None:
        """Continue after `step` steps with a new selection: the selected columns' moments are lost.

        DeepSpeed selects columns at the end of the warm-up.
        """
        self.deepspeed.micro_steps = step
        self._zenflow.micro_step = step - 1
        for counted in (self.deepspeed, self._zenflow):
            counted.full_warm_up_rounds = max(step, counted.full_warm_up_rounds)


_SECTIONS = ("offload_optimizer", "offload_param")


def with_own_swap_folder(plan: RunPlan, run: RunPaths, process: Process) -> RunPlan:
    """Return the plan with an emptied swap folder of this run; on all ranks together.

    The folder lies below `offload.nvme_path`. DeepSpeed names its files by rank and parameter only:
    two runs that share a drive would overwrite each other's states. Files that a dead attempt left
    there are removed.
    """
    if not _nvme_sections(plan.deepspeed):
        return plan
    digest = hashlib.sha256(str(run.root.resolve()).encode()).hexdigest()[:12]
    deepspeed = deepcopy(plan.deepspeed)
    for section in _nvme_sections(deepspeed):
        section["nvme_path"] = str(Path(section["nvme_path"]) / f"{run.root.name}-{digest}")
    if int(os.environ["LOCAL_RANK"]) == 0:
        remove_swap_folders(deepspeed)
    process.barrier()
    return replace(plan, deepspeed=deepspeed)


def remove_swap_folders(deepspeed: dict[str, Any]) -> None:
    """Remove a run's swap files from this machine, once no rank uses them."""
    for section in _nvme_sections(deepspeed):
        shutil.rmtree(section["nvme_path"], ignore_errors=True)  # other ranks remove it too


def _nvme_sections(deepspeed: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the sections of the JSON that name an NVMe folder."""
    zero = deepspeed.get("zero_optimization", {})
    return [zero[name] for name in _SECTIONS if "nvme_path" in zero.get(name, {})]
