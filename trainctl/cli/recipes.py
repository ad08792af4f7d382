"""`trainctl recipes`: the recipes, their hardware, and whether this machine can launch them."""

from __future__ import annotations

from trainctl import api
from trainctl.cli.arguments import ConfigDir, Json
from trainctl.cli.console import print_json, print_table

VERDICTS = {True: "yes", False: "no", None: "perhaps"}


def recipes(config_dir: ConfigDir = None, as_json: Json = False) -> None:
    """List the recipes, for which hardware each is, and whether this machine can launch it."""
    rows = api.list_recipes(config_dir)
    if as_json:
        print_json(rows)
    else:
        heads = ("recipe", "what it is", "hardware", "fits here")
        cells = ((r["name"], r["what"], r["hardware"], VERDICTS[r["fits_here"]]) for r in rows)
        print_table(heads, cells, whole=(0, 2, 3))
