"""What a rule looks at, and how it speaks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from trainctl.config.schema import RunConfig
from trainctl.errors import Finding, Severity
from trainctl.hardware import Hardware
from trainctl.plan.batches import Batch, Batches
from trainctl.plan.nearest import nearest_divisors as nearest_divisors
from trainctl.plan.nearest import nearest_multiples as nearest_multiples
from trainctl.plan.types import Mesh


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A plan on its way; ``None`` for what could not be derived."""

    config: RunConfig
    hardware: Hardware
    mesh: Mesh | None
    batch: Batch | None
    batches: Batches | None
    total_steps: int | None


Rule = Callable[[Draft], Iterator[Finding]]


def error(key: str, message: str, hint: str = "") -> Finding:
    """A finding that stops a launch; `check` fills in the rule's identifier."""
    return Finding(rule="", key=key, message=message, hint=hint)


def warning(key: str, message: str, hint: str = "") -> Finding:
    """A finding that is printed and recorded."""
    return Finding(rule="", key=key, message=message, hint=hint, severity=Severity.warning)


def choices(values: list[int], key: str = "") -> str:
    """`key=4 or 8`, for hints."""
    text = " or ".join(str(value) for value in values)
    return f"{key}={text}" if key else text
