"""Micro-batches: the input of a rank's forward pass, and the sums over those of a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F

IGNORED_LABEL = -100
"""Label of a position without a next token to learn, as torch's `cross_entropy` ignores it."""


@dataclass(frozen=True, slots=True)
class SequencePart:
    """A rank's part of every sequence.

    A sequence is cut into two chunks for each of c context ranks, and the i-th has chunks i and
    2c - 1 - i: then causal attention costs all of them the same. The ranks of a sequence axis share
    these tokens equally.
    """

    index: int = 0
    count: int = 1
    context_index: int = 0
    context_count: int = 1

    @property
    def is_whole(self) -> bool:
        return self.count == self.context_count == 1

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the part of a tensor (samples, length)."""
        if self.context_count > 1:
            chunks = tensor.chunk(2 * self.context_count, dim=1)
            first = self.context_index
            tensor = torch.cat([chunks[first], chunks[-1 - first]], dim=1)
        return tensor.chunk(self.count, dim=1)[self.index].contiguous()


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Input of one forward pass of a data-parallel rank; most tensors are (samples, length)."""

    input_ids: torch.Tensor
    labels: torch.Tensor
    """The token to predict at each position: the next one (already shifted), or the one that is
    hidden there; IGNORED_LABEL where there is none.
    """
    position_ids: torch.Tensor
    """Position in the sample, or in its document with `data.mask_documents`."""
    document_ids: torch.Tensor
    """Index of the document within the sample, from 0."""
    sample_ids: torch.Tensor
    """Index of each sample in the dataset, shape (samples,)."""
    is_masked: bool = False
    """Whether attention stays within documents; `position_ids` tell the model their boundaries."""
    counts_records: bool = False
    """Whether the loss is a mean over samples rather than labels."""
    targets: torch.Tensor | None = None
    """Numbers beside each record, (samples, k), fp32, NaN where absent; None if the data source
    gives none.
    """
    stored: dict[str, torch.Tensor] = field(default_factory=dict)
    """Rows of the arrays in `Objective.stored`, (samples, ...), by name."""
    gradient: torch.Tensor | None = None
    """Gradient of the global batch's summed loss with respect to this micro-batch's features, in
    the second pass of an objective with two; None before it.
    """

    @classmethod
    def of_context(cls, ids: list[int], *, samples: int = 1) -> MicroBatch:
        """Return a batch of `samples` copies of the token ids, without labels, for predicting the
        next token.
        """
        inputs = torch.tensor([ids]).repeat(samples, 1)
        return cls(
            input_ids=inputs,
            labels=torch.full_like(inputs, IGNORED_LABEL),
            position_ids=torch.arange(len(ids)).repeat(samples, 1),
            document_ids=torch.zeros_like(inputs),
            sample_ids=torch.zeros(samples, dtype=torch.long),
        )

    def part(self, part: SequencePart) -> MicroBatch:
        """Return the batch with a part of every sequence, and of the stored arrays, which have a
        row for each position (`Objective.whole_samples`).
        """
        if part.is_whole:
            return self
        return self._with_tensors(part.of)

    def pinned(self) -> MicroBatch:
        """Return the same batch in pinned memory, which copies to a GPU asynchronously."""
        return self._with_tensors(torch.Tensor.pin_memory)

    def _with_tensors(self, change: Callable[[torch.Tensor], torch.Tensor]) -> MicroBatch:
        names = ("input_ids", "labels", "position_ids", "document_ids")
        stored = {name: change(rows) for name, rows in self.stored.items()}
        return replace(self, **{name: change(getattr(self, name)) for name in names}, stored=stored)

    def model_inputs(
        self,
        device: torch.device,
        *,
        part: SequencePart = SequencePart(),
        flash_attention: bool = False,
        compiled: bool = False,
    ) -> dict[str, Any]:
        """Return the keyword arguments of a transformers model's forward pass.

        `position_ids` are left out where they only count from 0: given them, the model would search
        them for documents in every pass, and compute rotary embeddings per sample rather than once.
        The positions of a part do not begin at 0, so they are passed.

        Args:
            part: The part of every sequence that the model gets.
            flash_attention: Whether the model's attention is FlashAttention, which sees the whole
                sequence.
            compiled: Whether the model is compiled, for each shape anew.
        """
        here = self.part(part)
        inputs: dict[str, Any] = {"input_ids": here.input_ids.to(device, non_blocking=True)}
        if self.is_masked or here is not self:
            inputs["position_ids"] = here.position_ids.to(device, non_blocking=True)
        if self.is_masked and flash_attention:
            inputs |= document_lengths(self.position_ids, device, rounded=compiled)
        return {**inputs, "use_cache": False}

    def objective_inputs(self, device: torch.device) -> dict[str, Any]:
        """Return what an objective is told of the samples: the fields of `Beside`."""

        def there(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to(device, non_blocking=True)

        return {
            "documents": there(self.document_ids),
            "targets": None if self.targets is None else there(self.targets),
            "stored": {name: there(rows) for name, rows in self.stored.items()},
            "gradient": self.gradient,
        }

    @property
    def has_labels(self) -> torch.Tensor:
        """Whether each sample has a label, (samples,); padding of an evaluation has none."""
        return (self.labels != IGNORED_LABEL).any(dim=1)

    @property
    def num_labels(self) -> int:
        return int((self.labels != IGNORED_LABEL).sum())

    @property
    def num_counted(self) -> int:
        """Number of labels, or of samples with a label: the loss is a mean over them."""
        return int(self.has_labels.sum()) if self.counts_records else self.num_labels


def document_lengths(
    positions: torch.Tensor, device: torch.device, *, rounded: bool = False
) -> dict[str, Any]:
    """Return the document boundaries as keyword arguments of a model that uses FlashAttention.

    transformers finds them itself only in a batch of one sample; in a larger batch it lets
    documents attend to each other. Computed on the host, they also need no synchronization with the
    device.

    Args:
        positions: Position of each token in its document, (samples, length).
        rounded: Whether the number of documents, by empty ones, and the longest length are rounded
            up to powers of two: the batches of a run then have few shapes.
    """
    begins = (positions.flatten() == 0).nonzero().flatten()
    bounds = F.pad(begins, (0, 1), value=positions.numel()).int()
    longest = int(bounds.diff().max())
    if rounded:
        empty = _next_power_of_two(len(begins)) - len(begins)
        bounds = F.pad(bounds, (0, empty), value=positions.numel())
        longest = _next_power_of_two(longest)
    bounds = bounds.to(device, non_blocking=True)
    return {
        "cu_seq_lens_q": bounds,
        "cu_seq_lens_k": bounds,
        "max_length_q": longest,
        "max_length_k": longest,
    }


def _next_power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


class StepSums:
    """Losses and recorded measures of a step, in fp64; adding to them does not wait for the device.

    Attributes:
        loss: Sum over this rank's labels (or records), in the objective's unit, without the z-loss
            and without the loss of tokens further ahead.
        z_loss: Sum of the z-loss, in the same unit.
        measures: Sums of the objective's measures, (names,); None if it records nothing.
    """

    def __init__(self, device: torch.device) -> None:
        self.loss = torch.zeros((), dtype=torch.float64, device=device)
        self.z_loss = torch.zeros_like(self.loss)
        self.measures: torch.Tensor | None = None

    def add(self, loss: torch.Tensor, module: Any) -> None:
        """Add a micro-batch.

        Args:
            module: The `trainctl.train.objectives.loss.LanguageModel` that computed the loss.
        """
        self.loss += loss.detach()
        if module.last_z_loss is not None:
            self.loss -= module.last_z_loss
            self.z_loss += module.last_z_loss
        if module.last_future_loss is not None:
            self.loss -= module.last_future_loss
        if module.last_measures is not None:
            found = module.last_measures.double().sum(dim=0)
            self.measures = found if self.measures is None else self.measures + found

    def values(self) -> torch.Tensor:
        """Return loss, z-loss and measures, (2 + names,), on the device."""
        parts = [torch.stack([self.loss, self.z_loss])]
        return torch.cat(parts if self.measures is None else [*parts, self.measures])
