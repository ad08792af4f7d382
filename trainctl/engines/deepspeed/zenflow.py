"""ZenFlow (arXiv:2505.12242): a share of the columns is updated on the device, the rest rarely.

At each step, during the backward pass, AdamW on the device updates all vectors and the selected
columns: those with the largest gradients at the time of selection. The other gradients accumulate
in host memory, where CPUAdam makes one update of them per interval.

DeepSpeed 0.19.8 does four things silently wrong. `trainctl.engines.deepspeed.changes` corrects the
first and the last, this module the others:

- Its flat buffers hold matrices transposed, but the model's weights are cut out of them as if they
  were not: every matrix is scrambled (zero/stage_1_and_2.py, `_update_model_bit16_weights`).
- The optimizer on the device has one weight decay for all groups (zenflow_stage_1_and_2.py).
- The optimizer on the device uses the learning rate of the previous step (engine.py, `step`).
- Each selection of columns rounds all master weights to the weights' format
  (`sync_fp32_param_from_gpu`), although only those of the updated columns are out of date.
"""

from __future__ import annotations

import torch

from trainctl.engines.deepspeed.engine import DeepSpeedEngine
from trainctl.engines.protocol import Job


class ZenFlowEngine(DeepSpeedEngine):
    """A `DeepSpeedEngine` with ZenFlow's optimizer: data-parallel, one micro-batch per step."""

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
