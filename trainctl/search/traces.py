"""Cached traces of models without a closed form, for memory budgets."""

from __future__ import annotations

from functools import lru_cache

from trainctl.config.schema import RunConfig
from trainctl.config.tracing import known_trace, needs_trace, trace_in_child
from trainctl.memory.traced import TracedModel

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
    return _traced(_TraceKey(config)) if needs_trace(config) else None


def traced_already(config: RunConfig) -> TracedModel | None:
    """Return the trace if an earlier command has made it, otherwise None; starts no process."""
    found = known_trace(config) if needs_trace(config) else None
    return None if found is None else TracedModel.from_json(found)


@lru_cache(maxsize=_KEPT)
def _traced(asked: _TraceKey) -> TracedModel:
    return TracedModel.from_json(trace_in_child(asked.config))
