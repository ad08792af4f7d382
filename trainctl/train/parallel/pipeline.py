"""Pipeline parallelism: cutting a model to a stage, and a stage's forward pass.

A stage is transformers' own decoder with only the stage's blocks. So positions, masks and all else
that an architecture does around its blocks stay in transformers' code.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers.modeling_utils import PreTrainedModel

from trainctl.engines.micro_batch import document_lengths
from trainctl.engines.process import Axis, ProcessMesh
from trainctl.plans.types import RunPlan
from trainctl.train.models.module import ModuleModel, shallow_copy
from trainctl.train.models.varlen import has_flash_attention
from trainctl.train.objectives.loss import LossModule
from trainctl.train.parallel.module_plan import cut_module_to_stage, vocabulary_layers
from trainctl.train.parallel.shard_plan import MULTIPLIERS, shard_plan_of
from trainctl.train.parallel.tensor import vocabulary_of


def cut_to_stage(model: PreTrainedModel, blocks: Sequence[int], axis: Axis) -> None:
    """Cut a skeleton to a stage: its blocks, the first stage's embedding, the last stage's head."""
    if isinstance(model, ModuleModel):
        cut_module_to_stage(model, blocks, axis)
        return
    where = shard_plan_of(model)
    decoder = getattr(model, where.decoder)
    config = copy.deepcopy(decoder.config)
    config.num_hidden_layers = len(blocks)
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[block] for block in blocks]
    decoder.config = config
    held = getattr(decoder, where.blocks)
    setattr(decoder, where.blocks, nn.ModuleList(held[block] for block in blocks))
    if not axis.is_first:
        for name in (where.embedding, *where.entry):
            setattr(decoder, name, nn.Identity())
        if where.positions is not None:
            setattr(decoder, where.positions, _NoPositions())
        for name in MULTIPLIERS:
            if hasattr(decoder, name):
                setattr(decoder, name, 1.0)  # the first stage has applied it
    if not axis.is_last:
        setattr(decoder, where.final_norm, nn.Identity())
        setattr(model, where.head, nn.Identity())


class _NoPositions(nn.Module):
    """Stand-in for a position embedding that the first stage has already added."""

    def forward(self, position_ids: torch.Tensor) -> torch.Tensor:
        return torch.zeros((), device=position_ids.device)


class PipelineStage(LossModule):
    """A pipeline stage: token ids or hidden states in, hidden states or (last stage) logits out.

    If documents are masked, the positions travel with the hidden states.

    Args:
        axis: The stage's place among all stages.
        z_loss: Weight of the squared log-normalisers, in training.
    """

    def __init__(
        self, model: PreTrainedModel, mesh: ProcessMesh, axis: Axis, z_loss: float = 0.0
    ) -> None:
        super().__init__(vocabulary_of(model, mesh.tensor), z_loss)
        # The last stage keeps the whole model, which may scale or cap the logits behind its head.
        self._is_module = isinstance(model, ModuleModel)
        is_whole = axis.is_last or self._is_module
        self.model = model if is_whole else getattr(model, shard_plan_of(model).decoder)
        self._axis = axis
        self._has_flash_attention = has_flash_attention(model)

    def forward(self, received: torch.Tensor | tuple[torch.Tensor, torch.Tensor]) -> Any:
        states, positions = received if isinstance(received, tuple) else (received, None)
        if self._is_module and not self._axis.is_last:
            hidden = self.model.hidden_states(states, positions)
            return hidden if positions is None else (hidden, positions)
        is_first = self._axis.is_first or self._is_module
        name = "input_ids" if is_first else "inputs_embeds"
        inputs = {name: states, "position_ids": positions, "use_cache": False}
        if positions is not None and self._has_flash_attention:
            inputs |= document_lengths(positions, positions.device)
        output = self.model(**inputs)
        if self._axis.is_last:
            return output.logits
        hidden = output.last_hidden_state
        return hidden if positions is None else (hidden, positions)


def stages_of_rank(model: PreTrainedModel, plan: RunPlan, mesh: ProcessMesh) -> nn.ModuleList:
    """Return the stages of a rank's part of the model, in the order of the forward pass.

    Two stages are copies of the modules around the blocks, each with its own blocks; parameters are
    the same.
    """
    z_loss, axis = plan.config.stability.z_loss, mesh.pipeline
    if not axis.is_folded:
        return nn.ModuleList([PipelineStage(model, mesh, axis, z_loss)])
    numbers, stages, start = range(len(plan.stages)), nn.ModuleList(), 0
    for number in plan.stages_of(axis.index):
        place, end = Axis(number, tuple(numbers), axis.group), start + plan.stage_blocks[number]
        if isinstance(model, ModuleModel):
            part: PreTrainedModel = model.shallow_copy()
        else:
            part, decoder = shallow_copy(model), shard_plan_of(model).decoder
            setattr(part, decoder, shallow_copy(getattr(model, decoder)))
        cut_to_stage(part, range(start, end), place)
        stages.append(PipelineStage(part, mesh, place, z_loss))
        start = end
    return stages


def tied_weight(model: PreTrainedModel, axis: Axis) -> nn.Parameter | None:
    """Return the weight of the embedding on the first stage, of the head on the last; None between.

    The two are one tied parameter.
    """
    if isinstance(model, ModuleModel):
        (layer,) = vocabulary_layers(model) or (None,)
        return getattr(layer, "weight", None)
    where = shard_plan_of(model)
    if axis.is_first:
        return getattr(getattr(model, where.decoder), where.embedding).weight
    return getattr(model, where.head).weight if axis.is_last else None
