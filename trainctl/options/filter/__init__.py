"""Specification of a document filter: the statistics that it needs, and their bounds.

A filter measures and does not judge. `build` computes statistics of documents, which are stored,
and `bounds` compares each of them with a key. So changing a key does not read any text again,
unless it is one of `settings`.
"""

from __future__ import annotations

from dataclasses import dataclass

from trainctl.config.registry import Spec


@dataclass
class FilterConfig:
    """Keys that all filters share: none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """A lower or upper bound of a statistic; documents outside it are dropped."""

    statistic: str
    """Name of the statistic, as `build` returns it."""
    key: str
    """Key of the filter that sets the bound; null there means no bound."""
    is_least: bool
    """Whether it is a lower bound; otherwise it is an upper bound."""


def at_least(**keys: str) -> tuple[Bound, ...]:
    """Return lower bounds, given as ``key="statistic"``."""
    return tuple(Bound(statistic=each, key=key, is_least=True) for key, each in keys.items())


def at_most(**keys: str) -> tuple[Bound, ...]:
    """Return upper bounds, given as ``key="statistic"``."""
    return tuple(Bound(statistic=each, key=key, is_least=False) for key, each in keys.items())


@dataclass(frozen=True, kw_only=True)
class Filter(Spec):
    """Specification of one document filter.

    Its `build` is called with a `trainctl.data.quality.batches.DocumentBatch` and the values of
    `settings` by name, and returns ``{statistic: [documents]}``. It runs in the processes that
    prepare a corpus, and imports no torch.
    """

    keys: type = FilterConfig
    """Dataclass of its thresholds."""
    bounds: tuple[Bound, ...]
    """Bounds of its statistics."""
    settings: tuple[str, ...] = ()
    """Keys on which the statistics themselves depend."""
