"""What one forward pass of a rank sees, and how a transformers model is told of it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

IGNORED_LABEL = -100
"""Label of a position that has no next token to learn."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """What one forward pass of one data-parallel rank sees; every tensor is (samples, length)."""

    input_ids: torch.Tensor
    """Token ids."""
    labels: torch.Tensor
    """The next token at each position (already shifted), or IGNORED_LABEL."""
    position_ids: torch.Tensor
    """Position in the sample, or in its document with `data.mask_documents`."""
    document_ids: torch.Tensor
    """Number of the document within the sample, from 0: its boundaries."""
    sample_ids: torch.Tensor
    """Index of each sample in the dataset, shape (samples,)."""
    is_masked: bool = False
    """Whether attention keeps to the documents, as the positions tell the model."""
    is_paired: bool = False
    """Whether each sample is a pair of answers: its first two documents."""
    reference: torch.Tensor | None = None
    """Log-probabilities of these two before the first step, (samples, 2), fp32; None where nothing
    asks for them."""

    @classmethod
    def of_context(cls, ids: list[int], *, samples: int = 1) -> MicroBatch:
        """Return the same token ids in each sample, without labels: to see what comes next."""
        inputs = torch.tensor([ids]).repeat(samples, 1)
        return cls(
            input_ids=inputs,
            labels=torch.full_like(inputs, IGNORED_LABEL),
            position_ids=torch.arange(len(ids)).repeat(samples, 1),
            document_ids=torch.zeros_like(inputs),
            sample_ids=torch.zeros(samples, dtype=torch.long),
        )

    def part(self, index: int, count: int) -> MicroBatch:
        """Return one of `count` equal parts of every sequence."""
        if count == 1:
            return self
        return replace(
            self,
            **{
                name: getattr(self, name).chunk(count, dim=1)[index].contiguous()
                for name in ("input_ids", "labels", "position_ids", "document_ids")
            },
        )

    def pinned(self) -> MicroBatch:
        """Return the same in pinned memory, from which a GPU is given it while it computes."""
        return replace(
            self,
            **{
                name: getattr(self, name).pin_memory()
                for name in ("input_ids", "labels", "position_ids", "document_ids")
            },
        )

    def model_inputs(
        self,
        device: torch.device,
        *,
        part: tuple[int, int] = (0, 1),
        flash_attention: bool = False,
    ) -> dict[str, Any]:
        """Arguments of a transformers model's forward pass.

        Plain positions are left to the model: given, it would search them for documents in every
        pass, and turn them for each sample rather than once. Those of a part do not begin at 0.

        Args:
            part: Index and number of the part of every sequence that is wanted.
            flash_attention: Whether the model's attention is FlashAttention, which sees the whole.
        """
        here = self.part(*part)
        inputs: dict[str, Any] = {"input_ids": here.input_ids.to(device, non_blocking=True)}
        if self.is_masked or here is not self:
            inputs["position_ids"] = here.position_ids.to(device, non_blocking=True)
        if self.is_masked and flash_attention:
            inputs |= document_lengths(self.position_ids, device)
        return {**inputs, "use_cache": False}

    def beside(self, device: torch.device) -> dict[str, torch.Tensor]:
        """What an objective is told beside the labels; empty where it looks at tokens alone."""
        if not self.is_paired:
            return {}
        told = {"documents": self.document_ids}
        if self.reference is not None:
            told["reference"] = self.reference
        return {name: tensor.to(device, non_blocking=True) for name, tensor in told.items()}

    @property
    def num_labels(self) -> int:
        return int((self.labels != IGNORED_LABEL).sum())

    @property
    def num_counted(self) -> int:
        """Of what the loss is a mean over: samples that are pairs, or labels."""
        has_label = self.labels != IGNORED_LABEL
        return int((has_label.any(dim=1) if self.is_paired else has_label).sum())


def document_lengths(positions: torch.Tensor, device: torch.device) -> dict[str, Any]:
    """Where documents begin, as arguments of a model whose attention is FlashAttention.

    transformers looks for them itself in a batch of one sample only, and lets the documents of any
    other attend to each other. Looked for on the host, they also cost no waiting for the device.

    Args:
        positions: Of each token in its document, (samples, length).
    """
    begins = (positions.flatten() == 0).nonzero().flatten()
    bounds = F.pad(begins, (0, 1), value=positions.numel()).int()
    longest = int(bounds.diff().max())
    bounds = bounds.to(device, non_blocking=True)
    return {
        "cu_seq_lens_q": bounds,
        "cu_seq_lens_k": bounds,
        "max_length_q": longest,
        "max_length_k": longest,
    }
