"""Memory of one rank: its components, the inputs of its phases, and its output projection."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property

from trainctl.config.schema import CrossEntropyKind
from trainctl.memory.activations import (
    StageActivations,
    compute_bytes,
    stage_activations,
    tokens_per_rank,
)
from trainctl.memory.constants import FP32, FUSED_HEAD_GRADIENT_BYTES, LOGIT_BYTES, LogitBytes
from trainctl.memory.engine import EngineMemory, Group
from trainctl.memory.stages import Stage
from trainctl.options.activation_checkpointing import recomputing_section
from trainctl.options.objective import HIDDEN_STATES, objective_of
from trainctl.options.objective.distill import CHUNK_POSITIONS, DistillConfig
from trainctl.plans.types import LayoutPlan

TEXTS_OF_A_RECORD = 3
"""A query, a similar text and a negative: the budget does not read the data."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Components:
    """Memory of one device at one moment, in bytes by component."""

    parameters: int = 0
    """Weights that the model computes with; at ZeRO-3 the local shard."""
    gradients: int = 0
    """Accumulated gradients, and the gradient being computed."""
    master_weights: int = 0
    """Weights that the optimizer updates, if they are a separate copy."""
    optimizer_states: int = 0
    weight_average: int = 0
    """Moving average of the master weights, in fp32."""
    activations: int = 0
    """Activations kept for the backward pass or recomputed, and their gradients."""
    logits: int = 0
    """Logits and the copies of them by the loss or the sampler."""
    key_value_cache: int = 0
    """Keys and values of the answers that a rollout generates."""
    communication_buffers: int = 0
    """Buckets of gradients in communication."""
    gathered_parameters: int = 0
    """Gathered weights at ZeRO-3, including the persistent ones."""
    retained_weights: int = 0
    """Gathered or cast weights that autograd keeps until the backward pass."""
    step_transient: int = 0
    """Copies made while the optimizer updates, or while the engine is built."""
    runtime: int = 0
    """Driver context, communication library, workspaces of libraries."""

    @property
    def total(self) -> int:
        return sum(getattr(self, name) for name in NAMES)

    @property
    def allocated(self) -> int:
        """Bytes in tensors: everything but the runtime."""
        return self.total - self.runtime

    @property
    def estimated(self) -> int:
        """Bytes of the components whose lifetimes the phases simplify."""
        return self.activations + self.logits + self.gathered_parameters + self.retained_weights

    def plus(self, **extra: int) -> Components:
        """Return these components with `extra` bytes added to some of them.

        Raises:
            KeyError: A name in `extra` is no component.
        """
        unknown = extra.keys() - NAMES
        if unknown:
            raise KeyError(f"no such component: {sorted(unknown)}")
        return replace(self, **{name: getattr(self, name) + size for name, size in extra.items()})

    def to_json(self) -> dict[str, int]:
        """Return the bytes by component, in the order of the schema."""
        return {name: getattr(self, name) for name in NAMES}


NAMES = tuple(item.name for item in fields(Components))
"""Names of the components, from the bottom of a stacked bar to its top."""


def fullest_phase(moments: Mapping[str, Components]) -> str:
    """Return the name of the moment with the most memory; the first if several are equal."""
    return max(moments, key=lambda name: moments[name].total)


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Inputs of the memory phases of one rank of a pipeline stage."""

    plan: LayoutPlan
    engine: EngineMemory
    stage: Stage
    """Pipeline stage with its tensors on this rank."""
    groups: tuple[Group, ...]
    """Parameter groups of the optimizer on this stage."""
    activations: StageActivations
    """Activations of the stage's blocks."""
    logit_bytes: LogitBytes
    """Bytes per logit that the loss holds."""
    resident: Components
    """Permanent memory after the first step."""

    @cached_property
    def trained(self) -> Stage:
        """Stage without its frozen tensors."""
        return self.stage.trained

    @property
    def recomputes(self) -> bool:
        return recomputing_section(self.plan.config) is not None

    @property
    def busiest(self) -> int:
        """Largest number of elements that the optimizer updates at once."""
        return max((self.engine.sub_group(group) for group in self.groups), default=0)

    @property
    def update(self) -> int:
        """Bytes of the update's temporary copies in the parameter group that makes the most."""
        return max((self.engine.update_bytes(group) for group in self.groups), default=0)


def rank_memory(
    plan: LayoutPlan,
    engine: EngineMemory,
    stage: Stage,
    resident: Components,
    logit_bytes: LogitBytes | None = None,
) -> RankMemory:
    """Build the inputs of a rank's phases. `logit_bytes` is None for trainctl's plain loss."""
    return RankMemory(
        plan=plan,
        engine=engine,
        stage=stage,
        groups=engine.groups(stage),
        activations=activations_of_rank(plan, engine, stage),
        logit_bytes=_distilled_logit_bytes(plan) or logit_bytes or LOGIT_BYTES[compute_bytes(plan)],
        resident=resident,
    )


