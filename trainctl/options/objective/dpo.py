"""Direct preference optimization (DPO, arXiv:2305.18290)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from trainctl.config.schema import ObjectiveConfig
from trainctl.config.schema.option import option
from trainctl.options.data import SampleKind
from trainctl.options.objective import RECORDS, REFERENCE, REWARDS, Objective


class PreferenceLoss(Enum):
    """Loss as a function of the margin between two rewards."""

    sigmoid = "sigmoid"
    hinge = "hinge"
    ipo = "ipo"


@dataclass
class DpoConfig(ObjectiveConfig):
    """Keys of DPO."""

    beta: float = option(
        0.1, "Strength of the KL constraint to the reference: reward per nat of log-ratio.", above=0
    )
    loss: PreferenceLoss = option(
        PreferenceLoss.sigmoid,
        "Loss on the reward margin: sigmoid (arXiv:2305.18290), hinge (arXiv:2305.10425), or ipo "
        "(arXiv:2310.12036, per token).",
    )
    label_smoothing: float = option(
        0.0,
        "Assumed fraction of pairs whose preference is reversed (cDPO).",
        minimum=0,
        maximum=0.5,
        needs=(lambda s: s.loss is PreferenceLoss.sigmoid, "objective.loss=sigmoid"),
    )


SPEC = Objective(
    name="dpo",
    keys=DpoConfig,
    takes=SampleKind.pairs,
    counts=RECORDS,
    build="trainctl.train.objectives.preferences:dpo",
    stored=(REFERENCE,),
    measures=REWARDS,
)
