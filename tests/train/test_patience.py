"""Counting evaluations without improvement."""

import math

import pytest

from trainctl.train.learning_rate import Patience


@pytest.mark.parametrize(
    ("losses", "exhausted_at"),
    [
        ([3.0, 2.0, 1.0, 0.5], None),
        ([3.0, 3.0, 3.0], 2),
        ([3.0, 3.5, 2.0, 2.0, 2.5], 4),
        ([3.0, math.nan, math.inf], 2),
        ([math.nan, math.nan], 1),
    ],
)
def test_two_in_a_row_without_a_lower_loss_exhaust_it(losses, exhausted_at):
    patience, never = Patience(2), Patience(None)
    found = None
    for index, loss in enumerate(losses):
        patience.see(loss, step=index)
        never.see(loss, step=index)
        found = index if patience.is_exhausted and found is None else found
    assert found == exhausted_at and not never.is_exhausted


def test_a_loss_that_creeps_down_counts_once_it_has_come_far_enough():
    patience = Patience(3, min_delta=0.5)
    since = []
    for step, loss in enumerate([3.0, 2.8, 2.5, 2.4, 2.2, 1.95, 1.92]):
        patience.see(loss, step)
        since.append(patience.state()["evaluations_since"])
    assert since == [0, 1, 2, 0, 1, 2, 3]
    assert patience.state()["best_step"] == 3 and patience.is_exhausted


def test_a_later_attempt_counts_on_with_its_own_limit():
    before = Patience(2)
    for step, loss in enumerate([2.0, 1.5, 1.6], start=1):
        before.see(loss, step)
    state = before.state()
    assert state == {"best": 1.5, "best_step": 2, "evaluations_since": 1}
    after, patient = Patience(2, state), Patience(3, state)
    for each in (after, patient):
        each.see(1.5, 4)
    assert after.is_exhausted and not patient.is_exhausted
    assert Patience(2).state() == {}
