"""Expansion of overrides with several values into the overrides of each run of a sweep."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trainctl.config.overrides import SYNTAX
from trainctl.errors import Finding, TrainctlError

MOST_RUNS = 1000
"""Maximum runs of a sweep; more are almost certainly a typing error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepPoint:
    """One run of a sweep."""

    overrides: tuple[str, ...]
    """Overrides of the run's configuration, each with one value."""
    values: dict[str, str]
    """Value of each swept key and group in this run, as text."""


def expand_sweep(overrides: Sequence[str]) -> list[SweepPoint]:
    """Return every combination of the values; the first override varies slowest.

    Args:
        overrides: In Hydra's grammar: `key=1,2`, `key=choice(a,b)`, `key=range(1,4)` have several
            values, all others one.

    Returns:
        The points. Without a swept override there is a single point, with empty `values`.

    Raises:
        TrainctlError: A value that is no list of values, such as an interval, or too many runs.
    """
    if not overrides:
        return [SweepPoint(overrides=(), values={})]
    choices = [_choices(text) for text in overrides]
    count = math.prod(len(texts) for texts, _ in choices)
    if count > MOST_RUNS:
        raise TrainctlError(
            f"this sweep has {count:,} runs, and {MOST_RUNS:,} are the most",
            hint="give fewer values, or sweep in parts",
        )
    points = []
    for texts in itertools.product(*(texts for texts, _ in choices)):
        swept = [text for text, (_, is_swept) in zip(texts, choices, strict=True) if is_swept]
        values = {key: value for key, _, value in (text.partition("=") for text in swept)}
        points.append(SweepPoint(overrides=texts, values=values))
    return points


def _choices(text: str) -> tuple[list[str], bool]:
    """Return the override with each of its values, and whether it has several."""
    parsed = _parse(text)
    if parsed is None or not parsed.is_sweep_override():
        return [text], False
    if not parsed.is_discrete_sweep():
        raise _refused(text, "an interval has no list of values", "write them: KEY=1,2,3")
    key = parsed.get_key_element()
    try:
        return [f"{key}={value}" for value in parsed.sweep_string_iterator()], True
    except (ValueError, TypeError, NotImplementedError) as error:
        raise _refused(text, str(error).splitlines()[0], "write the values: KEY=1,2,3") from None


def _parse(text: str) -> Any:
    """Parse by Hydra's grammar; None for an override that composition will refuse."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        return OverridesParser.create().parse_override(text)
    except (HydraException, ValueError, RecursionError):
        return None


def _refused(text: str, message: str, hint: str) -> TrainctlError:
    return TrainctlError.from_findings(
        [Finding(rule=SYNTAX, message=f"{text}: {message}", hint=hint, source=text)]
    )
