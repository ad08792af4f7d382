"""Kahneman-Tversky optimization (KTO, arXiv:2402.01306): from labels of single answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from trainctl.config.schema import ObjectiveConfig
from trainctl.config.schema.option import option
from trainctl.options.data import SampleKind
from trainctl.options.objective import RECORDS, REFERENCE, Objective


@dataclass
class KtoConfig(ObjectiveConfig):
    """Keys of KTO."""

    beta: float = option(
        0.1, "Strength of the KL constraint to the reference: reward per nat of log-ratio.", above=0
    )
    desirable_weight: float = option(
        1.0, "Weight of the loss of good answers: lambda_D of the paper.", minimum=0
    )
    undesirable_weight: float = option(
        1.0, "Weight of the loss of bad answers: lambda_U of the paper.", minimum=0
    )


def metrics(section: KtoConfig, sums: Mapping[str, float], number: float) -> dict[str, float]:
    """Return the mean rewards of good and of bad answers, their difference, and the baseline."""
    good = sums["desirable"]
    chosen = sums["reward_desirable"] / max(1.0, good)
    rejected = sums["reward_undesirable"] / max(1.0, number - good)
    return {
        "reward_desirable": chosen,
        "reward_undesirable": rejected,
        "margin": chosen - rejected,
        "kl": sums["kl"] / max(1.0, number),
    }


SPEC = Objective(
    name="kto",
    keys=KtoConfig,
    takes=SampleKind.answers,
    counts=RECORDS,
    passes=2,
    build="trainctl.train.objectives.preferences:log_ratios",
    whole="trainctl.train.objectives.preferences:kto",
    stored=(REFERENCE,),
    measures=("desirable", "reward_desirable", "reward_undesirable", "kl"),
    metrics=metrics,
)
