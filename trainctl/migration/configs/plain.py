"""Values of imported files: texts, switches and numbers of a size that something can have."""

from __future__ import annotations

import math
from datetime import date
from typing import Any

from trainctl.config.yaml_files import EXPONENT

MOST_VALUES = 100_000
"""Maximum number of values. Configurations have some hundred; one that refers to its own lists
again and again has more than fit into memory.
"""
MOST_LEVELS = 50
LARGEST = 2**53
"""Largest number of any key; from it on, a float does not count."""


class PlainValues:
    """Conversion of a document's values to plain ones, which counts them."""

    def __init__(self) -> None:
        self._left = MOST_VALUES

    def value(self, value: Any, name: str = "", level: int = 0) -> Any:
        """Return a value without objects; a text such as `2e-5`, which YAML 1.1 makes, is a number.

        Args:
            name: Key of the value, for errors.

        Raises:
            ValueError: It is no finite number or text, or there are too many, too deep.
        """
        self._left -= 1
        if self._left < 0:
            raise ValueError(f"it holds more than {MOST_VALUES:,} values")
        if level > MOST_LEVELS:
            raise ValueError(f"it is nested deeper than {MOST_LEVELS} levels")
        if isinstance(value, str):
            return self._text(value, name)
        if isinstance(value, dict):
            return {
                self._text(str(key), name): self.item(str(key), each, name, level + 1)
                for key, each in value.items()
            }
        if isinstance(value, list | tuple | set | frozenset):
            return [self.value(each, name, level + 1) for each in value]
        if isinstance(value, bool | int | float):
            return finite(value, name)
        return value.isoformat() if isinstance(value, date) else self.other(value, name, level)

    def item(self, key: str, value: Any, name: str, level: int) -> Any:
        """Return the value of a key."""
        return self.value(value, f"{name}.{key}" if name else key, level)

    def other(self, value: Any, name: str, level: int) -> Any:
        """Return what is neither a text, a number nor a collection."""
        if value is None:
            return None
        raise ValueError(f"{name[:80]} is {type(value).__name__}, which no configuration has")

    def _text(self, value: str, name: str) -> Any:
        if not value.isprintable() and any(c == "\0" or "\ud800" <= c <= "\udfff" for c in value):
            raise ValueError(f"{name[:80]!a} holds what is no text")
        return finite(float(value), name) if EXPONENT.match(value) else value


def finite(value: Any, name: str) -> Any:
    """Return a number or a switch.

    Raises:
        ValueError: It is not finite, or beyond `LARGEST`.
    """
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{name[:80]} is {value}, which is no finite number")
    if abs(value) > LARGEST:
        raise ValueError(f"{name[:80]} is beyond {LARGEST:,}")
    return value
