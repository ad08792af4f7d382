"""Attention over whole sequences for models whose ranks have parts of them.

Ranks of the sequence axis exchange their parts for heads: DeepSpeed's Ulysses (arXiv:2309.14509;
runtime/sequence_parallel/ulysses_sp.py). Inside it, ranks of the context axis form a ring.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from trainctl.engines.micro_batch import IGNORED_LABEL, MicroBatch
from trainctl.engines.process import ProcessMesh
from trainctl.engines.ring_attention import Ring, rectangles_of
from trainctl.plans.settings import uses_ring
from trainctl.plans.types import RunPlan

Attended = tuple[torch.Tensor, torch.Tensor | None]


class SequenceParallelAttention:
    """Replacement of transformers' attention function, which it looks up by name, while the engine
    lives.

    The replaced function makes no mask: one of this rank's tokens would be wrong and, beside
    positions with a gap, as large as their square. The kernels are causal by themselves, and the
    ring knows documents.
    """

    def __init__(self, plan: RunPlan, mesh: ProcessMesh) -> None:
        self._plan, self._mesh = plan, mesh
        self._name = plan.config.model.attention.value
        self._functions = ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS
        self._originals = [each[self._name] for each in self._functions]
        is_ring = uses_ring(plan.config)
        self._ring = Ring(mesh.context, "context") if is_ring else None
        self._inner = self._attend_in_ring if is_ring else self._originals[0]
        self._exchange = cache(self._make_exchange)
        ALL_ATTENTION_FUNCTIONS[self._name] = self._attend
        if is_ring:
            ALL_MASK_ATTENTION_FUNCTIONS[self._name] = lambda *_, **__: None

    def expect(self, batch: MicroBatch) -> None:
        """Make the attention ready for the forward and backward pass of a micro-batch."""
        if self._ring is not None:
            axis, length = self._mesh.context, batch.labels.shape[1]
            begins = document_starts(batch) if batch.is_masked else None
            self._ring.rectangles = rectangles_of(axis.index, axis.size, length, begins)

    def close(self) -> None:
        """Restore transformers' own functions."""
        for table, original in zip(self._functions, self._originals, strict=True):
            table[self._name] = original

    def _attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *args: Any,
        **kwargs: Any,
    ) -> Attended:
        heads, width, own = query.shape[1], query.shape[-1], value.shape[-1]
        # Values narrower than keys (latent attention) are padded with columns of zeros.
        value = F.pad(value, (0, width - own))
        inner = self._inner
        if self._mesh.sequence.size > 1:
            inner = self._exchange(heads, key.shape[1], width)
        # transformers' mask covers this rank's part only, so none is passed.
        output, weights = inner(module, query, key, value, None, *args, **kwargs)
        # transformers' own attention functions return a dimension for the heads.
        return output.reshape(*output.shape[:2], heads, width)[..., :own], weights

    def _attend_in_ring(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *,
        scaling: float | None = None,
        dropout: float = 0.0,
        **kwargs: Any,
    ) -> Attended:
        assert self._ring is not None
        assert dropout == 0  # TC522
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        return self._ring.attend(query, key, value, scale).transpose(1, 2), None

    def _make_exchange(self, heads: int, kv_heads: int, width: int) -> UlyssesSPAttentionHF:
        """Return the exchange for this tensor rank's heads, whose numbers may differ between
        layers.
        """
        made = UlyssesSPAttentionHF(
            attn=self._inner,
            batch_size=self._plan.batch.micro_batch_size,
            attn_head_count=heads,
            attn_head_size=width,
            kv_head_count=kv_heads,
            num_hidden_layers=self._plan.config.model.num_layers,
            process_group=self._mesh.sequence.group,
            seq_length_is_variable=True,
        )
        # `register_with_transformers` sets it too, but puts its own function into the table.
        made.core_attn_implementation = self._name
        return made


def document_starts(batch: MicroBatch) -> torch.Tensor:
    """Return whether each token begins a document, (samples, length).

    Tokens of padding are documents of one token without a label. Neighbours of that kind are made
    one document: what they attend to changes no loss, and each document is a kernel of its own.
    """
    begins = batch.position_ids == 0
    is_single = begins & F.pad(begins[:, 1:], (0, 1), value=True)
    is_idle = is_single & (batch.labels == IGNORED_LABEL)
    return begins & ~(is_idle & F.pad(is_idle[:, :-1], (1, 0)))
