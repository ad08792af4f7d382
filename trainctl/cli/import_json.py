"""`trainctl config import`: a DeepSpeed JSON as group choices and overrides."""

from __future__ import annotations

from json import dumps
from pathlib import Path
from shlex import quote
from typing import Annotated, Any

import typer

from trainctl.cli.arguments import Json
from trainctl.cli.console import print_json, put, say
from trainctl.cli.deepspeed_file import check_file
from trainctl.cli.findings import show_findings
from trainctl.cli.recipe_text import recipe_text
from trainctl.config.json_file import read_json
from trainctl.errors import TrainctlError
from trainctl.rules.deepspeed.case import JsonContext
from trainctl.search.import_json import Imported, ranks_of
from trainctl.search.import_json import import_json as imported_from


def import_json(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A DeepSpeed JSON.")],
    world_size: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, help="Ranks that its batch is for; by default, as its numbers say."
        ),
    ] = None,
    as_recipe: Annotated[bool, typer.Option("--recipe", help="Print a recipe instead.")] = False,
    as_json: Json = False,
) -> None:
    """Print the choices and overrides that render back to a DeepSpeed JSON.

    What trainctl has no key for becomes deepspeed.*; what it derives itself is left out, and said
    on stderr.

    Example: trainctl config import ds_config.json --world-size 8 --recipe > recipes/mine.yaml
    """
    ranks = world_size or ranks_of(read_json(file).value)
    checked = check_file(file, JsonContext(world_size=ranks, fills_auto=True))
    if checked.has_error:
        raise TrainctlError.from_findings(checked.findings)
    imported = imported_from(checked.document.value, world_size=ranks)
    show_findings(checked.findings)
    for left in imported.left_out:
        say(f"left out: {left.key}={dumps(left.value)}: {left.reason}", style="warning")
    if as_json:
        print_json(_to_json(imported))
    elif as_recipe:
        put(_recipe(imported, file))
    else:
        for override in imported.overrides:
            put(quote(override))


def _to_json(imported: Imported) -> dict[str, Any]:
    return {
        "schema": 1,
        "overrides": imported.overrides,
        "left_out": [
            {"key": left.key, "value": left.value, "reason": left.reason}
            for left in imported.left_out
        ],
    }


def _recipe(imported: Imported, file: Path) -> str:
    """Return a recipe that starts from `base`."""
    passed = {f"deepspeed.{key}": value for key, value in imported.passed.items()}
    settings = {**imported.settings, **passed}
    return recipe_text([f"Imported from {file.name}."], "base", imported.choices, settings)
