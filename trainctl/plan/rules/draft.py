"""What a rule looks at, and how it speaks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from trainctl.config.schema import RunConfig
from trainctl.errors import Finding, Severity
from trainctl.hardware import Hardware
from trainctl.plan.types import Batch, Mesh


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A plan on its way; ``None`` for what could not be derived."""

    config: RunConfig
    hardware: Hardware
    mesh: Mesh | None
    batch: Batch | None
    total_steps: int | None


Rule = Callable[[Draft], Iterator[Finding]]


def error(key: str, message: str, hint: str = "") -> Finding:
    """A finding that stops a launch; `check` fills in the rule's identifier."""
    return Finding(rule="", key=key, message=message, hint=hint)


def warning(key: str, message: str, hint: str = "") -> Finding:
    """A finding that is printed and recorded."""
    return Finding(rule="", key=key, message=message, hint=hint, severity=Severity.warning)


def nearest_divisors(number: int, wanted: int) -> list[int]:
    """The divisors of `number` next to `wanted`: the largest below, the smallest above."""
    divisors = [size for size in range(1, number + 1) if number % size == 0]
    below = [size for size in divisors if size <= wanted]
    above = [size for size in divisors if size > wanted]
    return below[-1:] + above[:1]


def nearest_multiples(number: int, step: int) -> list[int]:
    """The positive multiples of `step` around `number`, without `number` itself."""
    below = (number - 1) // step * step
    return [value for value in (below, below + step) if value > 0 and value != number] or [step]


def choices(values: list[int], key: str = "") -> str:
    """`key=4 or 8`, for hints."""
    text = " or ".join(str(value) for value in values)
    return f"{key}={text}" if key else text
