"""DeepSpeed's engine around the model, and the few things that the trainer asks of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import deepspeed
import torch
from torch import nn
from transformers.modeling_utils import PreTrainedModel

from trainctl.config.schema import OptimizerConfig
from trainctl.plan.types import RunPlan
from trainctl.train.data import MicroBatch
from trainctl.train.loss import summed_cross_entropy
from trainctl.train.process import Process


class Engine:
    """A model that trains: forward, backward, update.

    Args:
        plan: The plan of the run.
        process: This rank.
        model: With its weights, whole or partitioned as the plan's ZeRO stage wants.
    """

    def __init__(self, plan: RunPlan, process: Process, model: PreTrainedModel) -> None:
        self._plan = plan
        self._process = process
        self.names = {parameter: name for name, parameter in model.named_parameters()}
        self.groups = parameter_groups(model, plan.config.optimizer)
        self.deepspeed, *_ = deepspeed.initialize(
            model=model,
            model_parameters=self.groups,
            config=plan.deepspeed,
            dist_init_required=False,
        )
        self._forget_initial_step()

    def _forget_initial_step(self) -> None:
        """Undo the update that DeepSpeed makes to allocate states, without ZeRO in low precision.

        Left alone it would count as the first step of Adam's bias correction. (The groups start
        with a learning rate of 0, so the weights have not moved.)
        """
        if self.stage == 0 and not self._is_plain:
            self.deepspeed.optimizer.optimizer.state.clear()

    @property
    def stage(self) -> int:
        return self._plan.config.zero_stage.stage

    def logits(self, batch: MicroBatch) -> torch.Tensor:
        """(samples, length, vocabulary) of the model on this rank's device."""
        return self.deepspeed(**batch.model_inputs(self._process.device)).logits

    def accumulate(self, batches: Sequence[MicroBatch]) -> tuple[float, float]:
        """Forward and backward over a step's micro-batches, leaving the mean gradient.

        Every label of the global batch has the same weight, on whichever rank and in whichever
        micro-batch it is: DeepSpeed averages gradients over the data-parallel ranks, so each sum is
        scaled by their number over the count of labels.

        Returns:
            The mean loss in nats over the global batch's labels, and their number.
        """
        num_labels = float(self._plan.batch.tokens_per_step)
        if batches[0].is_masked:  # otherwise every position has a label: no rank needs to ask
            (num_labels,) = self._process.sum(sum(batch.num_labels for batch in batches))
        scale = self._plan.mesh.data / max(1.0, num_labels)
        total = torch.zeros((), dtype=torch.float64)
        for index, batch in enumerate(batches):
            labels = batch.labels.to(self._process.device, non_blocking=True)
            loss = summed_cross_entropy(self.logits(batch), labels)
            self.deepspeed.backward(loss * scale, scale_wrt_gas=False)
            total += loss.detach().double().cpu()
            if index + 1 < len(batches):
                self.deepspeed.step()  # not at the boundary: only counts the micro-step
        (loss_sum,) = self._process.sum(float(total))
        return loss_sum / max(1.0, num_labels), num_labels

    def update(self, learning_rate_factor: float) -> float:
        """Clip, step the optimizer, clear the gradients; the global gradient norm before clipping.

        Args:
            learning_rate_factor: Of each group's peak learning rate, for this update.
        """
        for group in self.deepspeed.optimizer.param_groups:
            group["lr"] = group["peak_lr"] * learning_rate_factor
        # Without ZeRO and in fp32 DeepSpeed hands the update to torch and keeps no norm.
        norm = self._own_gradient_norm() if self._is_plain else None
        self.deepspeed.step()
        return norm if norm is not None else float(self.deepspeed.get_global_grad_norm())

    @property
    def _is_plain(self) -> bool:
        return isinstance(self.deepspeed.optimizer, torch.optim.Optimizer)

    def _own_gradient_norm(self) -> float:
        gradients = [p.grad for p in self.names if p.grad is not None]
        return float(nn.utils.get_total_norm(gradients))

    def close(self) -> None:
        """Release DeepSpeed's threads and buffers; must come before the process groups go."""
        self.deepspeed.destroy()


def parameter_groups(model: nn.Module, config: OptimizerConfig) -> list[dict[str, Any]]:
    """Optimizer groups: matrices with weight decay; norms, biases and embeddings without.

    A tied output projection is an embedding. Empty groups are left out.
    """
    embeddings = {
        id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)
    }
    decayed: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    for parameter in model.parameters():
        shape = getattr(parameter, "ds_shape", parameter.shape)
        embedding = id(parameter) in embeddings and not config.decay_embeddings
        (plain if len(shape) < 2 or embedding else decayed).append(parameter)
    common = {"lr": 0.0, "peak_lr": config.lr}
    groups = [
        {"params": decayed, "weight_decay": config.weight_decay, **common},
        {"params": plain, "weight_decay": 0.0, **common},
    ]
    return [group for group in groups if group["params"]]
