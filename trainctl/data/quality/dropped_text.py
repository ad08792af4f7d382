"""Documents that went, in words: what `data show --dropped` prints."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from trainctl.data.quality.contamination import passage
from trainctl.data.quality.selection import CONTAMINATED, EXACT, NEAR, SUBSTRING, Example

_CHARACTERS = 200
"""Of an excerpt."""

Texts = Callable[[str, str, int], tuple[str, str]]
"""Gives a document of a source, part and number: where it is, for people, and its text."""


@dataclass(frozen=True, slots=True)
class Shown:
    """A document that went."""

    source: str
    reason: str
    document: str
    why: str
    """The same in words, with the number that decided."""
    excerpt: str
    """The beginning of its text, or the held-out passage in it."""
    like: str = ""
    """Where the document is that stays in its place; empty if there is none."""
    other: str = ""
    """The beginning of that one."""


def shown(examples: Mapping[str, Iterable[Example]], texts: Texts) -> Iterator[Shown]:
    """Examples of a selection in words, by reason."""
    for reason, some in examples.items():
        for each in some:
            where, text = texts(each.source, each.part, each.number)
            like, other = texts(*each.like) if each.like is not None else ("", "")
            yield Shown(
                source=each.source,
                reason=reason,
                document=where,
                why=_why(reason, each, like),
                excerpt=_excerpt(each, text),
                like=like,
                other=_cut(other),
            )


def _why(reason: str, example: Example, like: str) -> str:
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


def _excerpt(example: Example, text: str) -> str:
    return passage(text, example.word) if example.word is not None else _cut(text)


def _cut(text: str) -> str:
    short = " ".join(text[: 2 * _CHARACTERS].split())[:_CHARACTERS]
    return short if len(short) >= len(text) else f"{short}…"
