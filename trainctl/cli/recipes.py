"""`trainctl recipes`: what there is, for which hardware, and whether it fits this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainctl.cli.arguments import ConfigDir, Json
from trainctl.errors import TrainctlError

if TYPE_CHECKING:
    from trainctl.config.catalog import RecipeInfo

VERDICTS = {True: "yes", False: "no", None: "perhaps"}


def recipes(config_dir: ConfigDir = None, as_json: Json = False) -> None:
    """List the recipes, for which hardware each is, and whether this machine can launch it."""
    from trainctl.cli.console import print_json
    from trainctl.config.catalog import recipes as find_recipes

    rows = [_row(info, config_dir) for info in find_recipes(config_dir)]
    if as_json:
        print_json(rows)
    else:
        _print_table(rows)


def _row(info: RecipeInfo, config_dir: Path | None) -> dict[str, Any]:
    fits, reason = _fits(info.name, config_dir)
    return {
        "name": info.name,
        "what": info.summary,
        "description": info.description,
        "hardware": info.hardware,
        "path": str(info.path),
        "fits_here": fits,
        "reason": reason,
    }


def _fits(name: str, config_dir: Path | None) -> tuple[bool | None, str]:
    """Whether `trainctl launch recipe=NAME` would start here, by the same checks."""
    from trainctl.cli.planning import compose, plan
    from trainctl.cli.readiness import can_launch
    from trainctl.runs.directory import DEFAULT_ROOT

    try:
        planned = plan(compose([f"recipe={name}"], config_dir), with_files=True)
        return can_launch(planned, DEFAULT_ROOT)
    except TrainctlError as error:
        return False, error.findings[0].message if error.findings else error.message


def _print_table(rows: list[dict[str, Any]]) -> None:
    from rich.table import Table

    from trainctl.cli.console import rich_console

    table = Table("recipe", "what it is", "hardware", "fits here", box=None, pad_edge=False)
    table.columns[0].no_wrap = table.columns[2].no_wrap = table.columns[3].no_wrap = True
    for row in rows:
        table.add_row(row["name"], row["what"], row["hardware"], VERDICTS[row["fits_here"]])
    rich_console().print(table)
