"""The shipped recipes that say all of a run; others wait for a model or data of the user's."""

from trainctl.config.catalog import recipes

WAITING = {"sft-tiny": "model.path"}
WHOLE = [info.name for info in recipes() if info.name not in WAITING]

OF_USERS_DATA = {"dpo-8b-lora": ("tokenizer.path=DIR", "data.paths=[pairs.jsonl]")}
"""Recipes that compose, but are planned only with files that a user names: such as these."""


def planned_overrides(name: str) -> list[str]:
    """A recipe of `WHOLE`, with what its plan waits for."""
    return [f"recipe={name}", *OF_USERS_DATA.get(name, ())]
