"""What an objective says of itself: what it counts, and what it is computed from.

The loss of a step is the sum over all that is counted in the global batch, divided by their number:
never a mean of the ranks' means. So it is the same on every layout.
"""

from __future__ import annotations

from dataclasses import dataclass

from trainctl.config.registry import Spec, load
from trainctl.config.schema import ObjectiveConfig

TOKENS, PAIRS = "tokens", "pairs"

REWARDS = ("reward_chosen", "reward_rejected", "margin", "accuracy")
"""Of objectives that rank two answers: their rewards, how much larger the preferred one's is, and
how often it is larger."""

ANSWERS = ("log_probability_chosen", "log_probability_rejected")
"""Measures that all objectives of pairs have, and what a reference is made of."""


@dataclass(frozen=True, kw_only=True)
class Objective(Spec):
    """A loss of what the model says of a sample's tokens.

    Its `build` is called on a rank with its section and, for a forward pass, what the model gave:
    `trainctl.train.objectives.base.SeenTokens`, or `SeenPairs` where it counts pairs. It gives the
    losses, one for each of what is counted, and a mapping with `measures`, of the same shape. The
    next token's own loss has none: it is the model's, by any of `kernels.cross_entropy`.
    """

    keys: type = ObjectiveConfig
    counts: str = PAIRS
    """`TOKENS`: every token that has a label has the same weight. `PAIRS`: a sample is two answers
    to a prompt, one of them preferred, and every pair has the same weight."""
    needs_reference: bool = False
    """Whether it compares with what the weights before the first step said. That is computed once,
    and kept with the run."""
    measures: tuple[str, ...] = ()
    """What is recorded beside the loss, as a mean over what is counted; all that count pairs have
    the two answers' log-probabilities as well."""

    @property
    def is_entropy(self) -> bool:
        """Whether its loss is the cross entropy of tokens, whose exponent is a perplexity."""
        return not self.build

    @property
    def recorded(self) -> tuple[str, ...]:
        """Names of all that is recorded beside the loss."""
        return (*self.measures, *(ANSWERS if self.counts == PAIRS else ()))


def objective_of(section: ObjectiveConfig) -> Objective:
    """Of the kind that a configuration has.

    Raises:
        TrainctlError: A package that brings it is not installed here.
    """
    spec = load("objective", section.kind)
    assert isinstance(spec, Objective)
    return spec
