"""Held-out loss, and a text sampled from the model: of the engine's, or of one outside training.

Both take the model as a function: to the loss of a batch, and to the scores of the next token.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import nn

from trainctl.engines.micro_batch import MicroBatch
from trainctl.plan.mixture import SOLE
from trainctl.train.data import PackedDataset

Score = Callable[[MicroBatch], tuple[float, ...]]
"""The summed loss over what a batch counts, its number, and sums of what the objective records."""

NextScores = Callable[[list[int]], torch.Tensor]
"""Scores of the token that follows some tokens, (vocabulary,) in fp32 on the CPU."""


def _unwatched(done: int, total: int) -> None:
    """Nobody wants to know."""


def _alone(*values: float) -> list[float]:
    """Return the sums over one process."""
    return list(values)


@contextmanager
def inference(module: nn.Module) -> Iterator[None]:
    """Within it the module keeps no graph and drops nothing out; afterwards it trains."""
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        module.train()


@dataclass(frozen=True, slots=True)
class HeldOutLoss:
    """The held-out loss of a run's sources."""

    loss: float
    """Mean over what is counted (nats per token), over the samples of all of them."""
    sources: dict[str, float]
    """The same of each source that holds something out."""
    samples: int
    """How many there were."""
    measures: dict[str, float]
    """What the objective records beside it, of all of them, by name."""


def evaluate_sources(
    score: Score,
    datasets: Mapping[str, PackedDataset],
    *,
    num_samples: int,
    recorded: Sequence[str] = (),
    sum_over_ranks: Callable[..., list[float]] = _alone,
    progress: Callable[[int, int], None] = _unwatched,
    **how: int,
) -> HeldOutLoss | None:
    """Mean loss over the first held-out samples of each source; None if there are none.

    Args:
        score: The model's loss of a batch.
        datasets: The held-out samples of each source.
        num_samples: How many of each, at most.
        recorded: Names of what `score` gives beside the loss.
        sum_over_ranks: As for `evaluate`; so are the others.
        progress: Called with the samples done and their number, of all sources.
    """
    counts = {name: min(num_samples, data.num_samples) for name, data in datasets.items()}
    whole, before = sum(counts.values()), 0
    sums: dict[str, list[float]] = {}
    for name, count in counts.items():
        if count:
            sums[name] = _sums(
                score,
                datasets[name],
                count,
                width=2 + len(recorded),
                sum_over_ranks=sum_over_ranks,
                progress=partial(_of_all, progress, before, whole),
                **how,
            )
            before += count
    if not sums:
        return None
    total, number, *measured = (sum(column) for column in zip(*sums.values(), strict=True))
    of_each = {name: loss / labels for name, (loss, labels, *_) in sums.items()}
    measures = {name: each / number for name, each in zip(recorded, measured, strict=True)}
    return HeldOutLoss(total / number, of_each, whole, measures)


def evaluate(
    score: Score,
    dataset: PackedDataset,
    *,
    num_samples: int,
    micro_batch_size: int,
    data_rank: int = 0,
    data_size: int = 1,
    sum_over_ranks: Callable[..., list[float]] = _alone,
    progress: Callable[[int, int], None] = _unwatched,
) -> float | None:
    """Mean loss in nats per token over the first held-out samples; None if there are none.

    Every rank runs the same number of forward passes (ZeRO-3 gathers parameters in each), on
    samples without labels where the real ones have run out.

    Args:
        score: The model's loss of a batch.
        num_samples: How many of them, at most.
        micro_batch_size: Samples in a forward pass.
        data_rank: Of this process among those that share the work.
        data_size: Number of those.
        sum_over_ranks: Each of its arguments summed over them.
        progress: Called with the samples done and their number.
    """
    found = evaluate_sources(
        score,
        {SOLE: dataset},
        num_samples=num_samples,
        micro_batch_size=micro_batch_size,
        data_rank=data_rank,
        data_size=data_size,
        sum_over_ranks=sum_over_ranks,
        progress=progress,
    )
    return None if found is None else found.loss


def _of_all(
    progress: Callable[[int, int], None], before: int, whole: int, done: int, total: int
) -> None:
    """Progress of one source as that of all."""
    progress(before + done, whole)


def _sums(
    score: Score,
    dataset: PackedDataset,
    count: int,
    *,
    width: int,
    micro_batch_size: int,
    data_rank: int = 0,
    data_size: int = 1,
    sum_over_ranks: Callable[..., list[float]],
    progress: Callable[[int, int], None],
) -> list[float]:
    """Summed loss over the first samples, the number of what it is over, and what else is scored:
    `width` numbers."""
    sums = [0.0] * width
    for start in range(0, count, micro_batch_size * data_size):
        progress(start, count)
        first = start + data_rank * micro_batch_size
        indices = np.arange(first, first + micro_batch_size)
        batch = dataset.micro_batch(np.where(indices < count, indices, -1))
        sums = [each + found for each, found in zip(sums, score(batch), strict=True)]
    progress(count, count)
    return sum_over_ranks(*sums)


def sampled_ids(
    next_scores: NextScores,
    prompt: Sequence[int],
    *,
    num_tokens: int,
    window: int,
    seed: int,
    vocab_size: int,
    ends: Collection[int] = (),
    temperature: float = 0.8,
    progress: Callable[[int, int], None] = _unwatched,
) -> list[int]:
    """Ids with which the model goes on from those of a prompt.

    All ranks take part and draw the same tokens (ZeRO-3 gathers parameters in each pass).

    Args:
        prompt: The ids to go on from.
        num_tokens: To draw, at most.
        window: Tokens of context given to the model at a time.
        vocab_size: Ids are below it.
        ends: Any of these ends it, and is not among what is given.
        temperature: Divides the logits; 0 takes the likeliest token each time.
        progress: Called with the tokens drawn and their number.
    """
    ids = list(prompt)
    generator = torch.Generator().manual_seed(seed)
    for drawn in range(num_tokens):
        progress(drawn, num_tokens)
        scores = next_scores(ids[-window:])[:vocab_size]
        if temperature == 0:
            token = int(scores.argmax())
        else:
            probabilities = (scores / temperature).softmax(dim=-1)
            token = int(torch.multinomial(probabilities, 1, generator=generator))
        if token in ends:
            break
        ids.append(token)
    return ids[len(prompt) :]
