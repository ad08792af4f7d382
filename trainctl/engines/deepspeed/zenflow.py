"""ZenFlow (arXiv:2505.12242): a share of the columns is updated on the device, the rest rarely.

At each step AdamW on the device updates the columns whose gradients were largest when they were
chosen, and all vectors, during the backward pass. The gradients of everything else add up in host
memory, where CPUAdam makes one update of them in an interval.

Four things DeepSpeed 0.19.8 does wrong without a word. The first and the last are put right in
`trainctl.engines.deepspeed.changes`, the others here:

- Its flat buffers hold matrices transposed, but the model's weights are cut out of them as if they
  did not: every matrix is scrambled (zero/stage_1_and_2.py, `_update_model_bit16_weights`).
- The optimizer on the device has one weight decay for all groups (zenflow_stage_1_and_2.py).
- It makes its update with the learning rate of the step before (engine.py, `step`).
- Each choice of columns rounds all master weights to the weights' format
  (`sync_fp32_param_from_gpu`), where only those of the updated columns are out of date.
"""

from __future__ import annotations

import torch

from trainctl.engines.deepspeed.engine import DeepSpeedEngine
from trainctl.engines.protocol import Job


class ZenFlowEngine(DeepSpeedEngine):
    """An engine whose optimizer is ZenFlow's: data-parallel, one micro-batch a step."""

    updates_early = True

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
        # The engine's `step` does so too, after the backward pass that has used the rate.
        self._zenflow._sync_selective_optimizer_lr()

    def update(self, *, norm: float | None, clip_at: float | None) -> None:
        """Update in host memory, if it is time for that; the columns on the device have been."""
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
        """Of the mean gradient of the steps that the update in host memory was for, if one was."""
        return self._norm

    @property
    def was_skipped(self) -> bool:
        return self._was_skipped

    def resume_at(self, step: int) -> None:
        """Go on after `step` steps: what the columns had of moments is gone, so choose anew.

        DeepSpeed chooses at the end of the warm-up.
        """
        self.deepspeed.micro_steps = step
        self._zenflow.micro_step = step - 1
        for counted in (self.deepspeed, self._zenflow):
            counted.full_warm_up_rounds = max(step, counted.full_warm_up_rounds)
