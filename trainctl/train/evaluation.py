"""Held-out loss, and a text sampled from the model."""

from __future__ import annotations

import numpy as np
import torch

from trainctl.train.data import IGNORED_LABEL, MicroBatch, PackedDataset
from trainctl.train.engine import Engine
from trainctl.train.loss import summed_cross_entropy
from trainctl.train.process import Process
from trainctl.train.tokenizer import Tokenizer


def evaluate(
    engine: Engine,
    process: Process,
    dataset: PackedDataset,
    *,
    num_samples: int,
    micro_batch_size: int,
    data_rank: int,
    data_size: int,
) -> float | None:
    """Mean loss in nats per token over the first held-out samples; None if there are none.

    Every rank runs the same number of forward passes (ZeRO-3 gathers parameters in each), on
    samples without labels where the real ones have run out.
    """
    count = min(num_samples, dataset.num_samples)
    if count == 0:
        return None
    loss_sum = torch.zeros((), dtype=torch.float64)
    labels_seen = 0
    engine.deepspeed.eval()
    with torch.no_grad():
        for start in range(0, count, micro_batch_size * data_size):
            first = start + data_rank * micro_batch_size
            indices = np.arange(first, first + micro_batch_size)
            batch = dataset.micro_batch(np.where(indices < count, indices, -1))
            labels = batch.labels.to(process.device)
            loss_sum += summed_cross_entropy(engine.logits(batch), labels).double().cpu()
            labels_seen += batch.num_labels
    engine.deepspeed.train()
    total, number = process.sum(float(loss_sum), labels_seen)
    return total / number


def sample_text(
    engine: Engine,
    tokenizer: Tokenizer,
    *,
    prompt: str,
    num_tokens: int,
    window: int,
    seed: int,
    temperature: float = 0.8,
) -> str:
    """The prompt continued by the model.

    All ranks take part and draw the same tokens (ZeRO-3 gathers parameters in each pass).

    Args:
        window: Tokens of context given to the model at a time.
        seed: Of the draws.
        temperature: Divides the logits.
    """
    ids = tokenizer.encode(prompt).tolist() or [0]
    generator = torch.Generator().manual_seed(seed)
    engine.deepspeed.eval()
    with torch.no_grad():
        for _ in range(num_tokens):
            logits = engine.logits(_context(ids[-window:]))[0, -1].float().cpu()
            probabilities = (logits[: tokenizer.vocab_size] / temperature).softmax(dim=-1)
            token = int(torch.multinomial(probabilities, 1, generator=generator))
            if token == tokenizer.end_of_document:
                break
            ids.append(token)
    engine.deepspeed.train()
    return tokenizer.decode(ids)


def _context(ids: list[int]) -> MicroBatch:
    inputs = torch.tensor([ids])
    return MicroBatch(
        input_ids=inputs,
        labels=torch.full_like(inputs, IGNORED_LABEL),
        position_ids=torch.arange(len(ids))[None],
        document_ids=torch.zeros_like(inputs),
        sample_ids=torch.zeros(1, dtype=torch.long),
    )
