"""Multi-token prediction (DeepSeek-V3, arXiv:2412.19437, section 2.2)."""

from __future__ import annotations

from dataclasses import dataclass

from trainctl.config.schema import ObjectiveConfig
from trainctl.config.schema.option import option
from trainctl.options.objective import Objective


@dataclass
class MultiTokenConfig(ObjectiveConfig):
    """Keys of multi-token prediction."""

    future_tokens: int = option(
        1,
        "Further tokens that each position predicts beside the next one, each by a block of its "
        "own behind the last one.",
        minimum=1,
        maximum=8,
    )
    future_weight: float = option(
        0.3,
        "Weight of the mean of the further tokens' cross entropies in the loss: lambda of "
        "arXiv:2412.19437.",
        above=0,
    )


SPEC = Objective(
    name="multi_token",
    keys=MultiTokenConfig,
    future_blocks=lambda section: section.future_tokens,
    measures=("future_cross_entropy",),
)
