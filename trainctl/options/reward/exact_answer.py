"""Whether the final answer of a text equals the record's."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from trainctl.config.schema.option import option
from trainctl.options.reward import Reward, RewardConfig, Score

_BOXED = "\\boxed{"
_HASHES = "####"
"""Mark before the final answer in GSM8K (arXiv:2110.14168)."""
_NUMBER = re.compile(r"-?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:[eE][+-]?\d{1,4}(?!\d))?")
_DECORATION = "$€£%.,;:!?*`\"' \n\t"


@dataclass
class ExactAnswerConfig(RewardConfig):
    """The column with the answer, and the rewards."""

    column: str = option("answer", "Column of the record that has the right answer.")
    right: float = option(1.0, "Reward of the right answer.")
    wrong: float = option(0.0, "Reward of any other answer.")


def build(section: ExactAnswerConfig) -> Score:
    """Return the reward. A record without the column raises KeyError, and the reward has failed."""

    def score(prompt: str, answer: str, columns: Mapping[str, Any]) -> float:
        wanted = final_answer(str(columns[section.column]))
        return section.right if final_answer(answer) == wanted else section.wrong

    return score


def final_answer(text: str) -> str | Decimal:
    r"""Return the final answer in a text, as a number if it is one.

    It is the content of the last `\boxed{}`, else what follows the last `####` on its line, else
    the text's last number, else the whole text without case and punctuation around it.
    """
    found = _last_boxed(text)
    if found is None and _HASHES in text:
        found = text.rpartition(_HASHES)[2].strip().partition("\n")[0]
    if found is None:
        numbers = _NUMBER.findall(text)
        found = numbers[-1] if numbers else text
    bare = found.rstrip(_DECORATION).lstrip(_DECORATION.replace(".", ""))  # .5 is a number
    if _NUMBER.fullmatch(bare):
        return Decimal(bare.replace(",", ""))
    return " ".join(bare.lstrip(_DECORATION).lower().split())


def _last_boxed(text: str) -> str | None:
    r"""Return the content of the last `\boxed{...}` whose braces close; None without one."""
    end = len(text)
    while (start := text.rfind(_BOXED, 0, end)) >= 0:
        depth = 0
        for place in range(start + len(_BOXED) - 1, len(text)):
            depth += {"{": 1, "}": -1}.get(text[place], 0)
            if depth == 0:
                return text[start + len(_BOXED) : place]
        end = start
    return None


SPEC = Reward(name="exact_answer", keys=ExactAnswerConfig, build=build)
