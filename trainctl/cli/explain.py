"""`trainctl explain`: meaning and remedy of a rule, record, cause or exit code."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from textwrap import fill
from typing import Annotated

import typer

from trainctl.cli.arguments import Json
from trainctl.cli.console import print_data, print_json
from trainctl.errors import TrainctlError
from trainctl.rules.handbook import RULE, Meaning, find_meanings, known_words, page_address
from trainctl.rules.keyword_search import find_by_keywords

_WIDTH = 100


def complete_word(incomplete: str) -> list[str]:
    """Return the known words that start with `incomplete`."""
    return [word for word in known_words() if word.lower().startswith(incomplete.lower())]


Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="WORD...",
        help="Rule (TC024), kind of record, cause of a failure, exit code, or what to look for "
        "among keys and pages; default: all rules, records, causes and codes.",
        autocompletion=complete_word,
    ),
]


def explain(words: Words = None, as_json: Json = False) -> None:
    """Say what a rule, a record, a cause of a failure or an exit code means, and what to do.

    Other words are looked for among the keys, the options and the pages of the documentation.

    Examples: trainctl explain TC024; trainctl explain intervention; trainctl explain exit code 75;
    trainctl explain wandb; trainctl explain learning rate per layer
    """
    found = _found(words or [])
    if as_json:
        print_json({"schema": 1, "explanations": [_to_json(each) for each in found]})
    elif not words:
        for each in found:
            print_data(f"{each.word:<22} {each.meaning}")
    else:
        print_data("\n\n".join("\n".join(_meaning_lines(each)) for each in found))


def _found(words: list[str]) -> list[Meaning]:
    """Return the meanings of known words, else what the whole phrase finds.

    Raises:
        TrainctlError: Nothing is found; the error names the nearest word.
    """
    try:
        return find_meanings(words)
    except TrainctlError:
        # A rule or exit code that is not there is no phrase.
        code = r"(?:tc)?\d+|exit|code|rule"
        is_code = all(re.fullmatch(code, word, re.IGNORECASE) for word in words)
        found = [] if is_code else find_by_keywords(" ".join(words))
        if not found:
            raise
        return [replace(each, cause="", cure="", typed="", printed=(), files={}) for each in found]


def _meaning_lines(found: Meaning) -> Iterator[str]:
    yield f"{found.word}: {found.kind}"
    yield _wrap_text("", found.meaning)
    if found.cause:
        yield _wrap_text("why: " if found.kind.startswith(RULE) else "cause: ", found.cause)
    for name, meaning in (found.fields or {}).items():
        indent = f"    {name:<20} "
        yield (
            fill(meaning, _WIDTH, initial_indent=indent, subsequent_indent=" " * 25)
            or f"    {name}"
        )
    if found.example:
        yield "  example:"
        yield from (f"    {line}".rstrip() for line in found.example)
    if found.cure:
        yield _wrap_text("what to do: ", found.cure)
    yield f"  {page_address(found)}"


def _wrap_text(label: str, text: str) -> str:
    return fill(
        label + text,
        _WIDTH,
        initial_indent="  ",
        subsequent_indent="    " if label else "  ",
        break_on_hyphens=False,
        break_long_words=False,
    )


def _to_json(found: Meaning) -> dict[str, object]:
    return {
        "word": found.word,
        "kind": found.kind,
        "meaning": found.meaning,
        "cause": found.cause,
        "fields": found.fields,
        "example": list(found.example),
        "cure": found.cure,
        "address": page_address(found),
    }
