"""Loss functions of preference objectives, as in their papers."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from trainctl.options.objective.dpo import DpoConfig, PreferenceLoss
from trainctl.options.objective.orpo import OrpoConfig
from trainctl.options.objective.simpo import SimpoConfig
from trainctl.train.objectives.base import Measured, SeenPairs


def dpo(config: DpoConfig, pairs: SeenPairs) -> Measured:
    """Return the DPO loss, -log sigmoid(margin), equation 7 of arXiv:2305.18290.

    With label smoothing, it is the weighted mean of the losses of both orders. The margin is
    the difference of the rewards: beta times the log-ratio of policy to reference. IPO
    (arXiv:2310.12036, equation 17) uses means over the tokens, as its authors do.
    """
    chosen = pairs.chosen - pairs.reference_chosen
    rejected = pairs.rejected - pairs.reference_rejected
    margin = config.beta * (chosen - rejected)
    match config.loss:
        case PreferenceLoss.sigmoid:
            wrong = config.label_smoothing
            losses = -(1 - wrong) * F.logsigmoid(margin) - wrong * F.logsigmoid(-margin)
        case PreferenceLoss.hinge:
            losses = F.relu(1 - margin)
        case PreferenceLoss.ipo:
            means = chosen / pairs.chosen_tokens - rejected / pairs.rejected_tokens
            losses = (means - 1 / (2 * config.beta)).square()
    return losses, rewards(config.beta * chosen, config.beta * rejected)


def simpo(config: SimpoConfig, pairs: SeenPairs) -> Measured:
    """Return the SimPO loss, -log sigmoid(margin - gamma), equation 6 of arXiv:2405.14734."""
    chosen = config.beta * pairs.chosen / pairs.chosen_tokens
    rejected = config.beta * pairs.rejected / pairs.rejected_tokens
    losses = -F.logsigmoid(chosen - rejected - config.gamma_ratio * config.beta)
    return losses, rewards(chosen, rejected)


def orpo(config: OrpoConfig, pairs: SeenPairs) -> Measured:
    """Return the ORPO loss, equation 6 of arXiv:2403.07691.

    It is the chosen answer's mean loss, minus `weight` times log sigmoid(log odds ratio). The
    odds of an answer are p / (1 - p), where log p is its mean log-probability.
    """
    chosen = pairs.chosen / pairs.chosen_tokens
    rejected = pairs.rejected / pairs.rejected_tokens
    odds = (chosen - rejected) - (_log_of_rest(chosen) - _log_of_rest(rejected))
    losses = -chosen - config.weight * F.logsigmoid(odds)
    measures = rewards(config.weight * chosen, config.weight * rejected)
    return losses, {**measures, "chosen_loss": -chosen}


def rewards(chosen: torch.Tensor, rejected: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the measures of `trainctl.options.objective.REWARDS`, (samples,) each."""
    return {
        "reward_chosen": chosen,
        "reward_rejected": rejected,
        "margin": chosen - rejected,
        "accuracy": (chosen > rejected).float(),
    }


def _log_of_rest(log_probability: torch.Tensor) -> torch.Tensor:
    """Return log(1 - p), precise for p near 0 and near 1.

    p = 1 gives a finite value; its exact logarithm would have no gradient.
    """
    return torch.log(-torch.expm1(log_probability.clamp(max=-1e-12)))
