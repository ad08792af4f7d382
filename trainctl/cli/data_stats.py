"""`trainctl data stats`: documents, tokens, lengths and copies of the sources of a run."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trainctl.cli.arguments import ConfigDir, Json, TargetAndOverrides, split_target
from trainctl.cli.console import print_json, print_table, say
from trainctl.cli.meter import Meter
from trainctl.cli.planning import compose_target
from trainctl.errors import ExitCode, TrainctlError
from trainctl.monitor.report.corpus import chart
from trainctl.plan.mixture import sources_of

if TYPE_CHECKING:
    from trainctl.config.schema import RunConfig
    from trainctl.data.statistics import SourceStatistics, SourceText
    from trainctl.data.tokenizer import Tokenizer


def stats(
    target: TargetAndOverrides = None,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Also draw it: .png, .svg or .html.", show_default=False),
    ] = None,
    config_dir: ConfigDir = None,
    as_json: Json = False,
) -> None:
    """Print documents, tokens, lengths and copies of each source that a run is trained on.

    Examples: trainctl data stats recipe=tiny; trainctl data stats runs/NAME --plot corpus.html
    """
    from trainctl.data.statistics import statistics_of
    from trainctl.data.tokenizer import load_tokenizer

    if plot is not None:
        from trainctl.monitor.report.figure import check_target

        check_target(plot)
    name, overrides = split_target(target)
    config = compose_target(name, overrides, config_dir).config
    tokenizer = load_tokenizer(config.tokenizer)
    sources = _prepared(config, tokenizer)
    with Meter() as meter:
        found = statistics_of(
            sources,
            tokenizer.decode,
            lambda done, total: meter("looking through the tokens", done, total),
        )
    if plot is not None:
        from trainctl.monitor.report.figure import save_chart

        title = f"Text of {config.recipe or config.model.name}"
        save_chart(lambda: chart(found, title), plot, title=title)
        say(f"wrote {plot}", style="good")
    if as_json:
        print_json({"schema": 1, "sources": {name: asdict(each) for name, each in found.items()}})
        return
    rows = [_row(*each) for each in found.items()]
    print_table(HEADS, rows, right=range(1, len(HEADS)), wraps=False)


def _prepared(config: RunConfig, tokenizer: Tokenizer) -> dict[str, SourceText]:
    """Return the tokenized text of each source of a configuration.

    Raises:
        TrainctlError: A source is not tokenized, or its corpus has no ends of documents (exit code
            5); or its text is streamed from elsewhere (`data=stream`).
    """
    from trainctl.data.corpora import cached_corpora
    from trainctl.data.statistics import SourceText

    if config.data.factory is not None:
        raise TrainctlError("data.factory gives its texts when a run starts, and no earlier")
    for name, section in sources_of(config.data).items():
        if section.kind == "stream":
            raise TrainctlError(
                f"the text of {name} lies elsewhere, and all of it would be fetched to count it",
                hint="trainctl data stats of the configuration that it was prepared with",
            )
    found = {}
    for name, corpus in cached_corpora(config, tokenizer).items():
        ends = None if corpus is None else corpus.ends(corpus.train)
        if corpus is None or ends is None:
            raise TrainctlError(
                f"the text of {name} is not prepared"
                if corpus is None
                else f"{corpus.folder} does not say where documents end: it is of before that",
                hint="trainctl data prepare, with the same words"
                if corpus is None
                else "once no run reads it, remove the folder, and trainctl data prepare",
                exit_code=ExitCode.run_state,
            )
        held_out = corpus.held_out
        tokens = corpus.tokens(corpus.train)
        found[name] = SourceText(tokens, ends, held_out.documents, held_out.tokens)
    return found


HEADS = (
    "source",
    "documents",
    "tokens",
    "held out",
    "bytes/token",
    "mean",
    "median",
    "90 %",
    "99 %",
    "longest",
    "copies",
)


def _row(name: str, found: SourceStatistics) -> tuple[str, ...]:
    percentiles = [f"{found.percentiles.get(level, 0):,}" for level in (50, 90, 99)]
    ratio = "-" if found.bytes_per_token is None else f"{found.bytes_per_token:.2f}"
    return (
        name,
        f"{found.documents:,}",
        f"{found.tokens:,}",
        f"{found.held_out_tokens:,}",
        ratio,
        f"{found.mean_length:,.0f}",
        *percentiles,
        f"{found.longest:,}",
        f"{found.copies:,}",
    )
