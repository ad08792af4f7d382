"""Rollouts: answers that the model in training writes to prompts, for an objective to judge."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class RolloutRow:
    """One answer to generate."""

    prompt: tuple[int, ...]
    """Token ids of the prompt; at least one."""
    number: int
    """Number of the prompt among all prompts of the run. A prompt that comes again, in a later
    epoch, needs another number to get other answers.
    """
    sample: int
    """Number of the answer among the answers to this prompt."""


@dataclass(frozen=True, slots=True)
class Completion:
    """A generated answer."""

    ids: np.ndarray
    """Token ids, (tokens,) int64, with the token that ended the answer."""
    log_probabilities: np.ndarray
    """Log-probability of each token in nats, (tokens,) fp32, under the distribution that
    `trainctl.train.rollouts.sampling.Sampler` names.
    """
    is_finished: bool
    """Whether the answer ended by itself; False if it was cut at the most tokens allowed."""
