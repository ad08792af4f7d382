"""Quantities with units, such as 4h or 80GB: parsing to a key's unit, and formatting of bytes."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

_WRITTEN = re.compile(r"([0-9]{1,12}(?:\.[0-9]{1,12})?)[ _]?([A-Za-z]{0,12})")

_SECONDS = {"s": 1, "sec": 1, "m": 60, "min": 60, "h": 3600, "hr": 3600, "hour": 3600}
_SECONDS |= {"second": 1, "minute": 60, "d": 86_400, "day": 86_400}
_POWERS = {"k": 1, "m": 2, "g": 3, "t": 4}
_BYTES = {"b": 1, "byte": 1}
_BYTES |= {f"{letter}{end}": 1000**power for letter, power in _POWERS.items() for end in ("", "b")}
_BYTES |= {f"{letter}ib": 1024**power for letter, power in _POWERS.items()}
_COUNTS = {"k": 10**3, "thousand": 10**3, "m": 10**6, "million": 10**6, "mio": 10**6}
_COUNTS |= {"b": 10**9, "g": 10**9, "bn": 10**9, "billion": 10**9, "t": 10**12, "trillion": 10**12}


_TIMES = ("s", "min", "h", "d")
_SUFFIXES: dict[str, tuple[str, ...]] = {
    "bytes": ("kB", "MB", "GB", "TB", "KiB", "MiB", "GiB", "TiB")
}
_SUFFIXES |= {"seconds": _TIMES, "minutes": _TIMES}


def suffixes(unit: str, *, is_count: bool) -> tuple[str, ...]:
    """Return the suffixes that a number of a key may have: its unit's, or powers of ten of a count.

    Args:
        unit: Unit of the key; a number without a unit has no suffix.
        is_count: Whether the key takes whole numbers.
    """
    return _SUFFIXES.get(unit, ("k", "M", "B", "T") if unit and is_count else ())


def suffix_pattern(unit: str, *, is_count: bool) -> str:
    """Return a regular expression for numbers with a suffix; empty if none may have one."""
    names = "|".join(suffixes(unit, is_count=is_count)).replace("k|", "k|K|", 1)
    return rf"[0-9]{{1,12}}(\.[0-9]{{1,12}})?[ _]?({names})" if names else ""


def without_suffix(value: Any, unit: str, *, is_count: bool) -> Any:
    """Replace numbers with a suffix, also in lists and mappings, by numbers in the key's unit."""
    if isinstance(value, list):
        return [without_suffix(each, unit, is_count=is_count) for each in value]
    if isinstance(value, dict):
        return {name: without_suffix(each, unit, is_count=is_count) for name, each in value.items()}
    pattern = suffix_pattern(unit, is_count=is_count) if isinstance(value, str) else ""
    is_written = pattern and re.fullmatch(pattern, value.strip())
    return in_unit(value, unit, is_count=is_count) if is_written else value


def in_unit(text: str, unit: str, *, is_count: bool) -> float | None:
    """Convert a number with a unit to a key's unit; None if the text is no such number.

    Args:
        text: As written: 4h, 1.5 GiB, 10k, or a number in quotes.
        unit: Unit of the key: seconds, minutes and bytes are converted.
        is_count: Whether the key takes whole numbers, so that k means a thousand. For a factor or a
            rate, m could mean a thousandth, and G is part of GB/s.
    """
    written = _WRITTEN.fullmatch(text.strip())
    if written is None:
        return None
    name = written[2].lower()
    if not name:
        return float(written[1])
    if unit in ("seconds", "minutes"):
        factor = _SECONDS.get(name, _SECONDS.get(name.removesuffix("s")))
        per_unit = 60 if unit == "minutes" else 1
        return None if factor is None else float(Fraction(written[1]) * factor / per_unit)
    if not is_count:
        return None
    factors = _BYTES if unit == "bytes" else _COUNTS
    factor = factors.get(name, factors.get(name.removesuffix("s")))
    return None if factor is None else float(Fraction(written[1]) * factor)


def memory_text(size: float) -> str:
    """Format bytes of memory with one decimal, in the largest unit that shows at least 0.1.

    >>> memory_text(17 << 30), memory_text(300 << 10), memory_text(0)
    ('17.0 GiB', '0.3 MiB', '0 B')
    """
    return _size_text(size, {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10})


def disk_text(size: float) -> str:
    """Format bytes on a disk with one decimal, in decimal units (kB, MB, GB).

    >>> disk_text(2e9), disk_text(1e7), disk_text(12)
    ('2.0 GB', '10.0 MB', '12 B')
    """
    return _size_text(size, {"GB": 1e9, "MB": 1e6, "kB": 1e3})


def _size_text(size: float, units: dict[str, float]) -> str:
    for name, unit in units.items():
        if abs(size) >= 0.1 * unit:
            return f"{size / unit:,.1f} {name}"
    return f"{size:.0f} B"


def gib_text(size: float) -> str:
    """Format bytes as GiB, such as ``12.50 GiB``."""
    return f"{size / 2**30:,.2f} GiB"


def count_text(number: float) -> str:
    """Format a large count with three digits, such as ``6.74 B``."""
    for unit, name in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= unit:
            return f"{number / unit:.3g} {name}"
    return f"{number:g}"


def seconds_text(seconds: float) -> str:
    """Format the time of a step with three digits, such as ``12.5 ms`` or ``3.40 s``."""
    return f"{seconds:,.2f} s" if seconds >= 1 else f"{seconds * 1000:.3g} ms"
