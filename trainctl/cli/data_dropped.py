"""`trainctl data show --dropped`: documents that are not trained on, with reasons."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainctl.cli.console import print_json, printable, put
from trainctl.config.quality import has_quality_rules
from trainctl.config.schema import RunConfig
from trainctl.errors import ExitCode, TrainctlError

if TYPE_CHECKING:
    from trainctl.data.dropped_documents import DroppedDocument


def show_dropped(config: RunConfig, *, as_json: bool) -> None:
    """Print the documents left out of each source, with examples.

    Raises:
        TrainctlError: No filter, deduplication or decontamination is set, or the corpus is not
            prepared.
    """
    from trainctl.data.dropped_documents import examples_of

    found = list(dropped_of(config))
    if as_json:
        examples = [asdict(row) for dropped in found for row in examples_of(dropped)]
        print_json({"schema": 1, "sources": [told(each) for each in found], "examples": examples})
        return
    for dropped in found:
        print_dropped(dropped)
        for row in examples_of(dropped):
            put("")
            _put_example(row)


def print_dropped(dropped: dict[str, Any]) -> None:
    """Print how many documents of a source were left out, by reason."""
    of, stay = dropped["documents"], dropped["stay"]
    put(f"{dropped['source']}: {of - stay:,} of {of:,} documents to train on are left out")
    for reason, tally in dropped["reasons"].items():
        also = tally["applies"] - tally["documents"]
        more = f"; and so would {also:,} that went before" if also else ""
        put(
            f"  {reason}: {tally['documents']:,} documents, {tally['characters']:,} "
            f"characters{more}"
        )
    if dropped["common_ngrams"]:
        put(f"  {dropped['common_ngrams']:,} held-out n-grams do not count: too many have them")


def told(dropped: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON fields of a source's left-out documents."""
    keys = ("source", "documents", "stay", "reasons", "common_ngrams")
    return {key: dropped[key] for key in keys}


def dropped_of(config: RunConfig) -> Iterator[dict[str, Any]]:
    """Yield the account of left-out documents of each source.

    Raises:
        TrainctlError: No filter, deduplication or decontamination is set, or the corpus is not
            prepared.
    """
    from trainctl.data.corpora import cached_corpora
    from trainctl.data.dropped_documents import read_dropped
    from trainctl.data.tokenizer import load_tokenizer

    if not has_quality_rules(config.data) or config.data.factory is not None:
        raise TrainctlError(
            "nothing is asked of the documents: all of them are trained on",
            hint="data.dedup, data.filters and data.decontaminate leave some out",
        )
    tokenizer = load_tokenizer(config.tokenizer)
    for name, corpus in cached_corpora(config, tokenizer).items():
        if corpus is None:
            raise TrainctlError(
                f"the text of {name} is not prepared",
                hint="trainctl data prepare, with the same words",
                exit_code=ExitCode.run_state,
            )
        found = read_dropped(Path(corpus.folder))
        if found is not None:  # a single document is left as it is
            yield found


def _put_example(row: DroppedDocument) -> None:
    put(f"  {printable(row.document)}")
    put(f"    {row.reason}: {printable(row.why)}")
    put(f"    | {printable(row.excerpt)}")
    if row.other and row.other != row.excerpt:
        put(f"    what stays | {printable(row.other)}")
