"""A model with a checkpoint's weights on one device, without an engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers.modeling_utils import PreTrainedModel
from transformers.utils import is_flash_attn_2_available

from trainctl.config.schema import AttentionKind
from trainctl.engines.first_pass import FirstPass
from trainctl.engines.micro_batch import MicroBatch
from trainctl.engines.process import use_fp32_cpu_products
from trainctl.errors import MachineError
from trainctl.models.tensors import FUTURE
from trainctl.options.adapter import low_rank
from trainctl.options.objective import SCORES
from trainctl.plans.settings import number_formats
from trainctl.plans.types import RunPlan
from trainctl.runs.records import Progress
from trainctl.train.adapters.layers import apply_adapter
from trainctl.train.checkpoint.content import CheckpointReader
from trainctl.train.checkpoint.optimizer_state import MASTER
from trainctl.train.evaluation import inference
from trainctl.train.models.frozen_base import FullModel, adapter_of, base_file, whole_weights
from trainctl.train.models.model import (
    TORCH_TYPES,
    materialise,
    skeleton,
    with_portable_attention,
)
from trainctl.train.models.varlen import has_flash_attention
from trainctl.train.models.weights import WeightSource
from trainctl.train.objectives.base import ObjectiveLoss, loss_of
from trainctl.train.objectives.loss import losses_with_future, output_of, summed_cross_entropy

_FREE_MEMORY_FACTOR = 1.25
"""Free device memory that `auto` requires, as a multiple of the weights' size."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model with weights, as evaluation and sampling use it."""

    model: PreTrainedModel
    device: torch.device
    objective: ObjectiveLoss | None = None
    """Objective it was trained on; None for the next token."""

    def score(self, batches: Sequence[MicroBatch]) -> tuple[float, ...]:
        """Return summed loss, counted positions and summed measures, as an engine does."""
        counted = sum(batch.num_counted for batch in batches)
        if self.objective is not None and self.objective.has_two_passes:
            first = FirstPass.of(
                batches, lambda batch: self._objective(batch)[0], self.objective.whole
            )
            loss, *measures = first.sums()
            return loss, counted, *measures
        losses, measured = zip(*map(self._objective, batches), strict=True)
        sums = torch.cat(measured).double().sum(dim=0)
        return sum(map(float, losses)), counted, *sums.tolist()

    def _objective(self, batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the summed loss (or the features), and each sample's measures."""
        labels = batch.labels.to(self.device)
        if getattr(self.model, FUTURE, None) is not None:
            with _memory_errors(self.device):
                loss, future = losses_with_future(self.model, self._inputs(batch), labels)
            return loss, future[None, None]
        if self.objective is None:
            return summed_cross_entropy(self.logits(batch), labels), torch.zeros(len(labels), 0)
        inputs = self._inputs(batch)
        with _memory_errors(self.device):
            found = output_of(self.model, self.objective.reads, inputs, labels)
        return self.objective(found, labels, batch.objective_inputs(self.device))

    def next_scores(self, ids: list[int]) -> torch.Tensor:
        """Return the logits of the token after `ids`, (vocabulary,) in fp32 on the CPU."""
        return self.logits(MicroBatch.of_context(ids))[0, -1].float().cpu()

    def scores(self, ids: list[int]) -> torch.Tensor:
        """Return the outputs of a head `score` after each token, (tokens, outputs), on the CPU."""
        batch = MicroBatch.of_context(ids)
        with _memory_errors(self.device):
            found = output_of(self.model, SCORES, self._inputs(batch), batch.labels)
        return found[0].cpu()

    def logits(self, batch: MicroBatch) -> torch.Tensor:
        """Return the logits, (samples, length, vocabulary), as the training engine does."""
        with _memory_errors(self.device):
            logits: torch.Tensor = self.model(**self._inputs(batch)).logits
        return logits

    def _inputs(self, batch: MicroBatch) -> dict[str, Any]:
        flash = has_flash_attention(self.model)
        return batch.model_inputs(self.device, flash_attention=flash)

    def inference(self) -> AbstractContextManager[None]:
        return inference(self.model)


def load(
    plan: RunPlan,
    checkpoint: Path,
    device: str,
    progress: Progress,
    *,
    weights: str = MASTER,
) -> LoadedModel:
    """Return the model of a plan with the weights of a checkpoint, in training's weight format.

    Args:
        device: cpu, cuda, or auto: an accelerator with room for the weights, else the CPU.
        progress: Called with "loading", the elements read and their number.
        weights: `MASTER`, or `AVERAGE` for their moving average.

    Raises:
        TrainctlError: The checkpoint is not of this model or has no such weights (5), or the device
            is missing or too small (4).
    """
    shape, dtype = plan.config.model, TORCH_TYPES[number_formats(plan.config.precision).weights]
    model = skeleton(with_portable_attention(shape), dtype)
    elements = sum(parameter.numel() for parameter in model.parameters())
    place = choose_device(device, elements * dtype.itemsize)
    use_fp32_cpu_products(plan.config.precision, place)
    is_flash = shape.attention is AttentionKind.flash_attention_2
    if is_flash and place.type == "cuda" and is_flash_attn_2_available():
        model = skeleton(shape, dtype)
    opened, whole = CheckpointReader(checkpoint, weights=weights), FullModel.of(shape, model)
    # Merging would round base plus adapter to the narrow format, which training never does.
    is_narrow = dtype is not torch.float32
    merges = not is_narrow or low_rank(adapter_of(opened.manifest)) is None
    saved = whole_weights(opened, whole, kept=base_file(checkpoint), merges=merges)
    if not merges:
        apply_adapter(model, plan.config)
    elements = sum(parameter.numel() for parameter in model.parameters())
    source = _CountingWeightSource(saved, lambda done: progress("loading", done, elements))
    with _memory_errors(place):
        materialise(model, source, place)
    return LoadedModel(model, place, loss_of(plan.config.objective))


class _CountingWeightSource:
    """A weight source that reports the number of elements read so far."""

    def __init__(self, source: WeightSource, progress: Callable[[int], None]) -> None:
        self._source, self._progress, self._done = source, progress, 0

    def read(self, name: str, shape: torch.Size, start: int, end: int) -> torch.Tensor:
        values = self._source.read(name, shape, start, end)
        self._done += end - start
        self._progress(self._done)
        return values

    def buffer(self, name: str) -> torch.Tensor | None:
        return self._source.buffer(name)


def choose_device(wanted: str, needed_bytes: int) -> torch.device:
    """Return the device for the weights: auto is an accelerator with room for them, else the CPU.

    Raises:
        TrainctlError: CUDA is requested and this machine has none (exit code 4).
    """
    here = torch.cuda.is_available()
    if wanted == "cuda" and not here:
        raise MachineError(
            "this machine has no cuda device",
            hint="--device cpu",
        )
    if wanted == "auto":
        has_room = here and torch.cuda.mem_get_info()[0] >= _FREE_MEMORY_FACTOR * needed_bytes
        wanted = "cuda" if has_room else "cpu"
    return torch.device(wanted)


@contextmanager
def _memory_errors(device: torch.device) -> Iterator[None]:
    """Raise a TrainctlError if the block runs out of device memory."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise MachineError(
            f"the model does not fit on the {device.type} device",
            hint="--device cpu",
        ) from None
