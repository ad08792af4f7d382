"""What a filter says of itself: the numbers that it needs of a document, and their bounds.

A filter measures and does not judge: what `build` names gives numbers of documents, which are kept,
and `bounds` says which of its keys each of them is held against. So a key that changes reads no
text again, unless it is one of `settings`.
"""

from __future__ import annotations

from dataclasses import dataclass

from trainctl.config.registry import Spec


@dataclass
class FilterConfig:
    """The keys that all filters share: none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """What a number must be at least or at most; else the document goes."""

    statistic: str
    """The number, as `build` calls it."""
    key: str
    """The filter's key that has the bound; where that is none, there is none."""
    is_least: bool
    """Whether less is too little; else more is too much."""


def at_least(**keys: str) -> tuple[Bound, ...]:
    """Bounds below, as ``key="statistic"``."""
    return tuple(Bound(statistic=each, key=key, is_least=True) for key, each in keys.items())


def at_most(**keys: str) -> tuple[Bound, ...]:
    """Bounds above, as ``key="statistic"``."""
    return tuple(Bound(statistic=each, key=key, is_least=False) for key, each in keys.items())


@dataclass(frozen=True, kw_only=True)
class Filter(Spec):
    """What one filter measures, and what it refuses.

    Its `build` is called with a `trainctl.data.quality.batches.DocumentBatch`, and the values of
    `settings` by name; it gives ``{statistic: [documents]}``. It runs in the processes that
    prepare a corpus, and imports no torch.
    """

    keys: type = FilterConfig
    """The dataclass of its thresholds."""
    bounds: tuple[Bound, ...]
    """What each statistic is held against."""
    settings: tuple[str, ...] = ()
    """The keys that the numbers themselves depend on."""
