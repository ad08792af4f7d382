"""`trainctl recipes`: the recipes, their hardware, and whether this machine can launch them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trainctl.cli.arguments import ConfigDir, Json
from trainctl.cli.console import print_json, print_table
from trainctl.config.catalog import RecipeInfo
from trainctl.config.catalog import list_recipes as find_recipes
from trainctl.errors import TrainctlError
from trainctl.launchers.planning import can_launch, compose_config, plan_config
from trainctl.runs.directory import DEFAULT_ROOT

VERDICTS = {True: "yes", False: "no", None: "perhaps"}


def recipes(config_dir: ConfigDir = None, as_json: Json = False) -> None:
    """List the recipes, for which hardware each is, and whether this machine can launch it."""
    rows = [_recipe_row(info, config_dir) for info in find_recipes(config_dir)]
    if as_json:
        print_json(rows)
    else:
        heads = ("recipe", "what it is", "hardware", "fits here")
        cells = ((r["name"], r["what"], r["hardware"], VERDICTS[r["fits_here"]]) for r in rows)
        print_table(heads, cells, whole=(0, 2, 3))


def _recipe_row(info: RecipeInfo, config_dir: Path | None) -> dict[str, Any]:
    fits, reason = _check_machine(info.name, config_dir)
    return {
        "name": info.name,
        "what": info.summary,
        "description": info.description,
        "hardware": info.hardware,
        "path": str(info.path),
        "fits_here": fits,
        "reason": reason,
    }


def _check_machine(name: str, config_dir: Path | None) -> tuple[bool | None, str]:
    """Return whether this machine has what the recipe plans for, and the reason if not.

    Data and weights, which the user must name, are not checked.
    """
    try:
        planned = plan_config(compose_config([f"recipe={name}"], config_dir))
        return can_launch(planned, DEFAULT_ROOT)
    except TrainctlError as error:
        return False, error.findings[0].message if error.findings else error.message
