"""Read what was dropped from a corpus: counts, and examples with their texts."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainctl.config.schema import RunConfig
from trainctl.data.document_selection import DROPPED
from trainctl.data.prepare import prepared_corpora
from trainctl.data.quality.contamination import words_from
from trainctl.data.quality.selection import (
    CONTAMINATED,
    EXACT,
    NEAR,
    SUBSTRING,
    Example,
    example_from_json,
)
from trainctl.data.store import lines_before, read_documents
from trainctl.data.tasks import Task
from trainctl.data.tokenizer import load_tokenizer
from trainctl.errors import RunStateError, TrainctlError
from trainctl.options.data import read_section, spec_of


def read_dropped(corpus: Path) -> dict[str, Any] | None:
    """Return the record of dropped documents of a corpus; None if it was built without rules."""
    file = corpus / DROPPED
    try:
        plain: dict[str, Any] = json.loads(file.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise RunStateError(
            f"{file} cannot be read: {error}",
            hint=f"remove {corpus}, and prepare it again: no text is read for that",
        ) from None
    return plain


def dropped_by_source(config: RunConfig) -> Iterator[dict[str, Any]]:
    """Yield the record of dropped documents of each source that was selected from.

    Raises:
        TrainctlError: No filter, deduplication or decontamination is set, or a text cannot be read.
    """
    if not config.data.has_quality_rules or config.data.factory is not None:
        raise TrainctlError(
            "nothing is asked of the documents: all of them are trained on",
            hint="data.dedup, data.filters and data.decontaminate leave some out",
        )
    tokenizer = load_tokenizer(config.tokenizer)
    for corpus in prepared_corpora(config, tokenizer).values():
        found = read_dropped(Path(corpus.folder))
        if found is not None:  # a single document is left as it is
            yield found


def without_examples(dropped: Mapping[str, Any]) -> dict[str, Any]:
    """Return the record of a source's dropped documents without their texts."""
    keys = ("source", "documents", "stay", "reasons", "common_ngrams")
    return {key: dropped[key] for key in keys}


def examples_of(dropped: Mapping[str, Any]) -> Iterator[DroppedDocument]:
    """Yield the examples of a source. Each file is read once.

    Raises:
        TrainctlError: A file does not exist any more, or has changed.
    """
    examples = {
        reason: [example_from_json(each) for each in some]
        for reason, some in dropped["examples"].items()
    }
    texts = _example_texts(dropped, [each for some in examples.values() for each in some])
    return describe_examples(examples, lambda *document: texts[document])


def _example_texts(
    dropped: Mapping[str, Any], examples: list[Example]
) -> dict[tuple[str, str, int], tuple[str, str]]:
    """Return location and text of every document that the examples name."""
    wanted = {(each.source, each.part, each.number) for each in examples}
    wanted |= {each.like for each in examples if each.like is not None}
    found = {}
    for source, part, plain in dropped["parts"]:
        task, section = Task.from_plain(plain), read_section(dropped["sections"][source])
        numbers = {number for name, own, number in wanted if (name, own) == (source, part)}
        for number, (origin, text) in enumerate(read_documents(task, section)):
            if number in numbers:
                piece, line = task.pieces[origin.piece], origin.line
                if line and piece.start and spec_of(section).counts_lines:
                    line += lines_before(piece)
                where = f"{piece.file}:{line}" if line else str(piece.file)
                found[source, part, number] = where, text
    return found


_CHARACTERS = 200
"""Maximum number of characters of an excerpt."""

Texts = Callable[[str, str, int], tuple[str, str]]
"""Returns location and text of a document, given its source, part and number."""


@dataclass(frozen=True, slots=True)
class DroppedDocument:
    """A dropped document with its reason in words."""

    source: str
    reason: str
    document: str
    why: str
    """The reason in words, with the number that decided."""
    excerpt: str
    """Start of its text, or the held-out passage in it."""
    like: str = ""
    """Location of the document that stays in its place; empty if there is none."""
    other: str = ""


def describe_examples(
    examples: Mapping[str, Iterable[Example]], texts: Texts
) -> Iterator[DroppedDocument]:
    """Yield the examples of a selection in words, by reason."""
    for reason, some in examples.items():
        for each in some:
            where, text = texts(each.source, each.part, each.number)
            like, other = texts(*each.like) if each.like is not None else ("", "")
            yield DroppedDocument(
                source=each.source,
                reason=reason,
                document=where,
                why=_removal_in_words(reason, each, like),
                excerpt=words_from(text, each.word) if each.word is not None else _shorten(text),
                like=like,
                other=_shorten(other),
            )


def _removal_in_words(reason: str, example: Example, like: str) -> str:
    value = example.value if example.value is not None else 0.0
    if reason == EXACT:
        return f"the same text as {like}"
    if reason == NEAR:
        return f"nearly the same as {like}: Jaccard index {value:.2f}"
    if reason == SUBSTRING:
        return f"{value:.0%} of its words are in passages of documents before it"
    if reason == CONTAMINATED:
        return f"{value:.0f} n-grams of held-out texts"
    what = f"{value:g}" if example.value is not None else "what is no finite number"
    return f"{reason.partition('.')[0]}: {what} is beyond {reason.partition('.')[2]}"


def _shorten(text: str) -> str:
    short = " ".join(text[: 2 * _CHARACTERS].split())[:_CHARACTERS]
    return short if len(short) >= len(text) else f"{short}…"
