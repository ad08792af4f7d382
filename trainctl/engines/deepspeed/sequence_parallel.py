"""Sequence parallelism: each rank has a part of every sequence, and within attention a part of
heads.

DeepSpeed's Ulysses (arXiv:2309.14509; runtime/sequence_parallel/ulysses_sp.py) exchanges parts of
the sequence for heads around transformers' own attention function. transformers looks that function
up by name, so it is replaced in transformers' table while the engine lives.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from trainctl.engines.mesh import ProcessMesh
from trainctl.plan.types import RunPlan


class SequenceParallelAttention:
    """Attention over the whole sequence for models whose ranks hold parts of it."""

    def __init__(self, plan: RunPlan, mesh: ProcessMesh) -> None:
        self._name = plan.config.model.attention.value
        self._original = ALL_ATTENTION_FUNCTIONS[self._name]

        @cache
        def exchange(heads: int, kv_heads: int, width: int) -> UlyssesSPAttentionHF:
            """Return the exchange for this tensor rank's heads, whose numbers may differ between
            layers.
            """
            made = UlyssesSPAttentionHF(
                attn=self._original,
                batch_size=plan.batch.micro_batch_size,
                attn_head_count=heads,
                attn_head_size=width,
                kv_head_count=kv_heads,
                num_hidden_layers=plan.config.model.num_layers,
                process_group=mesh.sequence.group,
                seq_length_is_variable=True,
            )
            # `register_with_transformers` sets it too, but puts its own function into the table.
            made.core_attn_implementation = self._name
            return made

        def attention(
            module: torch.nn.Module,
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            attention_mask: torch.Tensor | None,
            *args: Any,
            **kwargs: Any,
        ) -> Any:
            heads, width, own = query.shape[1], query.shape[-1], value.shape[-1]
            # Values narrower than keys (latent attention) are padded with columns of zeros.
            value = F.pad(value, (0, width - own))
            # transformers' mask covers this rank's part only, so none is passed: the kernels are
            # causal by themselves over the whole sequence.
            output, weights = exchange(heads, key.shape[1], width)(
                module, query, key, value, None, *args, **kwargs
            )
            # transformers' own attention functions return a dimension for the heads.
            return output.unflatten(-1, (-1, width))[..., :own], weights

        ALL_ATTENTION_FUNCTIONS[self._name] = attention

    def close(self) -> None:
        """Restore transformers' own function."""
        ALL_ATTENTION_FUNCTIONS[self._name] = self._original
