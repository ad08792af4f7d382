"""The trace of a model without a closed form, for everything that budgets it."""

from __future__ import annotations

from functools import lru_cache

from trainctl.config.schema import RunConfig
from trainctl.config.tracing import known_trace, needs_trace, trace_in_child
from trainctl.memory.traced import TracedModel

_KEPT = 8
"""Of different lengths, formats and models, in one search."""


class _Asked:
    """A configuration, equal to all whose trace is the same."""

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
        return isinstance(other, _Asked) and self.key == other.key


def traced_model(config: RunConfig) -> TracedModel | None:
    """What a trace finds of a model that has no closed form; None for one that has.

    Raises:
        TrainctlError: It cannot be traced.
    """
    return _traced(_Asked(config)) if needs_trace(config) else None


def traced_already(config: RunConfig) -> TracedModel | None:
    """Return the same, where an earlier command has traced it; starts no process."""
    found = known_trace(config) if needs_trace(config) else None
    return None if found is None else TracedModel.from_json(found)


@lru_cache(maxsize=_KEPT)
def _traced(asked: _Asked) -> TracedModel:
    return TracedModel.from_json(trace_in_child(asked.config))
