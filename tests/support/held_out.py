"""Held-out loss of one dataset in one process."""

from __future__ import annotations

from trainctl.plans.mixture import SINGLE_SOURCE
from trainctl.train.data import PackedDataset
from trainctl.train.evaluation import Score, evaluate_sources


def evaluate(score: Score, dataset: PackedDataset, **how: int) -> float:
    """Return the mean loss over the first held-out samples."""
    found = evaluate_sources(score, {SINGLE_SOURCE: dataset}, **how)
    assert found is not None
    return found.loss
