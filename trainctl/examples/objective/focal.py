"""Focal loss (arXiv:1708.02002): tokens that the model knows already count less."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trainctl.config.schema import ObjectiveConfig
from trainctl.config.schema.option import option
from trainctl.options.objective import Objective


@dataclass
class FocalKeys(ObjectiveConfig):
    """Keys of `objective=focal`."""

    focus: float = option(2.0, "Exponent of what a token's probability lacks to 1.", minimum=0)


def loss(config: FocalKeys, tokens: Any) -> Any:
    """Return -(1 - p)^focus log p of each token, and whether the model gave it more than half."""
    probability = tokens.log_probabilities.exp()
    losses = -((1 - probability) ** config.focus) * tokens.log_probabilities
    return losses, {"sure": (probability > 0.5).float()}


SPEC = Objective(name="focal", keys=FocalKeys, build=loss, whole_samples="", measures=("sure",))
