"""Losses of sampled answers: GRPO (arXiv:2402.03300) and its variants.

The advantage of an answer comes from the rewards of all answers to its prompt. It is computed once,
before any micro-batch, and so is the divisor of an answer's loss: neither depends on the layout.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from trainctl.options.objective.grpo import Advantage, GrpoConfig, NormalizeBy, Ratio
from trainctl.train.objectives.base import Measured

STANDARD_DEVIATION_EPSILON = 1e-4
"""Added to the standard deviation that an advantage is divided by, as TRL does."""

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class SeenAnswers:
    """Model outputs for sampled answers; tensors are (samples, length) or (samples,), fp32."""

    log_probabilities: torch.Tensor
    """Log-probability of each token of an answer, in nats; 0 elsewhere."""
    is_answer: torch.Tensor
    """Whether a position has a label, which is a token of the answer."""
    sampled: torch.Tensor
    """Log-probabilities by the program that sampled the answer; NaN where it gave none."""
    old: torch.Tensor | None
    """Log-probabilities by this trainer with the weights that sampled the answer; None if these are
    the weights of this pass.
    """
    reference: torch.Tensor | None
    """Log-probabilities under the weights before the first step; None if nothing needs them."""
    advantages: torch.Tensor
    divisors: torch.Tensor
    """Divisor of an answer's summed loss (`divisors_of`)."""
    mean_tokens: torch.Tensor
    """Mean number of tokens of an answer in the global batch."""


def grpo(config: GrpoConfig, seen: SeenAnswers) -> Measured:
    """Return the clipped loss of each answer, equation 3 of arXiv:2402.03300, and its measures.

    A token's loss is multiplied by its truncated importance weight, min(p_trainer / p_rollout,
    cap), which corrects the difference between the two programs. With a `kl_weight`, it adds the
    estimate r - log r - 1 of the KL divergence, r = p_reference / p (equation 4).
    """
    counted = seen.is_answer
    logs = seen.log_probabilities
    old = logs.detach() if seen.old is None else seen.old
    advantages = seen.advantages[:, None]
    log_ratio = (logs - old).masked_fill(~counted, 0.0)
    if config.ratio is Ratio.sequence:  # equation 7 of arXiv:2507.18071
        lengths = counted.sum(dim=1, keepdim=True).clamp(min=1)
        log_ratio = log_ratio.sum(dim=1, keepdim=True) / lengths
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    losses = -torch.minimum(ratio * advantages, clipped * advantages)
    difference = (old - seen.sampled).nan_to_num(nan=0.0).masked_fill(~counted, 0.0)
    importance = difference.exp().clamp(max=config.importance_cap)
    losses = losses * importance
    divergence = torch.zeros_like(logs)
    if seen.reference is not None:
        log_reference = seen.reference - logs
        divergence = log_reference.exp() - log_reference - 1
        losses = losses + config.kl_weight * divergence
    measures = {
        "mismatch": difference.abs(),
        "importance": importance,
        "clipped": (ratio * advantages > clipped * advantages).float().expand_as(logs),
        "kl": divergence.detach(),
        "entropy": -logs.detach(),
        "advantage": advantages.abs().expand_as(logs),
    }
    return (
        _sums(losses, counted) / seen.divisors,
        {name: _sums(each, counted) / seen.mean_tokens for name, each in measures.items()},
    )


def _sums(values: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
    """Return the sums over the tokens of each answer, (samples,)."""
    return values.masked_fill(~counted, 0.0).sum(dim=1)


def advantages_of(config: GrpoConfig, rewards: Floats) -> Floats:
    """Return the advantages of the answers to each prompt, (prompts, samples).

    Args:
        rewards: Weighted sums of the rewards, (prompts, samples); NaN of an answer that no reward
            function judged, whose advantage is 0.
    """
    known = ~np.isnan(rewards)
    count = known.sum(axis=1, keepdims=True)
    values = np.where(known, rewards, 0.0).astype(np.float64)
    mean = values.sum(axis=1, keepdims=True) / np.maximum(count, 1)
    found = np.where(known, values - mean, 0.0)
    match config.advantage:
        case Advantage.standardized:
            squares = np.square(found).sum(axis=1, keepdims=True)
            deviation = np.sqrt(squares / np.maximum(count - 1, 1))
            found = found / (deviation + STANDARD_DEVIATION_EPSILON)
        case Advantage.leave_one_out:  # less the mean of the others, arXiv:2402.14740
            found = found * count / np.maximum(count - 1, 1)
        case Advantage.centered:  # arXiv:2503.20783
            pass
    return found.astype(np.float32)


def divisors_of(config: GrpoConfig, lengths: npt.NDArray[np.int64]) -> Floats:
    """Return the divisor of each answer's summed loss, before the mean over the answers.

    Args:
        lengths: Tokens of all answers of the global batch, (answers,).
    """
    match config.normalize_by:
        case NormalizeBy.answer:
            found = np.maximum(lengths, 1)
        case NormalizeBy.tokens:  # arXiv:2503.14476, equation 8
            found = np.full(len(lengths), max(lengths.mean(), 1.0))
        case NormalizeBy.length:  # arXiv:2503.20783
            found = np.full(len(lengths), config.max_answer_tokens)
    return found.astype(np.float32)
