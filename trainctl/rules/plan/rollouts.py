"""Rules about answers that the training engine generates."""

from __future__ import annotations

from collections.abc import Iterator

from trainctl.config.schema import OffloadDevice, RunConfig
from trainctl.options.limits import Limit, never_value, only_value
from trainctl.options.objective.grpo import GrpoConfig, Rollout
from trainctl.plans.shapes import anatomy
from trainctl.rules.plan.draft import Draft, values_outside_limits
from trainctl.rules.rule import Problem, rule


def _keeps_keys(config: RunConfig) -> bool:
    read = None if config.model.is_unread else anatomy(config.model)
    return read is None or not read.is_recurrent


LIMITS = (
    only_value("model.factory", None, "a module of your own has no key-value cache"),
    Limit(
        key="model.model_type",
        holds=_keeps_keys,
        why="the model carries a state from token to token, which no slot of a cache holds",
        nearest="another model",
    ),
    only_value(
        "parallelism.expert",
        1,
        "the ranks exchange tokens in each pass, and each generates another number of tokens",
    ),
    only_value(
        "parallelism.sequence_sharded_norms",
        False,
        "a single token cannot be cut",
    ),
    never_value(
        "offload.parameters",
        OffloadDevice.nvme,
        "all weights would be read from NVMe for each token",
        "offload.parameters=cpu",
    ),
)
"""Settings with which the training engine generates answers."""


@rule("TC491", "*", example="recipe=tiny objective=grpo parallelism.sequence_sharded_norms=true")
def answers_can_be_generated(draft: Draft) -> Iterator[Problem]:
    """The training engine generates answers where each rank can add one token to a cache.

    With `objective.rollout=engine` the model in training generates, on the layout that it trains
    on. A layout that cuts a sequence, or a model without a key-value cache, cannot.

    Fix: Set the key that the message names, or generate elsewhere with objective.rollout=vllm.
    """
    section = draft.config.objective
    if not isinstance(section, GrpoConfig) or section.rollout is not Rollout.engine:
        return
    for key, value, limit in values_outside_limits(draft.config, LIMITS):
        yield Problem(
            f"{key}={value} with objective.rollout=engine: {limit.why}",
            f"{limit.nearest}, or objective.rollout=vllm",
            key=key,
        )