def activations_of_rank(plan: LayoutPlan, engine: EngineMemory, stage: Stage) -> StageActivations:
    """Return the activations of the blocks on a rank, those that predict later tokens included."""
    future = plan.config.model.future_blocks or 0
    return StageActivations.of_all(
        stage_activations(
            plan,
            blocks=part.blocks + (future if part.has_head else 0),
            in_flight=micro_batches_in_flight(plan, part),
            element=compute_bytes(plan),
            autocast=engine.autocast,
            traced=part.traced,
            learning=part.learning,
        )
        for part in stage.parts
    )


def micro_batches_in_flight(plan: LayoutPlan, stage: Stage) -> int:
    """Return the micro-batches whose activations a stage holds at once: at most one for each stage
    from it to the last, under 1F1B and under DualPipeV.
    """
    later = plan.config.parallelism.stages - stage.index
    return min(plan.batch.gradient_accumulation_steps, later)


def head_input_bytes(rank: RankMemory) -> int:
    """Return the bytes kept by the final norm and the output projection, and their input gradient.

    A frozen norm keeps no scaled values; a frozen projection keeps no input.
    """
    if not rank.stage.has_head:
        return 0
    element = compute_bytes(rank.plan)
    hidden = rank.plan.config.model.hidden_size
    kept = 3 - (not rank.stage.final_norm_trains) - (not _reads_input(rank))
    return tokens_per_rank(rank.plan) * hidden * (FP32 + kept * element)


def _reads_input(rank: RankMemory) -> bool:
    """Return True if the output projection keeps its input: trained, or its layer always does."""
    learning = rank.stage.learning or ()
    keeps = rank.engine.keeps_inputs or any(each.keeps_inputs for each, _ in learning)
    return rank.trained.head > 0 or keeps


def logits_bytes(rank: RankMemory, per_logit: int) -> int:
    """Return the bytes of the logits that exist at once, with the loss's copies of them; of
    embeddings, if these are compared instead.
    """
    if not rank.stage.has_head:
        return 0
    if objective_of(rank.plan.config.objective).reads == HIDDEN_STATES:
        return _embedding_bytes(rank.plan)
    model = rank.plan.config.model
    outputs = model.score_outputs or -(-model.vocab_size // rank.plan.mesh.tensor)
    size = (1 + (model.future_blocks or 0)) * loss_tokens(rank.plan) * outputs * per_logit
    if isinstance(rank.plan.config.objective, DistillConfig):
        # Scores, the scores of other tokens, and two exponentials (train/objectives/distillation).
        size += chunk_logit_bytes(rank.plan, copies=4)
    return size


def _embedding_bytes(plan: LayoutPlan) -> int:
    """Return the bytes of embeddings: fp32 hidden states with their gradient; the features of the
    global batch, their gradient and a copy; similarities, scores, softmax and gradient of all
    queries with all other texts.
    """
    records, width = plan.batch.global_batch_size, plan.config.model.hidden_size
    features = 3 * records * TEXTS_OF_A_RECORD * width
    similarities = 4 * records * records * (TEXTS_OF_A_RECORD - 1)
    return FP32 * (2 * tokens_per_rank(plan) * width + features + similarities)


def _distilled_logit_bytes(plan: LayoutPlan) -> LogitBytes | None:
    """Return the bytes per logit of distillation: of the logits and of their gradients, one by the
    teacher and one by the labels; None for another objective.
    """
    config, element = plan.config.objective, compute_bytes(plan)
    if not isinstance(config, DistillConfig):
        return None
    return LogitBytes(forward=element, backward=element * (3 if config.label_weight else 2))


def chunk_logit_bytes(plan: LayoutPlan, copies: int) -> int:
    """Return the bytes of fp32 copies of the logits of one chunk of positions in distillation."""
    positions = min(tokens_per_rank(plan), CHUNK_POSITIONS)
    return copies * FP32 * positions * -(-plan.config.model.vocab_size // plan.mesh.tensor)


def fused_head_bytes(rank: RankMemory) -> int:
    """Return the bytes of the gradients that a fused loss computes in the forward pass: of the
    output projection's weight, and of its input.
    """
    if not rank.stage.has_head:
        return 0
    if rank.plan.config.kernels.cross_entropy is not CrossEntropyKind.liger_fused:
        return 0
    hidden = tokens_per_rank(rank.plan) * rank.plan.config.model.hidden_size
    return FUSED_HEAD_GRADIENT_BYTES * rank.stage.head + compute_bytes(rank.plan) * hidden


def loss_tokens(plan: LayoutPlan) -> int:
    """Return the number of tokens whose logits exist at once."""
    tokens, model = tokens_per_rank(plan), plan.config.model
    match plan.config.kernels.cross_entropy:
        case CrossEntropyKind.plain | None:
            return tokens
        case CrossEntropyKind.chunked:
            return min(tokens, plan.config.kernels.chunk_tokens)
        case CrossEntropyKind.liger_fused:
            # Tokens of a chunk: tokens / (vocabulary size / hidden size), rounded up to a power
            # of two (ops/fused_linear_cross_entropy.py of liger-kernel).
            parts = max(1, -(-model.vocab_size // max(model.hidden_size, 1)))
            return min(tokens, 1 << max(-(-tokens // parts) - 1, 0).bit_length())
