"""`trainctl data prepare`: tokenize the corpus of a configuration before a launch."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trainctl.cli.arguments import ConfigDir, Json, TargetAndOverrides
from trainctl.cli.console import print_data, print_json, show_findings, to_printable
from trainctl.cli.record_lines import bad_text_lines
from trainctl.config.overrides import split_target
from trainctl.config.quantities import memory_text
from trainctl.errors import TrainctlError
from trainctl.launchers.planning import compose_target
from trainctl.launchers.text_preparation import (
    PreparedText,
    check_text_settings,
    prepare_share,
    prepare_text,
)

if TYPE_CHECKING:
    from trainctl.config.schema import RunConfig
    from trainctl.data.corpus import Corpus


CopyTo = Annotated[
    str | None,
    typer.Option(
        "--to", metavar="URL", help="URL or folder to also write the corpus to, for data=stream."
    ),
]


def prepare(
    target: TargetAndOverrides = None,
    workers: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Number of processes; default: one for each core. Of data.executor=ray tasks at a "
            "time, of slurm tasks of an array.",
        ),
    ] = None,
    task: Annotated[
        str | None,
        typer.Option(
            metavar="I/N",
            help="Prepare only part I of N, for jobs of an array: "
            "--task $SLURM_ARRAY_TASK_ID/$SLURM_ARRAY_TASK_COUNT.",
        ),
    ] = None,
    to: CopyTo = None,
    config_dir: ConfigDir = None,
    as_json: Json = False,
) -> None:
    """Tokenize the text of a configuration, or of a run, into the cache.

    A launch does this by itself. What was tokenized before is kept, also where this is killed; the
    same command on other machines with the same cache helps.

    Examples: trainctl data prepare recipe=tiny; trainctl data prepare my-recipe --workers 32;
    trainctl data prepare my-recipe --to s3://bucket/corpus
    """
    share = _parse_share(task) if task is not None else None
    if share is not None and to is not None:
        raise TrainctlError(
            "--task does a share, and --to writes all", hint="--to without --task, after the shares"
        )
    name, overrides = split_target(target)
    composed = compose_target(name, overrides, config_dir)
    show_findings(check_text_settings(composed))
    if share is not None:
        documents, left = prepare_share(composed.config, share, workers=workers)
        if as_json:
            print_json({"schema": 1, "task": task, "documents": documents, "left": left})
        else:
            print_data(f"share {task} is tokenized: {documents:,} documents just now")
            print_data(
                f"{left:,} tasks of other shares are left"
                if left
                else "all shares are: the same command without --task, or a launch, joins them"
            )
        return
    prepared = prepare_text(composed.config, workers=workers, to=to)
    if as_json:
        print_json(_prepared_json(composed.config, prepared))
    else:
        _print_prepared(composed.config, prepared)


def _print_prepared(config: RunConfig, prepared: PreparedText) -> None:
    from trainctl.data.packing import packed_token_count

    for name, corpus in prepared.corpora.items():
        of = f"{name}: " if config.data.sources else ""
        for side, split in (("to train on", corpus.train), ("held out", corpus.held_out)):
            print_data(f"{of}{split.tokens:,} tokens {side}, of {split.documents:,} documents")
        for line in bad_text_lines({"bad_text": corpus.bad_text}):
            print_data(f"{of}{line}")
        if corpus.classes:
            names = ", ".join(map(to_printable, corpus.classes))
            print_data(f"{of}{len(corpus.classes):,} classes, numbered from 0: {names}")
        packed_token_count(config, corpus, print_data)
    documents = prepared.documents
    just_now = f", {documents:,} documents tokenized just now" if documents else ""
    folders = ", ".join(corpus.folder for corpus in prepared.corpora.values())
    print_data(f"in {folders}{just_now}")
    for place in prepared.places.values():
        print_data(f"written to {place}: data=stream data.url={place}")
    for each in prepared.dropped:
        print_dropped(each)
    if config.data.has_quality_rules:
        sort = f"each task sorts in {memory_text(config.data.sort_bytes)} (data.sort_bytes)"
        print_data(f"by {prepared.executor}; {sort}")
    elif documents:
        print_data(f"by {prepared.executor}")


def _prepared_json(config: RunConfig, prepared: PreparedText) -> dict[str, Any]:
    from trainctl.data.text_search import without_examples

    found = {name: _corpus_json(corpus) for name, corpus in prepared.corpora.items()}
    sources: dict[str, Any] = {"sources": found}
    if not config.data.sources:
        (sources,) = found.values()
    dropped = [without_examples(each) for each in prepared.dropped]
    return {
        "schema": 1,
        **sources,
        "documents_tokenized": prepared.documents,
        "executor": {"text": prepared.executor, "sort_bytes": config.data.sort_bytes},
        **({"dropped": dropped} if dropped else {}),
    }


def _corpus_json(corpus: Corpus) -> dict[str, Any]:
    sides = {"train": corpus.train, "held_out": corpus.held_out}
    return {
        "folder": corpus.folder,
        "digest": corpus.digest,
        **{
            name: {"tokens": split.tokens, "documents": split.documents}
            for name, split in sides.items()
        },
        "bad_text": corpus.bad_text,
        **({"classes": corpus.classes} if corpus.classes else {}),
    }


def _parse_share(text: str) -> tuple[int, int]:
    """Parse `I/N` into its two numbers.

    Raises:
        TrainctlError: The text is not of this form, or I is not from 1 to N.
    """
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    number, count = (int(match[1]), int(match[2])) if match else (0, 0)
    if not 1 <= number <= count:
        raise TrainctlError(
            f"--task {text}: expected I/N, with I from 1 to N",
            hint="an array from 1, as sbatch --array=1-16, has --task $SLURM_ARRAY_TASK_ID/16",
        )
    return number, count


def print_dropped(dropped: dict[str, Any]) -> None:
    """Print how many documents of a source were left out, by reason."""
    of, stay = dropped["documents"], dropped["stay"]
    print_data(f"{dropped['source']}: {of - stay:,} of {of:,} documents to train on are left out")
    for reason, tally in dropped["reasons"].items():
        also = tally["applies"] - tally["documents"]
        more = f"; and so would {also:,} that went before" if also else ""
        print_data(
            f"  {reason}: {tally['documents']:,} documents, {tally['characters']:,} "
            f"characters{more}"
        )
    if dropped["common_ngrams"]:
        print_data(
            f"  {dropped['common_ngrams']:,} held-out n-grams do not count: too many have them"
        )
