"""A user's function that scores an answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trainctl.config.schema.option import option
from trainctl.options.reward import Reward, RewardConfig


@dataclass
class FunctionRewardConfig(RewardConfig):
    """The function, and its further arguments."""

    call: str = option(
        "",
        "Your own function, as `module:function`; it is called with the prompt, the answer and a "
        "mapping of the record's other columns, and returns a number, or None where it does not "
        "apply.",
        example="my_rewards:polite",
    )
    arguments: dict[str, Any] = option(
        {}, "Keyword arguments of the function.", example="{most_words: 40}"
    )


SPEC = Reward(
    name="function", keys=FunctionRewardConfig, build="trainctl.data.rewards:load_reward_function"
)
