"""Specification of a reward: a function that scores an answer to a prompt, and its keys."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from trainctl.config.registry import Spec
from trainctl.config.schema import ObjectiveConfig
from trainctl.config.schema.option import option

Score = Callable[[str, str, Mapping[str, Any]], float | None]
"""A reward: called with a prompt, an answer, and the other columns of the prompt's record. None
says that it does not apply to them.
"""


@dataclass
class RewardConfig:
    """Keys that all kinds of rewards share."""

    units: ClassVar[str] = "reward"

    kind: str = option("function", "Kind of reward.", units="reward")


@dataclass
class RewardSection:
    """A reward of a run: the keys of its kind, and its weight."""

    units: ClassVar[str] = "reward"
    is_part: ClassVar[bool] = True

    kind: str = option(
        "", "Kind of reward; if omitted, the kind of the reward's name.", units="reward"
    )
    weight: float = option(
        1.0, "Factor of this reward in an answer's sum of rewards; negative for a penalty."
    )


@dataclass
class RewardsConfig(ObjectiveConfig):
    """Keys of objectives that learn from rewards of sampled answers."""

    rewards: dict[str, RewardSection] = option(
        {},
        "Rewards of an answer, by a name of yours, each with its kind, keys and weight; the "
        "answer's reward is their weighted sum.",
        example="{exact_answer: {}, polite: {kind: function, call: my:polite}}",
    )
    reward_timeout: float = option(
        10.0,
        "Time limit of a reward for one answer; one that takes longer has failed.",
        unit="seconds",
        above=0,
    )
    reward_memory: int = option(
        1 << 32,
        "Limit of the address space of a process that computes a reward.",
        unit="bytes",
        minimum=1 << 28,
    )
    keep_rollouts: int | None = option(
        64,
        "Answers of each step kept as text, with their rewards, in RUN/rollouts; none keeps all.",
        unit="answers",
        minimum=0,
    )
    reward_processes: int = option(
        1, "Number of processes that compute each reward, all on the first node.", minimum=1
    )


@dataclass(frozen=True, kw_only=True)
class Reward(Spec):
    """Specification of one kind of reward.

    Its `build` is called with a reward's section and returns a `Score`. It runs in processes of its
    own (`trainctl.data.rewards`), and imports no torch.
    """

    keys: type = RewardConfig
