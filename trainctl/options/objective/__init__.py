"""Specification of a training objective: what it takes, reads and counts.

An objective is a function of the global batch. The loss of a step is the sum over all labels (or
records) in the global batch, divided by their number, never a mean of the ranks' means. So it is
the same on every layout.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainctl.config.registry import Spec, spec_lookup
from trainctl.config.schema import ObjectiveConfig
from trainctl.options.data import SampleKind

TOKENS, RECORDS = "tokens", "records"
"""Values of `Objective.counts`."""

LOG_PROBABILITIES, LOGITS, SCORES, HIDDEN_STATES = (
    "log_probabilities",
    "logits",
    "scores",
    "hidden_states",
)
"""Values of `Objective.reads`."""

REFERENCE = "reference"
"""Name of a stored array: log-probabilities of a record's answers under the weights before the
first step, (samples, answers).
"""

STORED = (REFERENCE, "teacher")
"""Names of the stored arrays that a run computes; `teacher` with the keys of `objective=distill`
alone.
"""

REWARDS = ("reward_chosen", "reward_rejected", "margin", "accuracy")
"""Measures of preference objectives: the two rewards, their difference, and how often the preferred
answer's reward is larger.
"""

ANSWERS = ("log_probability_chosen", "log_probability_rejected")
"""Measures of all objectives that read the log-probabilities of pairs; a reference consists of
their values.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """Linear layer `score` in place of the output projection, as transformers'
    `AutoModelForSequenceClassification` has it.
    """

    outputs: Callable[[Any], int]
    """Function that returns the number of outputs for a section."""
    settings: Callable[[Any], dict[str, Any]] = lambda section: {}
    """Function of the section that returns further keys of an exported `config.json`, such as
    `problem_type`.
    """


@dataclass(frozen=True, kw_only=True)
class Objective(Spec):
    """Specification of a training loss, computed from the model's output for a sample's tokens.

    A rank calls its `build` with its section and what a forward pass gave for a micro-batch: one of
    the classes `Seen...` of `trainctl.train.objectives.base`. It returns the losses, one for each
    label or record, and a mapping with `measures` of the same shape. The objective `next_token` has
    no `build`: its loss is the model's, by any of `kernels.cross_entropy`.
    """

    keys: type = ObjectiveConfig
    takes: SampleKind = SampleKind.text
    """Kind of samples, which the run's data source must give."""
    counts: str = TOKENS
    """`TOKENS`: every position with a label has the same weight. `RECORDS`: every sample has."""
    reads: str = LOG_PROBABILITIES
    """Model output that the loss is computed from. `LOG_PROBABILITIES`: of the labels. `LOGITS`: of
    all positions. `SCORES`: of the head, at the last token of each document. `HIDDEN_STATES`: the
    last ones, of all positions, without a head.
    """
    head: Head | None = None
    """Head in place of the language model's; None keeps that."""
    future_blocks: Callable[[Any], int] | None = None
    """Function that returns the number of blocks behind the model's last one for a section, each of
    which predicts a token further ahead; None for none.
    """
    passes: int = 1
    """2 if the loss of a record depends on other records of the global batch. `build` then returns
    the features of each record, (samples, ...), and `whole` the losses from the features of all.
    """
    whole: str = ""
    """`module:function` of the loss of a global batch, with two passes. It is called on every rank
    with the section and a `trainctl.train.objectives.base.WholeBatch`, and returns what `build`
    returns with one pass.
    """
    stored: tuple[str, ...] = ()
    """Names in `STORED` of arrays with a row for each sample, which are computed once before the
    first step and kept with the run.
    """
    measures: tuple[str, ...] | Callable[[Any], tuple[str, ...]] = ()
    """Names of the measures recorded beside the loss, or a function that returns them for a
    section. Objectives that read log-probabilities of pairs also measure these.
    """
    metrics: Callable[[Any, Mapping[str, float], float], dict[str, float]] | None = None
    """Function from a section, the sums of all measures over a global batch or an evaluation, and
    the number of labels (or records) to the numbers that are recorded; None records means.
    """

    whole_samples: str = "a rank sees a part of an answer alone"
    """Reason why a rank needs whole samples. Empty if the loss of a token depends on that token and
    its rows of the stored arrays alone, which are (samples, length, ...): then ranks of the
    sequence and context axes compute it for their parts.
    """
    hides_tokens: bool = False
    """Whether labels are tokens that were hidden in the input, not the next ones."""

    def __post_init__(self) -> None:
        unknown = {*self.stored} - {*STORED}
        if unknown:
            raise ValueError(f"stored={', '.join(sorted(unknown))}: a run computes {STORED} alone")

    @property
    def is_entropy(self) -> bool:
        """Whether its loss is the cross entropy of tokens, so that its exponential is a
        perplexity.
        """
        return not self.build

    @property
    def sees_pairs(self) -> bool:
        """Whether `build` is called with the two log-probabilities of each pair of answers."""
        return self.takes is SampleKind.pairs and self.reads == LOG_PROBABILITIES

    def measures_of(self, section: ObjectiveConfig) -> tuple[str, ...]:
        """Return the names of all measures of a configured objective."""
        own = self.measures(section) if callable(self.measures) else self.measures
        return (*own, *(ANSWERS if self.sees_pairs else ()))

    def record(
        self, section: ObjectiveConfig, sums: Sequence[float], number: float
    ) -> dict[str, float]:
        """Return the numbers to record by name.

        Args:
            sums: Sums of `measures_of` over the labels (or records) counted.
            number: Number of labels (or records) counted.
        """
        named = dict(zip(self.measures_of(section), sums, strict=True))
        if self.metrics is not None:
            return self.metrics(section, named, number)
        return {name: value / max(1.0, number) for name, value in named.items()}


objective_of = spec_lookup(ObjectiveConfig, Objective)
"""Return the specification of the configured objective."""
