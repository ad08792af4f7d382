"""What a field of the schema says about itself."""

from __future__ import annotations

from dataclasses import field
from typing import Any


def option(
    default: Any,
    doc: str,
    *,
    unit: str = "",
    minimum: float | None = None,
    maximum: float | None = None,
    above: float | None = None,
    example: str = "",
) -> Any:
    """A config field with its meaning, unit and range.

    Args:
        default: The default; lists and dicts are copied for each instance.
        doc: One or two sentences for the reference and for error messages.
        unit: Unit of a number ("bytes", "optimizer steps"), empty for pure numbers and names.
        minimum: Smallest legal value, inclusive.
        maximum: Largest legal value, inclusive.
        above: Bound below, exclusive (a learning rate is above 0).
        example: A value as it is typed, where its type alone does not say how: a list of mappings.
    """
    metadata = {
        "doc": doc,
        "unit": unit,
        "minimum": minimum,
        "maximum": maximum,
        "above": above,
        "example": example,
    }
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def section(cls: type) -> Any:
    """A nested section with that class's defaults."""
    return field(default_factory=cls, metadata={"doc": (cls.__doc__ or "").strip()})
