"""Rules about answers that the training engine generates."""

from __future__ import annotations

from collections.abc import Iterator

from trainctl.config.keys import as_written
from trainctl.config.schema import OffloadDevice, RunConfig
from trainctl.options.adapter import low_rank
from trainctl.options.limits import Limit, never_value, only_value
from trainctl.options.objective.grpo import GrpoConfig, Rollout
from trainctl.plans.shapes import anatomy
from trainctl.rules.plan.draft import Draft, limit_problems
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
    only_value("parallelism.sequence_sharded_norms", False, "a single token cannot be cut"),
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
    beside, instead = "objective.rollout=engine", "objective.rollout=vllm"
    yield from limit_problems(draft.config, LIMITS, beside, instead)


@rule(
    "TC495",
    "objective.samples",
    "objective.max_prompt_tokens",
    "objective.max_answer_tokens",
    "objective.kl_weight",
    "training.global_batch_size",
    "training.batch_ramp",
    "training.sequence_length",
    "adapter.kind",
    "adapter.also_train",
    example="recipe=tiny objective=grpo training.global_batch_size=12",
)
def answers_fill_the_batch(draft: Draft) -> Iterator[Problem]:
    """A step of sampled answers has whole groups, each answer in a row of its own.

    A sample is one answer. The answers to a prompt are compared, so a global batch holds all of
    them; a row of `training.sequence_length` holds the longest prompt with the longest answer.

    Fix: Set the key that the message names.
    """
    config, section = draft.config, draft.config.objective
    if not isinstance(section, GrpoConfig) or not config.trains_itself:
        return
    training = config.training
    size = draft.batch.global_batch_size if draft.batch is not None else section.samples
    if size % section.samples:
        nearest = max(1, round(size / section.samples)) * section.samples
        yield Problem(
            f"training.global_batch_size={size} counts answers, and is no multiple of "
            f"objective.samples={section.samples}",
            f"training.global_batch_size={nearest}",
            key="training.global_batch_size",
        )
    if training.batch_ramp:
        yield Problem(
            f"training.batch_ramp with objective={section.kind} is not supported: the answers of "
            "objective.updates steps are sampled at once, for batches of one size",
            "training.batch_ramp=[]",
            key="training.batch_ramp",
        )
    longest = section.max_prompt_tokens + section.max_answer_tokens
    if longest > training.sequence_length:
        yield Problem(
            f"objective.max_prompt_tokens={section.max_prompt_tokens} and objective."
            f"max_answer_tokens={section.max_answer_tokens} are more than training.sequence_length="
            f"{training.sequence_length}",
            f"training.sequence_length={longest}",
            key="training.sequence_length",
        )
    adapter = low_rank(config.adapter)
    if section.kl_weight > 0 and (adapter is None or adapter.also_train):
        why, instead = "which a run keeps only below an adapter", "adapter=lora"
        if adapter is not None:
            why = f"and adapter.also_train={as_written(adapter.also_train)} trains some of them"
            instead = "adapter.also_train=[]"
        yield Problem(
            f"objective.kl_weight={section.kl_weight:g} compares with the weights before the first "
            f"step, {why}",
            f"objective.kl_weight=0, or {instead}",
            key="objective.kl_weight",
        )


@rule(
    "TC492",
    "objective.rollout",
    "objective.rollout_url",
    "objective.top_p",
    "objective.top_k",
    example="recipe=tiny objective=grpo objective.rollout=vllm",
)
def a_server_is_named(draft: Draft) -> Iterator[Problem]:
    """A rollout server has an address, and samples from the distribution that is trained.

    A server that truncates its distribution returns the log-probabilities of the rest, which the
    trainer's never match.

    Fix: Set objective.rollout_url, objective.top_p=1 and objective.top_k=0.
    """
    section = draft.config.objective
    if not isinstance(section, GrpoConfig) or section.rollout is not Rollout.vllm:
        return
    url = section.rollout_url or ""
    if not url.startswith(("http://", "https://")):
        yield Problem(
            f"objective.rollout=vllm with rollout_url={url or 'null'}: no server is named",
            "objective.rollout_url=http://localhost:8000",
            key="objective.rollout_url",
        )
    for key, value, whole in (("top_p", section.top_p, 1), ("top_k", section.top_k, 0)):
        if value != whole:
            yield Problem(
                f"objective.{key}={value:g} with objective.rollout=vllm: the server's "
                "log-probabilities are those of the tokens that are left",
                f"objective.{key}={whole}, or objective.rollout=engine",
                key=f"objective.{key}",
            )
