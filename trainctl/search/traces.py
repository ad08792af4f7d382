"""Cached traces of models without a closed form, for memory budgets."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from trainctl.config.codec import to_plain
from trainctl.config.registry import load
from trainctl.config.schema import RunConfig
from trainctl.memory.traced import TracedModel
from trainctl.models.tracing import known_trace, trace_in_child

_KEPT = 8
"""Traces of different lengths, formats and models kept during one search."""


class _TraceKey:
    """Configuration as a cache key: equal for all configurations with the same trace."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        model = config.model
        self.key = (
            model.path,
            model.attention,
            tuple(model.anatomy),
            repr(config.precision),
            config.training.sequence_length,
            config.data.mask_documents,
        )

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _TraceKey) and self.key == other.key


def traced_model(config: RunConfig) -> TracedModel | None:
    """Return the trace of a model without a closed form; None for a model with one.

    Raises:
        TrainctlError: The model cannot be traced.
    """
    return _traced(_TraceKey(config)) if config.model.needs_trace else None


def traced_already(config: RunConfig) -> TracedModel | None:
    """Return the trace if an earlier command has made it, otherwise None; starts no process."""
    if not config.model.needs_trace:
        return None
    found = known_trace(to_plain(config), family=_family(config))
    return None if found is None else TracedModel.from_json(found)


def trace(config: RunConfig, folder: Path | None = None) -> TracedModel:
    """Return the trace of any model, made in a child process if it is not cached.

    Args:
        folder: Where the user's own code is looked up; None is the current directory.

    Raises:
        TrainctlError: The model cannot be built or traced; says why, and names the file.
    """
    found = trace_in_child(to_plain(config), folder, family=_family(config))
    return TracedModel.from_json(found)


def _family(config: RunConfig) -> str:
    return repr(load("model", config.model.family))


@lru_cache(maxsize=_KEPT)
def _traced(asked: _TraceKey) -> TracedModel:
    return trace(asked.config)
