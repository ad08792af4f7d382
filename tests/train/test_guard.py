"""The verdict on a step, by numbers alone."""

import math

import pytest

from trainctl.config.schema import OnBadLoss, StabilityConfig
from trainctl.train.stability import Guard, Kind


def guard_of(policy=OnBadLoss.skip_batch, **settings):
    settings = {"spike_factor": 2.0, "norm_spike_factor": 3.0, "spike_after_steps": 2, **settings}
    return Guard(StabilityConfig(on_bad_loss=policy, **settings))


def accept(guard, *losses, start=1):
    for step, loss in enumerate(losses, start):
        assert guard.judge(loss, 1.0) is None
        guard.accept(step, loss, 1.0)


@pytest.mark.parametrize(
    ("loss", "norm", "kind", "limit"),
    [
        (math.nan, math.nan, Kind.loss_not_finite, None),
        (math.inf, 1.0, Kind.loss_not_finite, None),
        (4.0, math.inf, Kind.norm_not_finite, None),
        (4.0, math.nan, Kind.norm_not_finite, None),
        (8.1, 1.0, Kind.loss_spike, 8.0),
        (8.1, 9.0, Kind.loss_spike, 8.0),
        (4.0, 3.1, Kind.norm_spike, 3.0),
        (8.0, 3.0, None, None),
        (4.0, None, None, None),
    ],
)
def test_what_is_wrong_with_a_step(loss, norm, kind, limit):
    guard = guard_of()
    accept(guard, 4.0, 4.0)
    trouble = guard.judge(loss, norm)
    assert (trouble and trouble.kind) == kind
    if trouble is not None:
        assert trouble.limit == limit


@pytest.mark.parametrize(
    ("loss", "norm", "kind", "limit"),
    [
        (9.1, 1.0, Kind.loss_limit, 9.0),
        (8.1, 1.0, Kind.loss_spike, 8.0),
        (4.0, 2.6, Kind.norm_limit, 2.5),
        (9.1, 2.6, Kind.loss_limit, 9.0),
        (math.nan, 9.0, Kind.loss_not_finite, None),
        (8.0, 2.5, None, None),
    ],
)
def test_a_limit_holds_whatever_came_before(loss, norm, kind, limit):
    guard = guard_of(loss_limit=9.0, norm_limit=2.5)
    first = guard.judge(loss, norm)  # when there is no mean yet
    assert (first and first.kind) == (None if kind is Kind.loss_spike else kind)
    accept(guard, 4.0, 4.0)
    trouble = guard.judge(loss, norm)
    assert (trouble and trouble.kind) == kind
    if trouble is not None:
        assert trouble.limit == limit
        assert trouble.kind.quantity == ("loss" if "loss" in trouble.kind else "gradient norm")


def test_a_warning_lets_what_is_above_a_limit_pass():
    guard = guard_of(OnBadLoss.warn, loss_limit=9.0, max_interventions=0)
    assert guard.policy(guard.judge(50.0, 1.0)) is OnBadLoss.warn


def test_no_spike_before_there_is_a_mean_and_none_where_nobody_looks():
    guard = guard_of()
    accept(guard, 4.0)
    assert guard.judge(400.0, 100.0) is None
    blind = guard_of(spike_factor=None, norm_spike_factor=None)
    accept(blind, 4.0, 4.0, 4.0)
    assert blind.judge(400.0, 100.0) is None


def test_the_mean_is_plain_at_first_and_then_forgets():
    guard = guard_of(spike_window=4, spike_factor=1.5)
    accept(guard, 2.0, 4.0)
    assert guard.state()["loss"] == [3.0, 2]
    expected = 3.0
    for count, loss in enumerate((3.5, 3.1, 3.0, 2.0, 2.5), 3):
        guard.accept(count, loss, 1.0)
        expected += (loss - expected) / min(count, 4)
    assert guard.state()["loss"] == [expected, 7]


def test_a_bad_step_does_not_move_the_means():
    guard = guard_of()
    accept(guard, 4.0, 4.0)
    before = guard.state()
    guard.judge(math.nan, math.nan)
    guard.judge(100.0, 100.0)
    assert guard.state() == before


def test_in_fp16_an_overflow_is_the_loss_scales_business():
    guard = Guard(StabilityConfig(), norm_may_overflow=True)
    assert guard.judge(4.0, math.inf) is None
    assert guard.judge(math.nan, math.inf) is not None
    guard.accept(1, 4.0, math.inf)
    assert guard.state()["norm"] == [0.0, 0]


def test_it_stops_after_so_many_in_a_row():
    guard = guard_of(max_interventions=2)
    trouble = guard.judge(math.nan, math.nan)
    for count in range(2):
        assert guard.interventions == count
        assert guard.policy(trouble) is OnBadLoss.skip_batch
        guard.intervene(7)
    assert guard.policy(trouble) is OnBadLoss.stop


def test_the_row_ends_only_where_the_run_got_past_what_was_bad():
    """Otherwise a rewind to ten steps before would find a clean slate each time."""
    guard = guard_of(OnBadLoss.rewind)
    guard.intervene(20)
    guard.restore(guard.state() | {"in_a_row": 0, "bad_step": 0}, rewound=True)
    accept(guard, *[4.0] * 9, start=11)
    assert guard.interventions == 1
    accept(guard, 4.0, start=20)
    assert guard.interventions == 0


def test_a_warning_lets_spikes_pass_and_nothing_worse():
    guard = guard_of(OnBadLoss.warn, max_interventions=0)
    accept(guard, 4.0, 4.0)
    assert guard.policy(guard.judge(50.0, 1.0)) is OnBadLoss.warn
    assert guard.policy(guard.judge(math.nan, 1.0)) is OnBadLoss.stop


def test_a_resume_goes_on_exactly_and_an_old_checkpoint_knows_nothing():
    guard = guard_of()
    accept(guard, 4.1, 3.7, 3.9)
    guard.intervene(4)
    resumed = guard_of()
    resumed.restore(guard.state())
    assert resumed.state() == guard.state()
    rewound = guard_of()
    rewound.intervene(9)
    rewound.restore(guard.state(), rewound=True)
    assert rewound.state() == guard.state() | {"bad_step": 9}
    fresh = guard_of()
    fresh.restore({})
    assert fresh.state() == guard_of().state()
