"""`trainctl export` and `add-tokens`: write a directory that transformers loads."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from trainctl import api
from trainctl.cli.arguments import Best, Json, NamedRunOrUrl, Step, WhichWeights
from trainctl.cli.console import (
    Meter,
    print_data,
    print_json,
    print_message,
    print_warning,
    size_text,
)
from trainctl.config.quantities import count_text
from trainctl.errors import ExitCode, TrainctlError
from trainctl.launchers.export import TARGETS

Out = Annotated[
    Path | None,
    typer.Argument(
        metavar="[OUT]", help="Folder or file to create; not needed for an upload alone."
    ),
]
Format = Annotated[
    str,
    typer.Option(
        "--to",
        metavar="FORMAT",
        help=f"Format: {', '.join(TARGETS)}; or hub:USER/NAME, by HF_TOKEN.",
    ),
]
Check = Annotated[
    bool,
    typer.Option(
        "--check", help="Load the export by the library it is for; compare it with the checkpoint."
    ),
]
Card = Annotated[
    bool, typer.Option("--card", help="Also write a model card, README.md; an upload has one.")
]
Public = Annotated[
    bool, typer.Option("--public", help="Upload to a public repository; default: private.")
]
ShardSize = Annotated[
    str | None,
    typer.Option(metavar="SIZE", help="Maximum size of a weights file, such as 2GB; default: 5GB."),
]


def export(
    context: typer.Context,
    run: NamedRunOrUrl,
    out: Out = None,
    step: Step = None,
    best: Best = False,
    to: Format = "transformers",
    dtype: Annotated[
        Literal["fp32", "bf16", "fp16", "q8_0"] | None,
        typer.Option(
            help="Data type of the weights (q8_0: gguf); default: the one that the run trains in."
        ),
    ] = None,
    weights: WhichWeights = "raw",
    adapter: Annotated[
        bool, typer.Option("--adapter", help="Export only the adapter, as PEFT loads it.")
    ] = False,
    merge: Annotated[
        bool, typer.Option("--merge", help="Merge the adapter into its base model (default).")
    ] = False,
    shard_size: ShardSize = None,
    check: Check = False,
    card: Card = False,
    public: Public = False,
    as_json: Json = False,
) -> None:
    """Write a checkpoint as a directory that transformers loads, or in another format.

    Of an adapter: merged into its base, or alone as PEFT's directory.

    Example: trainctl export runs/NAME exported --dtype bf16
    """
    if adapter and (merge or shard_size):
        raise TrainctlError(f"--adapter with {'--merge' if merge else '--shard-size'}: choose one")
    trusts = context.find_root().params["trust_code"]
    with (
        Meter() as meter,
        api.opened_run(run, step=step, best=best, trust_code=trusts, progress=meter) as opened,
    ):
        result = opened.checkpoint(step, best=best, warn=print_warning).export(
            out,
            to=to,
            dtype=dtype,
            weights=weights,
            adapter=adapter if adapter or merge else None,
            shard_size=shard_size,
            check=check,
            card=card,
            public=public,
            progress=meter,
        )
    if as_json:
        print_json({"schema": 1, **result})
    else:
        _print_export(result, out, weights)
    if check and not result["check"]["equal"]:
        raise typer.Exit(ExitCode.training_failed)


def _print_export(result: dict[str, Any], out: Path | None, weights: str) -> None:
    for note in result["notes"]:
        print_message(f"note: {note}")
    average = " (average of the weights)" if weights == "ema" else ""
    print_data(
        f"exported {result['checkpoint']}{average}{'' if out is None else f' to {out}'}: "
        f"{count_text(result['parameters'])} parameters, "
        f"{size_text(result['bytes'])}" + (f" of {result['dtype']}" if "dtype" in result else "")
    )
    if "check" in result:
        _print_check(result["check"], result.get("dtype", "fp32"))
    if "hub" in result:
        kind = "private" if result["hub"]["private"] else "public"
        print_data(f"uploaded to {result['hub']['url']} ({kind}), {result['hub']['commit']}")


def _print_check(checked: dict[str, Any], dtype: str) -> None:
    for note in checked["notes"]:
        print_message(f"note: {note}")
    print_data(f"by {checked['library']}:")
    if checked["scores"]:
        print_data(
            f"  {checked['scores']:,} scores differ from the checkpoint's in {dtype} by at most "
            f"{checked['difference']:.1e} nats (bound {checked['bound']:.1e}; {dtype} itself "
            f"changes them by {checked['rounding']:.1e})"
        )
    if checked["states"]:
        print_data(f"  {checked['states']:,} weights and states compared bit for bit")
    if checked["texts"]:
        print_data(f"  {checked['texts']} texts and conversations compared")
    if checked["ends"]:
        print_data(f"  answers end at {', '.join(map(str, checked['ends']))}")
    for each in checked["differences"]:
        print_warning(each)
    print_data("equal" if checked["equal"] else "the export differs from the checkpoint")


def add_tokens(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="Transformers directory with weights.")
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to create.")],
    tokens: Annotated[
        list[str], typer.Argument(metavar="TOKEN...", help="Tokens to add, by their text.")
    ],
    multiple_of: Annotated[
        int,
        typer.Option(
            min=1,
            help="Pad the number of rows to a multiple of this, as tensor parallelism may need.",
        ),
    ] = 1,
    as_json: Json = False,
) -> None:
    """Write a transformers directory again with more special tokens.

    Each of them gets a row in the embedding and in the output projection, the mean of those before.

    Example: trainctl add-tokens DIR OUT '<|im_start|>' '<|im_end|>'
    """
    with Meter() as meter:
        result = api.add_tokens(directory, out, *tokens, multiple_of=multiple_of, progress=meter)
    if as_json:
        print_json({"schema": 1, "directory": str(directory), **result})
        return
    for token in result["known"]:
        print_message(f"note: {token} was there")
    ids = ", ".join(f"{token} ({number})" for token, number in result["ids"].items())
    print_data(f"made {out}: {ids}; {result['rows_before']:,} rows before, {result['rows']:,} now")
