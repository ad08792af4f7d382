"""Losses of sampled answers: GRPO (arXiv:2402.03300) and its variants.

The advantage of an answer comes from the rewards of all answers to its prompt. It is computed once,
before any micro-batch, and so is the divisor of an answer's loss: neither depends on the layout.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from trainctl.options.objective.grpo import Advantage, GrpoConfig, NormalizeBy, Ratio
from trainctl.train.objectives.base import Measured, SeenTokens

STANDARD_DEVIATION_EPSILON = 1e-4
"""Added to the standard deviation that an advantage is divided by, as TRL does."""

Floats = npt.NDArray[np.float32]


def grpo(config: GrpoConfig, seen: SeenTokens) -> Measured:
    """Return the clipped loss of each answer, equation 3 of arXiv:2402.03300, and its measures.

    Each row is an answer. It has in `stored` what was known before the step: for each token
    `sampled`, its log-probability by the program that sampled it (NaN if unknown), and perhaps
    `old` and `reference`, those under the weights that sampled it (left out if these are the
    weights of this pass) and under the weights before the first step; for the answer `advantages`,
    `divisors` (`divisors_of`), and `mean_tokens`, the mean length of the step's answers.

    A token's loss is multiplied by its truncated importance weight, min(p_trainer / p_rollout,
    cap), which corrects the difference between the two programs. With a `kl_weight`, it adds the
    estimate r - log r - 1 of the KL divergence, r = p_reference / p (equation 4).
    """
    assert seen.beside is not None
    counted, logs, stored = seen.is_counted, seen.log_probabilities, seen.beside.stored
    old = stored.get("old", logs.detach())
    advantages = stored["advantages"][:, None]
    log_ratio = (logs - old).masked_fill(~counted, 0.0)
    if config.ratio is Ratio.sequence:  # equation 7 of arXiv:2507.18071
        lengths = counted.sum(dim=1, keepdim=True).clamp(min=1)
        log_ratio = log_ratio.sum(dim=1, keepdim=True) / lengths
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    losses = -torch.minimum(ratio * advantages, clipped * advantages)
    difference = (old - stored["sampled"]).nan_to_num(nan=0.0).masked_fill(~counted, 0.0)
    importance = difference.exp().clamp(max=config.importance_cap)
    losses = losses * importance
    measures = {"mismatch": difference.abs(), "importance": importance, "entropy": -logs.detach()}
    if config.updates > 1:
        is_clipped = ratio * advantages > clipped * advantages
        measures["clipped"] = is_clipped.float().expand_as(logs)
    if config.kl_weight:
        log_reference = stored["reference"] - logs
        divergence = log_reference.exp() - log_reference - 1
        losses = losses + config.kl_weight * divergence
        measures["kl"] = divergence.detach()
    # The estimate k3 of KL(rollout, trainer), http://joschu.net/blog/kl-approx.html.
    measures["mismatch_kl"] = difference.exp() - 1 - difference
    measures["mismatch_share"] = (difference.abs() > config.mismatch_limit).float()
    means = {n: _sums(each, counted) / stored["mean_tokens"] for n, each in measures.items()}
    return _sums(losses, counted) / stored["divisors"], means


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
