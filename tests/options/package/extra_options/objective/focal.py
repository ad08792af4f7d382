"""Focal loss (arXiv:1708.02002): tokens that the model knows already count less."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trainctl.config.schema import ObjectiveConfig
from trainctl.config.schema.option import option
from trainctl.options.objective import TOKENS, Objective


@dataclass
class FocalConfig(ObjectiveConfig):
    """Keys of `objective=focal`."""

    focus: float = option(2.0, "Exponent of what a token's probability lacks to 1.", minimum=0)


def focal(config: FocalConfig, tokens: Any) -> Any:
    """-(1 - p)^focus log p of each token, and how often the model was surer than not."""
    probability = tokens.log_probabilities.exp()
    losses = -((1 - probability) ** config.focus) * tokens.log_probabilities
    return losses, {"sure": (probability > 0.5).float()}


SPEC = Objective(
    name="focal",
    keys=FocalConfig,
    counts=TOKENS,
    build="extra_options.objective.focal:focal",
    measures=("sure",),
)
