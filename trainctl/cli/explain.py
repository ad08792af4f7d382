"""`trainctl explain`: meaning and remedy of a rule, record, cause or exit code."""

from __future__ import annotations

import re
from collections.abc import Iterator
from textwrap import fill
from typing import Annotated

import typer

from trainctl.cli.arguments import Json
from trainctl.cli.console import print_json, put
from trainctl.config.suggest import did_you_mean, nearest
from trainctl.errors import TrainctlError
from trainctl.rules.handbook import RULE, Meaning, address, everything
from trainctl.rules.handbook import explain as look_up
from trainctl.rules.handbook import words as known_words

_WIDTH = 100
_COMMON_WORDS = ("exit", "code", "event", "rule")


def complete_word(incomplete: str) -> list[str]:
    """Return the known words that start with `incomplete`."""
    return [word for word in known_words() if word.lower().startswith(incomplete.lower())]


Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="WORD...",
        help="Rules (TC024), kinds of records, causes of failures, exit codes; none lists all.",
        show_default=False,
        autocompletion=complete_word,
    ),
]


def explain(words: Words = None, as_json: Json = False) -> None:
    """Say what a rule, a record, a cause of a failure or an exit code means, and what to do.

    Examples: trainctl explain TC024; trainctl explain intervention; trainctl explain exit code 75
    """
    found = _found(words or [])
    if as_json:
        print_json({"schema": 1, "explanations": [_to_json(each) for each in found]})
    elif not words:
        for each in found:
            put(f"{each.word:<22} {each.meaning}")
    else:
        put("\n\n".join("\n".join(_lines(each)) for each in found))


def _found(words: list[str]) -> list[Meaning]:
    """Return the meaning of each word; all meanings if no word is given."""
    if not words:
        return everything()
    # Accept the phrase `exit code 75`; `code` alone names a cause of failures.
    has_code = any(word.isdigit() for word in words)
    said = [word for word in words if not (has_code and word.lower() in _COMMON_WORDS)]
    return [_of(word) for word in said]


def _of(word: str) -> Meaning:
    found = look_up(word)
    if found is None:
        known = known_words()
        number = re.fullmatch(r"(?:TC)?0*(\d{1,3})", word, re.IGNORECASE)
        rule = f"TC{int(number[1]):03}" if number else ""
        hint = did_you_mean([rule] if rule in known else nearest(word, known))
        raise TrainctlError(
            f"there is no rule, record, cause or exit code {word!r}",
            hint=hint or "`trainctl explain` lists all",
        )
    return found


def _lines(found: Meaning) -> Iterator[str]:
    yield f"{found.word}: {found.kind}"
    yield _text("", found.meaning)
    if found.cause:
        yield _text("why: " if found.kind.startswith(RULE) else "cause: ", found.cause)
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
        yield _text("what to do: ", found.cure)
    yield f"  {address(found)}"


def _text(label: str, text: str) -> str:
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
        "address": address(found),
    }
