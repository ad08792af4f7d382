"""Masked tokens of encoders (BERT, arXiv:1810.04805)."""

from __future__ import annotations

from dataclasses import dataclass

from trainctl.config.schema import ObjectiveConfig
from trainctl.config.schema.option import option
from trainctl.options.objective import Objective


@dataclass
class MaskedConfig(ObjectiveConfig):
    """Keys of masked tokens."""

    rate: float = option(
        0.15, "Share of the tokens that are hidden and predicted.", above=0, maximum=1
    )
    mask_share: float = option(
        0.8, "Share of the hidden tokens that the mask token replaces.", minimum=0, maximum=1
    )
    random_share: float = option(
        0.1,
        "Share of the hidden tokens that a random token replaces; the rest stays as it is.",
        minimum=0,
        maximum=1,
    )
    mask_token: str | None = option(
        None, "Text of the mask token; none means the one that the tokenizer's files name."
    )


SPEC = Objective(name="masked", keys=MaskedConfig, hides_tokens=True)
