"""Odds ratio preference optimization (ORPO, arXiv:2403.07691): fine-tuning with preferences."""

from __future__ import annotations

from dataclasses import dataclass

from trainctl.config.schema import ObjectiveConfig
from trainctl.config.schema.option import option
from trainctl.options.data import SampleKind
from trainctl.options.objective import RECORDS, REWARDS, Objective


@dataclass
class OrpoConfig(ObjectiveConfig):
    """Keys of ORPO."""

    weight: float = option(
        0.1,
        "Weight of the odds-ratio loss relative to the loss of the chosen answer: lambda of the "
        "paper.",
        above=0,
    )


SPEC = Objective(
    name="orpo",
    keys=OrpoConfig,
    takes=SampleKind.pairs,
    counts=RECORDS,
    build="trainctl.train.objectives.preferences:orpo",
    measures=(*REWARDS, "chosen_loss"),
)
