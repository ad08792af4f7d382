"""Legal whole numbers nearest to an illegal one."""

from __future__ import annotations

from collections.abc import Iterable
from math import isqrt


def divisors(number: int) -> list[int]:
    """Return the divisors of a positive number, ascending, in square-root time."""
    small = [size for size in range(1, isqrt(number) + 1) if number % size == 0]
    large = [number // size for size in reversed(small) if size * size != number]
    return small + large


def nearest_divisors(number: int, wanted: int) -> list[int]:
    """Return the divisors of `number` next to `wanted`: the largest up to it, the smallest
    above.
    """
    sizes = divisors(number)
    below = [size for size in sizes if size <= wanted]
    above = [size for size in sizes if size > wanted]
    return below[-1:] + above[:1]


def nearest_multiples(number: int, step: int) -> list[int]:
    """Return the positive multiples of `step` around `number`, without `number` itself."""
    below = (number - 1) // step * step
    return [value for value in (below, below + step) if value > 0 and value != number] or [step]


def choices(values: Iterable[int], key: str = "") -> str:
    """Return `key=4 or 8` as text for hints."""
    text = " or ".join(str(value) for value in values)
    return f"{key}={text}" if key else text
