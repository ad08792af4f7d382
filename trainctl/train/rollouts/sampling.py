"""Sampling of tokens by counters: each random number is a function of its place alone."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True, slots=True)
class Sampler:
    """Settings by which tokens are drawn from logits.

    The log-probability of a token is under the softmax of logits / temperature over the whole
    vocabulary. `top_k` and `top_p` decide which tokens can be drawn, and do not renormalise it
    (docs/decisions/049-rollouts.md says why).
    """

    seed: int
    temperature: float = 1.0
    top_p: float = 1.0
    """Draw from the fewest most probable tokens whose probabilities sum to at least this."""
    top_k: int = 0
    """Draw from this many most probable tokens; 0 from all. Equally probable tokens stay together,
    so that no order of equals matters.
    """

    def numbers(self, number: int, sample: int, count: int) -> np.ndarray:
        """Return the random numbers in [0, 1) of an answer's first `count` tokens, fp64.

        numpy's Philox4x64-10 (Random123, SC 2011): the seed is its key, prompt and sample are words
        of its counter, and the position is the place in the stream that begins there.
        """
        generator = np.random.Philox(key=self.seed, counter=[0, number, sample, 0])
        # Only the raw stream is guaranteed to stay the same in all versions of numpy (NEP 19).
        bits: np.ndarray = np.atleast_1d(generator.random_raw(count)) >> np.uint64(11)
        return bits * 2.0**-53

    def draw(
        self, logits: torch.Tensor, numbers: torch.Tensor, vocab_size: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the drawn tokens, (rows,) int64, and their log-probabilities, (rows,) fp32.

        Args:
            logits: (rows, vocabulary), any floating type.
            numbers: Random number of each row, (rows,) fp64.
            vocab_size: Number of ids to draw from, from 0; None is all. The softmax is over the
                logits beyond them too, as the trainer's is.
        """
        scores = (logits.float() / self.temperature).log_softmax(dim=-1)
        # Integers: a sum of floating-point numbers has no fixed order on a GPU. They are summed in
        # order of ids: rounding moves a token's borders, never its place.
        shares = (scores[:, :vocab_size].exp().double() * 2.0**52).long()
        borders = self._truncated(shares).cumsum(dim=-1)
        total = borders[:, -1]
        place = torch.minimum((numbers * total).long(), total - 1)
        tokens = torch.searchsorted(borders, place[:, None], right=True)
        tokens = tokens.clamp(max=borders.shape[-1] - 1)  # of NaN it is beyond; the loss tells
        return tokens[:, 0], scores.gather(-1, tokens)[:, 0]

    def _truncated(self, shares: torch.Tensor) -> torch.Tensor:
        """Return the shares with zeros in place of those that cannot be drawn."""
        if 0 < self.top_k < shares.shape[-1]:
            shares = shares.where(shares >= shares.topk(self.top_k).values[:, -1:], 0)
        if self.top_p < 1:
            ordered = shares.sort(dim=-1, descending=True).values
            before = ordered.cumsum(dim=-1) - ordered
            # Relative to the sum: after `top_k` it is below 1.
            is_kept = before < self.top_p * ordered.sum(dim=-1, keepdim=True)
            shares = shares.where(
                shares >= ordered.where(is_kept, ordered[:, :1]).amin(-1, True), 0
            )
        return shares
