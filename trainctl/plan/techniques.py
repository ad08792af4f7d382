"""Techniques that can be planned and budgeted but not yet trained with."""

from __future__ import annotations

from collections.abc import Iterator

from trainctl.config.schema import (
    RunConfig,
)


def not_yet(config: RunConfig) -> tuple[str, ...]:
    """Return one sentence, naming the key, for each technique that `launch` has to refuse today."""
    return tuple(
        f"{key}={value}: training with {technique} is not there yet"
        for key, value, technique in _unsupported_techniques(config)
    )


def _unsupported_techniques(config: RunConfig) -> Iterator[tuple[str, object, str]]:
    """Yield key, value and name of each technique that the config uses and training lacks."""
    if not config.trains_itself:
        return
    if config.model.trust_remote_code:
        yield "model.trust_remote_code", "true", "a model's own code"
