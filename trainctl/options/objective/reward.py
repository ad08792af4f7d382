"""Reward model of pairs: the preferred answer gets the larger number (Bradley-Terry)."""

from __future__ import annotations

from dataclasses import dataclass

from trainctl.config.schema import ObjectiveConfig
from trainctl.config.schema.option import option
from trainctl.options.data import SampleKind
from trainctl.options.objective import RECORDS, REWARDS, SCORES, Head, Objective


@dataclass
class RewardModelConfig(ObjectiveConfig):
    """Keys of a reward model."""

    centering: float = option(
        0.0,
        "Weight of the squared sum of both rewards, which keeps rewards around 0 "
        "(arXiv:2312.09244).",
        minimum=0,
    )


HEAD = Head(
    outputs=lambda section: 1,
    settings=lambda section: {
        "problem_type": "regression",
        "id2label": {0: "reward"},
        "label2id": {"reward": 0},
    },
)
"""Head of one number for a text."""

SPEC = Objective(
    name="reward",
    keys=RewardModelConfig,
    build="trainctl.train.objectives.scores:reward",
    takes=SampleKind.pairs,
    counts=RECORDS,
    reads=SCORES,
    head=HEAD,
    measures=REWARDS,
    whole_samples="an answer's score is that of its last token",
)
