"""Type conversion of JSON values as DeepSpeed does it, and its failures.

Sections that are pydantic models convert like pydantic's lax mode (a number in quotes, 1 for
true). Other values are used unconverted.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

from trainctl.config.suggest import nearest
from trainctl.rules.deepspeed_schema import Key

SWITCHES = {"true": True, "t": True, "yes": True, "y": True, "on": True, "1": True}
SWITCHES |= {"false": False, "f": False, "no": False, "n": False, "off": False, "0": False}
INTEGER = re.compile(r"\s*[-+]?\d[\d_]*(\.0*)?\s*")
LONGEST = 60
"""Maximum characters of a value in a message."""

WORDS = {
    "integer": "a whole number",
    "number": "a number",
    "boolean": "true or false",
    "string": "text",
    "list": "a list",
    "section": "an object of keys",
}


@dataclass(frozen=True, slots=True)
class Reading:
    """Result of converting a value."""

    value: Any
    """Value in its key's type; None if it cannot be converted."""
    problem: str = ""
    """Why the value cannot be converted; empty if it can."""
    hint: str = ""
    """Nearest correct way to write the value."""
    is_loose: bool = False
    """Whether the value can be converted but is not written in its type."""


def read(key: Key, value: Any) -> Reading:
    """Convert a value to the type of its key."""
    if value is None:
        return _null(key)
    if key.type in ("any", "section"):
        return Reading(value)
    if key.type == "list":
        return Reading(value) if isinstance(value, list) else _wrong(key, value)
    if key.type == "string":
        return Reading(value) if isinstance(value, str) else _wrong(key, value)
    if key.type == "boolean":
        return _boolean(key, value)
    return _number(key, value)


def shown(value: Any) -> str:
    """Return a value as text for a message, in JSON notation and shortened to `LONGEST`."""
    text = {True: "true", False: "false", None: "null"}.get(value) if _is_word(value) else None
    text = text or (f'"{value}"' if isinstance(value, str) else _text(value))
    return text if len(text) <= LONGEST else text[: LONGEST - 3] + "..."


def outside(key: Key, value: Any) -> tuple[str, str] | None:
    """Return why a value of the right type is illegal, and the nearest legal one; None if legal."""
    if key.choices and value is not None and not _is_choice(key, value):
        close = nearest(str(value), [str(choice) for choice in key.choices], count=1)
        legal = ", ".join(shown(choice) for choice in key.choices)
        meant = f"did you mean {close[0]}? " if close and isinstance(value, str) else ""
        return f"{shown(value)} is not a legal value", f"{meant}one of {legal}"
    for item in value if key.items and isinstance(value, list) else ():
        if item not in key.items:
            return f"{shown(item)} is not one of {', '.join(key.items)}", "leave it out"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    if key.minimum is not None and value < key.minimum:
        return f"{shown(value)} is below {key.minimum:g}", f"{key.minimum:g} or more"
    if key.above is not None and value <= key.above:
        return f"{shown(value)} is not above {key.above:g}", f"more than {key.above:g}"
    if key.maximum is not None and value > key.maximum:
        return f"{shown(value)} is above {key.maximum:g}", f"{key.maximum:g} at most"
    if key.below is not None and value >= key.below:
        return f"{shown(value)} is not below {key.below:g}", f"less than {key.below:g}"
    return None


def words(text: str) -> list[str]:
    """Split a text at whitespace; used for tables of keys in multi-line strings."""
    return text.split()


def is_number(value: Any) -> bool:
    """Return True for a JSON number; true and false are not numbers."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def is_whole(value: Any) -> bool:
    """Return True for a number without a fraction: DeepSpeed's reader converts 4.0 to 4."""
    return is_number(value) and math.isfinite(value) and value == int(value)


def _null(key: Key) -> Reading:
    may_be_null = key.null or (not key.checked and not key.is_section and key.default is None)
    if may_be_null or key.type == "any":
        return Reading(None)
    return Reading(None, f"null is not {WORDS[key.type]}", "leave the key out")


def _wrong(key: Key, value: Any, hint: str = "") -> Reading:
    return Reading(None, f"{shown(value)} is not {WORDS[key.type]}", hint)


def _boolean(key: Key, value: Any) -> Reading:
    if isinstance(value, bool):
        return Reading(value)
    if is_number(value) and value in (0, 1):
        return Reading(bool(value), hint=f"write {shown(bool(value))}", is_loose=True)
    word = value.strip().lower() if isinstance(value, str) else ""
    if word not in SWITCHES:
        return _wrong(key, value, "true or false")
    hint = f"write {shown(SWITCHES[word])}"
    if key.checked:
        return Reading(SWITCHES[word], hint=hint, is_loose=True)
    return _wrong(key, value, f"{hint}: any text counts as true")


def _number(key: Key, value: Any) -> Reading:
    whole = key.type == "integer"
    if isinstance(value, bool):
        if not key.checked or key.refuses_switch:
            return _wrong(key, value)
        return Reading(int(value), hint=f"write {int(value)}", is_loose=True)
    if is_number(value):
        if whole and not is_whole(value):
            return _wrong(key, value, f"write {round(value)}" if math.isfinite(value) else "")
        return Reading(int(value) if whole else value)
    if not isinstance(value, str):
        return _wrong(key, value)
    number = _parse(value)
    if number is None:
        return _wrong(key, value)
    plain = int(number) if is_whole(number) else number
    takes_text = key.checked and (bool(INTEGER.fullmatch(value)) or not whole)
    if whole and not is_whole(number):
        return _wrong(key, value, f"write {round(number)}")
    if takes_text:
        return Reading(plain, hint=f"write {plain}, without quotes", is_loose=True)
    return _wrong(key, value, f"write {plain}, without quotes")


def _parse(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _is_choice(key: Key, value: Any) -> bool:
    if key.any_case and isinstance(value, str):
        return value.lower() in [choice.lower() for choice in key.choices]
    return any(value == choice for choice in key.choices)


def _is_word(value: Any) -> bool:
    return value is None or isinstance(value, bool)


def _text(value: Any) -> str:
    try:
        return f"{value}"
    except ValueError:  # a whole number of thousands of digits
        return "a very large number"
