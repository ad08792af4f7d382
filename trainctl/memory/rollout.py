"""Memory of a rollout: answers that a rank generates side by side, with a key-value cache.

The cache is allocated whole for the longest prompt and answer (`trainctl.train.rollouts.generate`).
The number of answers is a function of the plan, so that the run has the one that was budgeted.
"""

from __future__ import annotations

from dataclasses import dataclass

from trainctl.config.schema import AttentionKind, ModelConfig
from trainctl.memory.activations import block_activations, compute_bytes
from trainctl.memory.budget import device_budget
from trainctl.memory.rank import Components, RankMemory
from trainctl.options.model import spec_of
from trainctl.options.objective.grpo import GrpoConfig, Rollout
from trainctl.plans import shapes
from trainctl.plans.types import LayoutPlan

SPARE_COLUMNS = 64
"""Tokens of a slot beyond the longest answer: the cache is moved to its begin once in so many
tokens, which then costs a few percent of reading it for each token.
"""

SAMPLER_BYTES, TOP_P_BYTES = 20, 32
"""Bytes per logit that drawing a token takes beside the logits, and with `objective.top_p` more:
fp32 scores, fp64 probabilities and their sums; a sort with its indices, and sums of it.
"""

ROLLOUT, ROLLOUT_BY_LAYER = "rollout", "rollout_by_layer"
"""Names of the phase: with all weights whole on each rank, or gathered for each token."""

MEMORY_SHARE = 0.75
"""Share of a device's memory that a rollout may fill: fragmentation and the budget's own doubt take
up to a quarter more.
"""

GATHERED_TOKEN = 8
"""Time of a token for which weights are gathered, over the time of one that reads whole weights: at
least this, as links between devices are that much slower than memory.
"""

ANSWERS_AT_ONCE = 64
"""Most answers side by side where the device's memory is unknown."""


def own_rollout(plan: LayoutPlan) -> GrpoConfig | None:
    """Return the objective's section if the training engine generates answers; else None."""
    section = plan.config.objective
    if not isinstance(section, GrpoConfig) or section.rollout is not Rollout.engine:
        return None
    return section


def answers_of_rank(plan: LayoutPlan, section: GrpoConfig) -> int:
    """Return the number of answers that a data-parallel rank generates in one rollout."""
    return -(-plan.batch.global_batch_size * section.updates // plan.mesh.data)


def cache_bytes_per_token(plan: LayoutPlan) -> int:
    """Return the bytes of keys and values of one token in all layers, on a tensor rank."""
    model = plan.config.model
    heads = -(-shapes.key_value_heads(model) // plan.mesh.tensor)
    return 2 * model.num_layers * heads * shapes.head_dim(model) * compute_bytes(plan)


def _cache_bytes(plan: LayoutPlan, section: GrpoConfig) -> int:
    """Return the bytes of the slot of one answer."""
    tokens = section.max_prompt_tokens + section.max_answer_tokens + SPARE_COLUMNS
    return tokens * cache_bytes_per_token(plan)


def prefill_tokens(plan: LayoutPlan, section: GrpoConfig) -> int:
    """Return the most tokens of prompts in one forward pass: those of a micro-batch."""
    tokens = plan.batch.micro_batch_size * plan.batch.sequence_length
    return max(tokens, section.max_prompt_tokens)


def rollout_phase(rank: RankMemory, *, partitioned: int, module: int) -> dict[str, Components]:
    """Return the memory of a rollout by the name of the phase; empty if the engine makes none.

    Args:
        partitioned: Bytes of the weights that a rank has to gather, all together; 0 if it always
            holds them whole.
        module: Bytes of the weights gathered at once if not all are.
    """
    section = own_rollout(rank.plan)
    if section is None:
        return {}
    plan, model, element = rank.plan, rank.plan.config.model, compute_bytes(rank.plan)
    cache = _cache_bytes(plan, section)
    logits = model.vocab_size * (element + SAMPLER_BYTES + TOP_P_BYTES * (section.top_p < 1))
    # Either a pass over prompts, or drawing a token of each answer.
    prefill = _prefill_bytes(rank, section)
    capacity = plan.hardware.device_memory_bytes
    answers = answers_of_rank(plan, section)
    name, gathered, most = ROLLOUT, partitioned, ANSWERS_AT_ONCE
    if capacity is not None:
        free = int(MEMORY_SHARE * capacity) - rank.resident.total - prefill
        most, more = ((free - held) // (cache + logits) for held in (partitioned, module))
        if GATHERED_TOKEN * most < min(more, answers):
            name, gathered, most = ROLLOUT_BY_LAYER, module, more
    count = min(answers, section.rollout_batch_size or max(1, most))
    moment = rank.resident.plus(key_value_cache=count * cache, gathered_parameters=gathered)
    draws = count * logits > prefill
    return {name: moment.plus(logits=count * logits) if draws else moment.plus(activations=prefill)}


@dataclass(frozen=True, slots=True)
class RolloutSize:
    """Numbers of a rollout that its memory decides."""

    answers: int
    """Answers that are generated side by side: by a rank, or by a server for the run."""
    holds_weights: bool
    """Whether each rank gathers all weights once, rather than for each token."""

    @classmethod
    def of(cls, plan: LayoutPlan) -> RolloutSize:
        """Return the size that the budget of a plan with rollouts counts."""
        section = own_rollout(plan)
        if section is None:
            asked = getattr(plan.config.objective, "rollout_batch_size", None)
            return cls(asked or ANSWERS_AT_ONCE, holds_weights=True)
        moments = device_budget(plan).worst_stage.moments
        holds = ROLLOUT in moments
        moment = moments[ROLLOUT if holds else ROLLOUT_BY_LAYER]
        return cls(moment.key_value_cache // _cache_bytes(plan, section), holds)


def _prefill_bytes(rank: RankMemory, section: GrpoConfig) -> int:
    """Return the bytes of one block in a forward pass over prompts, without a gradient.

    Those that training keeps of attention, or of the feed-forward layer, are alive at once.
    """
    plan = rank.plan
    block = rank.stage.traced or block_activations(
        plan.config.model,
        sequence_length=section.max_prompt_tokens,
        element=compute_bytes(plan),
        tensor=plan.mesh.tensor,
        autocast=rank.engine.autocast,
        liger=bool(plan.config.kernels.liger),
    )
    inside = max(block.feed_forward, block.attention + block.scores)
    return prefill_tokens(plan, section) * (inside + 2 * block.boundary)


def cache_reads(model: ModelConfig) -> int:
    """Return how often a decoded token moves the cache through memory.

    Eager attention writes and reads a copy for each query head. Flash attention copies what is not
    padding. transformers' sdpa reads it once (integrations/sdpa_attention.py, `pack_gqa`).
    """
    if model.attention is AttentionKind.sdpa or spec_of(model).has_equal_heads:
        return 1
    if model.attention is AttentionKind.eager:
        return 1 + 2 * model.num_attention_heads // shapes.key_value_heads(model)
    return 3
