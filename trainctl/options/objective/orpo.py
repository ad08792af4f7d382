"""Odds ratio preference optimization (ORPO, arXiv:2403.07691): fine-tuning with preferences."""

from __future__ import annotations

from dataclasses import dataclass

from trainctl.config.schema import ObjectiveConfig
from trainctl.config.schema.option import option
from trainctl.options.objective import REWARDS, Objective


@dataclass
class OrpoConfig(ObjectiveConfig):
    """Keys of ORPO."""

    weight: float = option(
        0.1, "Of the odds ratio, beside the chosen answer's own loss: lambda of the paper.", above=0
    )


SPEC = Objective(
    name="orpo",
    keys=OrpoConfig,
    build="trainctl.train.objectives.preferences:orpo",
    measures=(*REWARDS, "chosen_loss"),
)
