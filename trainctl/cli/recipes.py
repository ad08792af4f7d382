"""`trainctl recipes`: what there is, for which hardware, and whether it fits this machine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainctl.cli.arguments import ConfigDir, Json
from trainctl.errors import TrainctlError

if TYPE_CHECKING:
    from trainctl.config.catalog import RecipeInfo
    from trainctl.hardware import Hardware

VERDICTS = {True: "yes", False: "no", None: "perhaps"}


def recipes(config_dir: ConfigDir = None, as_json: Json = False) -> None:
    """List the recipes, for which hardware each is, and whether it fits this machine."""
    from trainctl.cli.console import print_json
    from trainctl.config.catalog import recipes as find_recipes
    from trainctl.config.schema import HardwareConfig
    from trainctl.hardware import resolve_hardware

    here = resolve_hardware(HardwareConfig())
    rows = [_row(info, config_dir, here) for info in find_recipes(config_dir)]
    if as_json:
        print_json(rows)
    else:
        _print_table(rows)


def _row(info: RecipeInfo, config_dir: Path | None, here: Hardware) -> dict[str, Any]:
    fits, reason = _fits(info.name, config_dir, here)
    return {
        "name": info.name,
        "what": info.summary,
        "description": info.description,
        "hardware": info.hardware,
        "path": str(info.path),
        "fits_here": fits,
        "reason": reason,
    }


def _fits(name: str, config_dir: Path | None, here: Hardware) -> tuple[bool | None, str]:
    """Whether a recipe can be planned on this machine and fits it; none if too close to tell."""
    from trainctl.cli.planning import compose
    from trainctl.config.schema import HardwareConfig
    from trainctl.planner.assess import assess

    try:
        config = compose([f"recipe={name}"], config_dir).config
    except TrainctlError as error:
        return False, error.message
    assessment = assess(replace(config, hardware=HardwareConfig()), here)
    errors = [finding for finding in assessment.findings if finding.is_error]
    if errors or assessment.budget is None:
        return False, errors[0].message
    return assessment.budget.fits, ""


def _print_table(rows: list[dict[str, Any]]) -> None:
    from rich.table import Table

    from trainctl.cli.console import rich_console

    table = Table("recipe", "what it is", "hardware", "fits here", box=None, pad_edge=False)
    table.columns[0].no_wrap = table.columns[2].no_wrap = table.columns[3].no_wrap = True
    for row in rows:
        table.add_row(row["name"], row["what"], row["hardware"], VERDICTS[row["fits_here"]])
    rich_console().print(table)
