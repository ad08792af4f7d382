"""Shipped recipes that need no further keys; the others wait for a model or data of the user."""

from trainctl.config.catalog import list_recipes

WAITING = dict.fromkeys(["kto-tiny", "masked-tiny", "sft-tiny"], "model.path")
WHOLE = [info.name for info in list_recipes() if info.name not in WAITING]
