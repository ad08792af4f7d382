"""Embeddings: pooling, InfoNCE over the global batch, and its two passes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from trainctl.config.registry import new_section
from trainctl.engines.first_pass import FirstPass
from trainctl.engines.micro_batch import IGNORED_LABEL, MicroBatch
from trainctl.options.objective.contrastive import Pooling
from trainctl.train.objectives.base import Beside, ObjectiveLoss, SeenHiddenStates
from trainctl.train.objectives.contrastive import pooled

DOCUMENTS = torch.tensor([[0, 0, 1, 1, 2, 3], [0, 1, 1, 1, 2, 2]])
LABELS = torch.tensor([[1, 1, 1, 1, 1, IGNORED_LABEL], [1] * 4 + [IGNORED_LABEL] * 2])
"""A sample of three texts and padding, and one of two texts."""


def test_a_text_has_the_mean_or_an_end_of_its_own_hidden_states():
    hidden = torch.randn(2, 6, 4)
    seen = SeenHiddenStates(hidden, LABELS != IGNORED_LABEL, Beside(documents=DOCUMENTS))
    spans = ((0, 0, 2), (0, 2, 4), (0, 4, 5)), ((1, 0, 1), (1, 1, 4))
    for pooling, of in (
        (Pooling.mean, lambda states: states.mean(dim=0)),
        (Pooling.last, lambda states: states[-1]),
        (Pooling.first, lambda states: states[0]),
    ):
        found = pooled(seen, pooling)
        assert found.shape == (2, 3, 4)
        for sample, texts in enumerate(spans):
            for text, (row, begin, end) in enumerate(texts):
                torch.testing.assert_close(found[sample, text], of(hidden[row, begin:end]))
        assert (found[1, 2] == 0).all()


def _batches(lengths: list[int], texts: list[int]) -> list[MicroBatch]:
    """Return micro-batches of the lengths, whose samples have so many texts of one token."""
    batches, first = [], 0
    for length in lengths:
        ids = torch.arange(max(texts))[None].repeat(length, 1)
        own = torch.tensor(texts[first : first + length])[:, None]
        batches.append(
            MicroBatch(
                input_ids=ids,
                labels=torch.where(ids < own, 1, IGNORED_LABEL),
                position_ids=torch.zeros_like(ids),
                document_ids=ids,
                sample_ids=torch.arange(first, first + length),
                counts_records=True,
            )
        )
        first += length
    return batches


@pytest.mark.parametrize("symmetric", [False, True])
def test_micro_batches_do_not_change_loss_and_gradient(symmetric):
    """Also where some samples have no negative, so that features differ in width, or are padding:
    the last sample.
    """
    torch.manual_seed(0)
    texts, width = [3, 2, 2, 3, 2, 0], 8
    objective = ObjectiveLoss(new_section("objective", "contrastive", symmetric=symmetric))
    weight = torch.randn(6, 3, width)
    results = []
    for lengths in ([6], [3, 3], [2, 2, 2]):
        projection = torch.eye(width, requires_grad=True)
        batches = _batches(lengths, texts)

        def output(batch, projection=projection):
            hidden = weight[batch.sample_ids] @ projection
            beside = batch.objective_inputs(torch.device("cpu"))
            return objective(hidden, batch.labels, beside)[0]

        first = FirstPass.of(batches, output, objective.whole)
        for batch in first.with_gradients(batches):
            output(batch).backward()
        results.append((first.losses, first.measures, projection.grad))
    for losses, measures, gradient in results[1:]:
        torch.testing.assert_close(losses, results[0][0])
        torch.testing.assert_close(measures, results[0][1])
        torch.testing.assert_close(gradient, results[0][2])
    # By hand: candidates are the similar texts of five samples, and two negatives.
    projection = torch.eye(width, requires_grad=True)
    unit = F.normalize(weight @ projection, dim=-1)
    candidates = torch.cat([unit[:5, 1], unit[[0, 3], 2]])
    labels = torch.arange(5)
    expected = F.cross_entropy(unit[:5, 0] @ candidates.T / 0.05, labels, reduction="none")
    if symmetric:
        back = F.cross_entropy(unit[:5, 1] @ unit[:5, 0].T / 0.05, labels, reduction="none")
        expected = (expected + back) / 2
    expected.sum().backward()
    losses, _, gradient = results[0]
    torch.testing.assert_close(losses[:5], expected.detach())
    assert losses[5] == 0 and gradient.isfinite().all()
    torch.testing.assert_close(gradient, projection.grad)
