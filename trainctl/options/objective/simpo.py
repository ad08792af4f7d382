"""Simple preference optimization (SimPO, arXiv:2405.14734): no reference, rewards by length."""

from __future__ import annotations

from dataclasses import dataclass

from trainctl.config.schema import ObjectiveConfig
from trainctl.config.schema.option import option
from trainctl.options.data import SampleKind
from trainctl.options.objective import RECORDS, REWARDS, Objective


@dataclass
class SimpoConfig(ObjectiveConfig):
    """Keys of SimPO."""

    beta: float = option(2.0, "Reward per nat of an answer's mean log-probability.", above=0)
    gamma_ratio: float = option(
        0.5, "Target reward margin divided by beta: gamma / beta of the paper.", minimum=0
    )


SPEC = Objective(
    name="simpo",
    keys=SimpoConfig,
    takes=SampleKind.pairs,
    counts=RECORDS,
    build="trainctl.train.objectives.preferences:simpo",
    measures=REWARDS,
)
