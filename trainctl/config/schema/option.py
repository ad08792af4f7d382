"""What a field of the schema says about itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field
from functools import partial
from typing import Any

from trainctl.config.registry import kind_of, new_section, with_parts

LONGEST = {"seconds": 31_536_000, "minutes": 525_600}
"""A year: timers of the operating system overflow beyond a few hundred."""


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
) -> Any:
    """Return a config field with its meaning, unit and range.

    Args:
        default: The default; lists and dicts are copied for each instance.
        doc: One or two sentences for the reference and for error messages.
        unit: Unit of a number ("bytes", "optimizer steps"), empty for pure numbers and names.
        minimum: Smallest legal value, inclusive.
        maximum: Largest legal value, inclusive; a time has `LONGEST` unless this is set.
        above: Bound below, exclusive (a learning rate is above 0).
        example: A value as it is typed, where its type alone does not say how: a list of mappings.
        units: The group whose registered options it names one of (`config.registry`).
        each: The group whose options it has sections of, by their names; none takes one out.
        needs: When it has an effect, of the section that it is in, and that in words.
        whole: Whether it is of the whole run, so that none of several such sections has it.
        local: Whether it names a place in this machine's file systems, so that no URL is one.
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
    }
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def section(cls: type) -> Any:
    """Return a nested section with that class's defaults.

    Of a group whose options are units (it has a `units`), the class is that of the default kind;
    one with `parts` has a section in it for each option of that group.
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
