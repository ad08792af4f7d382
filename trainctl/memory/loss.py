"""Memory of the output projection and the loss."""

from __future__ import annotations

from trainctl.config.schema import CrossEntropyKind
from trainctl.memory.activations import compute_bytes, tokens_per_rank
from trainctl.memory.constants import FUSED_HEAD_GRADIENT_BYTES
from trainctl.memory.rank import RankMemory
from trainctl.plan.types import LayoutPlan

FP32 = 4


def head_input(rank: RankMemory) -> int:
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


def logits(rank: RankMemory, per_logit: int) -> int:
    """Return the bytes of the logits that exist at once, with the loss's copies of them."""
    if not rank.stage.has_head:
        return 0
    vocabulary = -(-rank.plan.config.model.vocab_size // rank.plan.mesh.tensor)
    return loss_tokens(rank.plan) * vocabulary * per_logit


def fused_head(rank: RankMemory) -> int:
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
        case CrossEntropyKind.plain:
            return tokens
        case CrossEntropyKind.chunked:
            return min(tokens, plan.config.kernels.chunk_tokens)
        case CrossEntropyKind.liger_fused:
            # Tokens of a chunk: tokens / (vocabulary size / hidden size), rounded up to a power
            # of two (ops/fused_linear_cross_entropy.py of liger-kernel).
            parts = max(1, -(-model.vocab_size // max(model.hidden_size, 1)))
            return min(tokens, 1 << max(-(-tokens // parts) - 1, 0).bit_length())
