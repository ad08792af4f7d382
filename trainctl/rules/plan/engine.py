"""Rule about the features that an engine other than DeepSpeed lacks."""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from typing import Any

from trainctl.config.codec import to_plain
from trainctl.config.keys import as_written
from trainctl.config.schema import RunConfig
from trainctl.errors import Finding
from trainctl.options.engine import engine_of
from trainctl.plan.deepspeed import flatten
from trainctl.rules.plan.draft import Draft, error


def engine_supports_settings(draft: Draft) -> Iterator[Finding]:
    """An engine other than DeepSpeed has a part of what a configuration can say."""
    spec = engine_of(draft.config)
    for limit in spec.limits:
        if limit.holds(draft.config):
            continue
        for key, value in _typed(draft.config, limit.key):
            yield error(
                key,
                f"{key}={as_written(value)}: engine.kind={spec.name} {limit.why}",
                f"{limit.nearest}, or engine=deepspeed",
            )


def _typed(config: RunConfig, key: str) -> Iterator[tuple[str, Any]]:
    """Yield a key and its value; for a mapping, each of its entries."""
    value = to_plain(reduce(getattr, key.split("."), config))
    if isinstance(value, dict):
        yield from flatten(value, f"{key}.")
    else:
        yield key, value
