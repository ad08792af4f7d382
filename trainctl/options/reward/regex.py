"""Whether an answer has a form that a regular expression describes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trainctl.config.schema.option import option
from trainctl.errors import TrainctlError
from trainctl.options.reward import Reward, RewardConfig, Score


@dataclass
class RegexConfig(RewardConfig):
    """The expression, and the rewards."""

    pattern: str = option(
        "",
        "Regular expression of Python that the answer must match; `.` also matches line feeds.",
        example='"<think>.*</think>.*"',
    )
    whole: bool = option(
        True, "Match the whole answer, without white space around it; otherwise any part of it."
    )
    match: float = option(1.0, "Reward of an answer that matches.")
    no_match: float = option(0.0, "Reward of any other answer.")


def build(section: RegexConfig) -> Score:
    """Return the reward.

    Raises:
        TrainctlError: The pattern is empty, or no regular expression.
    """
    try:
        pattern = re.compile(section.pattern, re.DOTALL)
    except re.error as error:
        raise TrainctlError(
            f"pattern={section.pattern!r} is no regular expression: {error}",
            hint="correct it; Python's module re documents the syntax",
        ) from None
    if not section.pattern:
        raise TrainctlError("a reward of kind regex needs a pattern", hint="pattern=REGEX")
    find = pattern.fullmatch if section.whole else pattern.search

    def score(prompt: str, answer: str, columns: Mapping[str, Any]) -> float:
        return section.match if find(answer.strip()) else section.no_match

    return score


SPEC = Reward(name="regex", keys=RegexConfig, build=build)
