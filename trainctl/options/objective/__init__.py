"""Specification of a training objective: what it counts, and what it is computed from.

The loss of a step is the sum over all labels (or pairs) in the global batch, divided by their
number, never a mean of the ranks' means. So it is the same on every layout.
"""

from __future__ import annotations

from dataclasses import dataclass

from trainctl.config.registry import Spec, load_spec
from trainctl.config.schema import ObjectiveConfig

TOKENS, PAIRS = "tokens", "pairs"

REWARDS = ("reward_chosen", "reward_rejected", "margin", "accuracy")
"""Measures of preference objectives: the two rewards, their difference, and how often the preferred
answer's reward is larger.
"""

ANSWERS = ("log_probability_chosen", "log_probability_rejected")
"""Measures of all objectives of pairs; a reference consists of their values."""


@dataclass(frozen=True, kw_only=True)
class Objective(Spec):
    """Specification of a training loss, computed from the model's output for a sample's tokens.

    A rank calls its `build` with its section and the model's output of a forward pass:
    `trainctl.train.objectives.base.SeenTokens`, or `SeenPairs` if it counts pairs. It returns the
    losses, one for each label (or pair), and a mapping with `measures` of the same shape. The
    objective `next_token` has no `build`: its loss is the model's, by any of
    `kernels.cross_entropy`.
    """

    keys: type = ObjectiveConfig
    counts: str = PAIRS
    """`TOKENS`: every token with a label has the same weight. `PAIRS`: a sample is two answers to a
    prompt, one of them preferred, and every pair has the same weight.
    """
    needs_reference: bool = False
    """Whether it compares with log-probabilities under the weights before the first step. These are
    computed once, and kept with the run.
    """
    measures: tuple[str, ...] = ()
    """Measures recorded beside the loss, as means over the labels (or pairs). Objectives of pairs
    also record the two answers' log-probabilities.
    """

    @property
    def is_entropy(self) -> bool:
        """Whether its loss is the cross entropy of tokens, so that its exponential is a
        perplexity.
        """
        return not self.build

    @property
    def recorded(self) -> tuple[str, ...]:
        """Names of all measures recorded beside the loss."""
        return (*self.measures, *(ANSWERS if self.counts == PAIRS else ()))


def objective_of(section: ObjectiveConfig) -> Objective:
    """Return the specification of the configured objective.

    Raises:
        TrainctlError: The package that provides it is not installed here.
    """
    spec = load_spec("objective", section.kind)
    assert isinstance(spec, Objective)
    return spec
