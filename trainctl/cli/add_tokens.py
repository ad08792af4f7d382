"""`trainctl add-tokens`: add special tokens to a transformers directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from trainctl.cli.arguments import Json
from trainctl.cli.console import print_json, put, say
from trainctl.cli.meter import Meter
from trainctl.cli.offline import require_new, run_offline


def add_tokens(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="A transformers directory with weights.")
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to make.")],
    tokens: Annotated[list[str], typer.Argument(metavar="TOKEN...", help="By their text.")],
    multiple_of: Annotated[
        int,
        typer.Option(min=1, help="Add rows up to a multiple of it, as tensor ranks may want."),
    ] = 1,
    as_json: Json = False,
) -> None:
    """Write a transformers directory again with more special tokens.

    Each of them gets a row in the embedding and in the output projection, the mean of those before.

    Example: trainctl add-tokens DIR OUT '<|im_start|>' '<|im_end|>'
    """
    require_new(out)
    arguments: list[str | Path] = [directory.absolute(), out.absolute(), json.dumps(tokens)]
    with Meter() as meter:
        result = run_offline("add-tokens", [*arguments, "--multiple-of", str(multiple_of)], meter)
    if as_json:
        print_json({"schema": 1, "directory": str(directory), **result})
        return
    for token in result["known"]:
        say(f"note: {token} was there")
    ids = ", ".join(f"{token} ({number})" for token, number in result["ids"].items())
    put(f"made {out}: {ids}; {result['rows_before']:,} rows before, {result['rows']:,} now")
