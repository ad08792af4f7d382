"""Documents that went, in words: what `data show --dropped` prints."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from trainctl.data.quality.contamination import passage
from trainctl.data.quality.selection import CONTAMINATED, EXACT, NEAR, SUBSTRING, Example, Selection

_CHARACTERS = 200
"""Of an excerpt."""

Texts = Callable[[str, str, int], str]
"""Gives the text of a document: its source, part and number."""


@dataclass(frozen=True, slots=True)
class Shown:
    """A document that went.

    Attributes:
        source: Its source.
        reason: Why, by name.
        document: Its part and number.
        why: The same in words, with the number that decided.
        excerpt: The beginning of its text, or the held-out passage in it.
        other: The beginning of the one that stays in its place; empty if there is none.
    """

    source: str
    reason: str
    document: str
    why: str
    excerpt: str
    other: str = ""


def shown(selection: Selection, texts: Texts) -> Iterator[Shown]:
    """The examples of a selection, by source and reason."""
    for source, of in selection.examples.items():
        for reason, examples in of.items():
            for each in examples:
                yield Shown(
                    source=source,
                    reason=reason,
                    document=f"{each.part} #{each.number}",
                    why=_why(reason, each),
                    excerpt=_excerpt(each, texts(source, each.part, each.number)),
                    other=_cut(texts(*each.like)) if each.like is not None else "",
                )


def _why(reason: str, example: Example) -> str:
    value = example.value if example.value is not None else 0.0
    like = f"{example.like[0]}/{example.like[1]} #{example.like[2]}" if example.like else ""
    if reason == EXACT:
        return f"the same text as {like}"
    if reason == NEAR:
        return f"nearly the same as {like}: Jaccard index {value:.2f}"
    if reason == SUBSTRING:
        return f"{value:.0%} of its words are in passages of documents before it"
    if reason == CONTAMINATED:
        return f"{value:.0f} n-grams of held-out texts"
    return f"{reason.partition('.')[0]}: {value:g} is beyond {reason.partition('.')[2]}"


def _excerpt(example: Example, text: str) -> str:
    return passage(text, example.word) if example.word is not None else _cut(text)


def _cut(text: str) -> str:
    short = " ".join(text[: 2 * _CHARACTERS].split())[:_CHARACTERS]
    return short if len(short) >= len(text) else f"{short}…"
