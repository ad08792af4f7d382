"""What a config asks for that training does not do yet, although it plans and budgets it."""

from __future__ import annotations

from collections.abc import Iterator

from trainctl.config.schema import (
    RunConfig,
)


def not_yet(config: RunConfig) -> tuple[str, ...]:
    """Return one sentence for each technique that `launch` has to refuse today; it names the
    key."""
    return tuple(
        f"{key}={value}: training with {technique} is not there yet"
        for key, value, technique in _wanted(config)
    )


def _wanted(config: RunConfig) -> Iterator[tuple[str, object, str]]:
    """Key, value and name of each technique that the config uses and training lacks."""
    if not config.trains_itself:
        return
    if config.model.trust_remote_code:
        yield "model.trust_remote_code", "true", "a model's own code"
