"""Text of dropped documents, as `data show --dropped` prints it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from trainctl.data.quality.contamination import passage
from trainctl.data.quality.selection import CONTAMINATED, EXACT, NEAR, SUBSTRING, Example

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
    """Start of that document's text."""


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
