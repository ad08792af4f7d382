"""The shipped recipes that say all of a run; others wait for a model or data of the user's."""

from trainctl.config.catalog import recipes

WAITING = {"sft-tiny": "model.path"}
WHOLE = [info.name for info in recipes() if info.name not in WAITING]
