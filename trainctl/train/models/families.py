"""Lookup of modules in a transformers model by the facts of its family."""

from __future__ import annotations

from torch import nn
from transformers.modeling_utils import PreTrainedModel

from trainctl.errors import TrainctlError
from trainctl.options.model import Family, families, of_type


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
