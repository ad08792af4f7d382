"""The learning rate: ends, floor, continuity, and the formulas at points worked out by hand."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainctl.config.schema import DecayShape, ScheduleConfig, ScheduleKind
from trainctl.plan.schedule import learning_rate_factor

DECAYING = (
    ScheduleKind.linear,
    ScheduleKind.cosine,
    ScheduleKind.polynomial,
    ScheduleKind.exponential,
    ScheduleKind.wsd,
)
RISING = (ScheduleKind.one_cycle, ScheduleKind.cyclic)


@st.composite
def schedules(draw, kinds=tuple(ScheduleKind)):
    schedule = ScheduleConfig(
        kind=draw(st.sampled_from(kinds)),
        floor_ratio=draw(st.floats(0.001, 1)),
        decay_fraction=draw(st.floats(0.1, 1)),
        decay_shape=draw(st.sampled_from(DecayShape)),
        power=draw(st.floats(0.5, 4)),
        step_every=draw(st.integers(1, 50)),
        step_factor=draw(st.floats(0.01, 1)),
    )
    total = draw(st.integers(0, 400))
    warmup = draw(st.integers(0, total))
    return schedule, total, warmup


def curve(schedule, total, warmup):
    return [
        learning_rate_factor(schedule, step, total_steps=total, warmup_steps=warmup)
        for step in range(total)
    ]


@given(schedules())
def test_the_factor_stays_between_floor_and_peak_after_the_warmup(case):
    schedule, total, warmup = case
    factors = curve(schedule, total, warmup)
    assert all(0 < factor <= 1 for factor in factors)
    assert all(schedule.floor_ratio - 1e-12 <= factor for factor in factors[warmup:])


@given(schedules(tuple(kind for kind in ScheduleKind if kind not in RISING)))
def test_the_warmup_is_linear_up_to_the_peak(case):
    schedule, total, warmup = case
    factors = curve(schedule, total, warmup)
    at_peak = learning_rate_factor(schedule, warmup, total_steps=total, warmup_steps=warmup)
    for step, factor in enumerate(factors[:warmup]):
        assert factor == pytest.approx(at_peak * (step + 1) / warmup)
    if warmup and total > warmup:
        assert factors[warmup] == pytest.approx(1, abs=0.3)


@given(schedules(DECAYING))
def test_a_decay_starts_at_the_peak_and_ends_exactly_at_the_floor(case):
    schedule, total, warmup = case
    factors = curve(schedule, total, warmup)[warmup:]
    if len(factors) < 2 or (schedule.kind is ScheduleKind.wsd and len(set(factors)) == 1):
        return
    assert factors[0] == 1
    assert factors[-1] == schedule.floor_ratio
    # Up to the last bit, where the floor is next to the peak.
    assert all(later <= factor + 1e-15 for factor, later in pairwise(factors))


@given(schedules((ScheduleKind.linear, ScheduleKind.cosine, ScheduleKind.one_cycle)))
def test_the_curve_has_no_jump(case):
    """No step changes more than the steepest slope of its shape: pi/2, or 2 for a triangle."""
    schedule, total, warmup = case
    factors = curve(schedule, total, warmup)[warmup:]
    if len(factors) < 2:
        return
    largest = max(abs(a - b) for a, b in pairwise(factors))
    assert largest <= 2 / (len(factors) - 1) + 1e-9


@pytest.mark.parametrize("kind", ScheduleKind)
@pytest.mark.parametrize("total", [0, 1, 2])
def test_runs_of_hardly_any_steps(kind, total):
    schedule = ScheduleConfig(kind=kind, step_every=1)
    for step in (0, total, total + 5):
        factor = learning_rate_factor(schedule, step, total_steps=total, warmup_steps=0)
        assert schedule.floor_ratio <= factor <= 1


def factor_at(step, **fields):
    schedule = ScheduleConfig(floor_ratio=fields.pop("floor_ratio", 0.0), **fields)
    return learning_rate_factor(schedule, step, total_steps=111, warmup_steps=10)


@pytest.mark.parametrize(
    ("kind", "step", "expected"),
    [
        ("constant", 60, 1.0),
        ("linear", 60, 0.5),
        ("cosine", 35, 0.853553390593),
        ("polynomial", 60, 0.25),
        ("wsd", 87, 1.0),
        ("wsd", 99, 0.292893218813),
        ("step", 29, 1.0),
        ("step", 30, 0.1),
        ("inverse_sqrt", 39, 0.5),
        ("one_cycle", 60, 1.0),
        ("one_cycle", 35, 0.5),
        ("cyclic", 40, 1.0),
        ("cyclic", 50, 0.0),
    ],
)
def test_values_worked_out_by_hand(kind, step, expected):
    """T=111, W=10: p=0.5 at step 60. wsd decays over round(0.2 x 111)=22 steps, from 88 to 110."""
    period = 20 if kind in ("step", "cyclic") else None
    actual = factor_at(step, kind=ScheduleKind(kind), power=2.0, step_every=period)
    assert actual == pytest.approx(expected, abs=1e-9)


def test_exponential_halves_the_logarithm_in_the_middle():
    assert factor_at(60, kind=ScheduleKind.exponential, floor_ratio=0.01) == pytest.approx(0.1)
