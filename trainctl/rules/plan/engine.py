"""Rule about the features that an engine other than DeepSpeed lacks."""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from typing import Any

from trainctl.config.codec import to_plain
from trainctl.config.keys import as_written
from trainctl.config.schema import RunConfig
from trainctl.options.engine import engine_of
from trainctl.plan.deepspeed import flatten
from trainctl.rules.plan.draft import Draft
from trainctl.rules.rule import Problem, rule


@rule("TC405", "*", example="recipe=tiny engine=fsdp2 zero_stage=1")
def engine_supports_settings(draft: Draft) -> Iterator[Problem]:
    """The engine supports every setting of the configuration.

    engine=fsdp2 is torch's fully_shard: data parallel, fp32 and bf16, optimizers that look at one
    element at a time. The rest is DeepSpeed's.

    Fix: Use engine=deepspeed, or leave out what the message names.
    """
    spec = engine_of(draft.config)
    for limit in spec.limits:
        if limit.holds(draft.config):
            continue
        for key, value in _typed(draft.config, limit.key):
            yield Problem(
                f"{key}={as_written(value)}: engine.kind={spec.name} {limit.why}",
                f"{limit.nearest}, or engine=deepspeed",
                key=key,
            )


def _typed(config: RunConfig, key: str) -> Iterator[tuple[str, Any]]:
    """Yield a key and its value; for a mapping, each of its entries."""
    value = to_plain(reduce(getattr, key.split("."), config))
    if isinstance(value, dict):
        yield from flatten(value, f"{key}.")
    else:
        yield key, value
