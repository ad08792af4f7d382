"""Multipliers of the maximal-update parametrisation: applied to the model, and folded into exports.

`trainctl.plan.mup` has the table of multipliers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.modeling_utils import PreTrainedModel

from trainctl.config.schema import ModelConfig
from trainctl.errors import TrainctlError
from trainctl.options.model import Family, families, of_type, spec_of
from trainctl.plan.mup import multipliers
from trainctl.plan.shapes import final_norm_tensors, head_dim


def apply_multipliers(model: PreTrainedModel, config: ModelConfig) -> None:
    """Multiply the logits and the attention scores of a skeleton, wherever they are computed.

    The factor of the logits is applied to the head's input, which is equivalent and cheaper. Every
    loss, evaluation and sample goes through the head.
    """
    if not config.mup:
        return
    family, factors = family_of(model), multipliers(config)
    getattr(model, family.head).register_forward_pre_hook(_multiplied_input(factors["output"]))
    for block in blocks_of(model):
        attention: Any = getattr(block, family.attention.module)
        # transformers' attention modules keep their factor here; no config option sets it.
        attention.scaling *= factors["attention"]


def _multiplied_input(factor: float) -> Any:
    def hook(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (args[0] * factor, *args[1:])

    return hook


def fold_multipliers(
    model: ModelConfig, name: str, shape: torch.Size, start: int, values: torch.Tensor
) -> torch.Tensor:
    """Return weights for the same model without multipliers, with these folded in.

    The factor of the logits goes into the norm before the head, so it does not matter whether
    the head is tied to the embedding. The factor of attention goes into the query projection
    (rotary embeddings keep the factor).

    Args:
        name: Canonical name of the parameter.
        shape: Shape of the whole parameter.
        start: Index of the first element of `values` in the flattened parameter.
        values: Some of its elements, flat.
    """
    if not model.mup:
        return values
    factors = multipliers(model)
    if name in {tensor.name for tensor in final_norm_tensors(model)}:
        return values * factors["output"]
    module = name.rpartition(".")[0]
    if factors["attention"] == 1:
        return values
    spec = spec_of(model)
    attention = spec.attention
    queries = (*attention.per_head, *attention.columns)[0]
    if not module.endswith(f".{attention.module}.{queries}"):
        return values
    if attention.fused == 1:
        return values * factors["attention"]
    # Queries, keys and values lie side by side: find the output that each element belongs to.
    element = torch.arange(start, start + values.numel(), device=values.device)
    is_by_row = len(shape) > 1 and not spec.inputs_first
    output = element // shape[-1] if is_by_row else element % shape[-1]
    is_query = output < model.num_attention_heads * head_dim(model)
    return torch.where(is_query, values * factors["attention"], values)


def family_of(model: PreTrainedModel) -> Family:
    """Return the family of a model, looked up by its `model_type` in transformers.

    Raises:
        TrainctlError: trainctl has no family for this architecture.
    """
    family = of_type(model.config.model_type)
    if family is None:
        known = ", ".join(spec.name for spec in families())
        raise TrainctlError(
            f"muP and the loss's kernels do not know the {model.config.model_type} architecture; "
            f"they know {known}",
        )
    return family


def blocks_of(model: PreTrainedModel) -> nn.ModuleList:
    """Return the list of the model's blocks."""
    family = family_of(model)
    found = getattr(getattr(model, family.decoder), family.blocks)
    assert isinstance(found, nn.ModuleList)
    return found
