"""Penalty of long answers: soft overlong punishment (DAPO, arXiv:2503.14476, section 3.4)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trainctl.config.schema.option import option
from trainctl.errors import TrainctlError
from trainctl.options.reward import Reward, RewardConfig, Score

ANSWER_TOKENS = "answer_tokens"
"""Column, added to the record's, with the number of tokens of the sampled answer."""


@dataclass
class LengthConfig(RewardConfig):
    """The length from which an answer is punished."""

    most_tokens: int | None = option(
        None,
        "Length from which the reward is -1 (beyond which, with soft_tokens=0), as L_max of the "
        "paper; required.",
        unit="tokens",
        minimum=1,
    )
    soft_tokens: int = option(
        0,
        "Length of the interval before it in which the reward falls from 0 to -1, as L_cache of "
        "the paper; 0 has none.",
        unit="tokens",
        minimum=0,
    )


def build(section: LengthConfig) -> Score:
    """Return the reward: equation 13 of the paper.

    Raises:
        TrainctlError: `most_tokens` is missing, or below `soft_tokens`.
    """
    most, soft = section.most_tokens, section.soft_tokens
    if most is None or soft > most:
        raise TrainctlError(
            "a reward of kind length needs most_tokens"
            if most is None
            else f"soft_tokens={soft} is above most_tokens={most}",
            hint="most_tokens=N: answers as long as that get -1",
        )

    def score(prompt: str, answer: str, columns: Mapping[str, Any]) -> float:
        over = columns[ANSWER_TOKENS] - (most - soft)
        return -1.0 if over > soft else min(0.0, -over / soft) if soft else 0.0

    return score


SPEC = Reward(name="length", keys=LengthConfig, build=build)
