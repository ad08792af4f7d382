"""Declaration of the schema's fields, with their metadata."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field
from functools import partial
from typing import Any

from trainctl.config.registry import kind_of, new_section, with_parts

LONGEST = {"seconds": 31_536_000, "minutes": 525_600}
"""Maximum times, a year each: timers of the operating system overflow beyond a few centuries."""


def option(
    default: Any,
    doc: str,
    *,
    unit: str = "",
    minimum: float | None = None,
    maximum: float | None = None,
    above: float | None = None,
    example: str = "",
    units: str = "",
    each: str = "",
    needs: tuple[Callable[[Any], bool], str] | None = None,
    whole: bool = False,
    local: bool = False,
    left_out_if_empty: bool = False,
    former: Any = None,
    runs_code: bool = False,
) -> Any:
    """Return a config field with its meaning, unit and range.

    Args:
        default: Lists and dicts are copied for each instance.
        doc: One or two sentences for the reference and for error messages.
        unit: Unit of a number ("bytes", "optimizer steps"); empty for pure numbers and names.
        minimum: Smallest legal value, inclusive.
        maximum: Largest legal value, inclusive; times default to `LONGEST`.
        above: Lower bound, exclusive (a learning rate is above 0).
        example: A value as typed, if its type alone does not show the syntax: a list of mappings.
        units: Group whose registered options are the legal values (`config.registry`).
        each: Group whose options are the legal keys of this mapping. Each key has a section as its
            value; null removes the option.
        needs: Condition under which the key has an effect: a predicate over its section, and text.
        whole: Whether the key applies to the whole run, so that a named section does not have it.
        local: Whether the value is a path in local file systems, so that a URL is refused.
        left_out_if_empty: Whether files of a configuration do not have the key while it is empty.
        former: Plain value that a key of `data` has in runs of versions before the key; None if
            they did as the default does.
        runs_code: Whether the value is code or a program that trainctl starts, or names one: a run
            that was fetched with another value than the default needs the user's trust.
    """
    metadata = {
        "doc": doc,
        "unit": unit,
        "minimum": minimum,
        "maximum": LONGEST.get(unit) if maximum is None else maximum,
        "above": above,
        "example": example,
        "units": units,
        "each": each,
        "needs": needs,
        "whole": whole,
        "local": local,
        "left_out_if_empty": left_out_if_empty,
        "former": former,
        "runs_code": runs_code,
    }
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def section(cls: type) -> Any:
    """Return a field with a nested section that has its class's defaults.

    If the class names a group of kinds in `units`, the section is of the default kind. If it
    names a group in `parts`, it has a section for each option of that group.
    """
    metadata = {"doc": (cls.__doc__ or "").strip(), "section": cls}
    return field(default_factory=partial(_default, cls), metadata=metadata)


def _default(cls: type) -> Any:
    if getattr(cls, "parts", ""):
        return with_parts(cls)()
    group = getattr(cls, "units", "")
    if not group:
        return cls()
    return new_section(group, kind_of(cls))
