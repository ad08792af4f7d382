"""The learning rate: ends, floor, continuity, and the formulas at points worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from math import cos, isclose, pi, sqrt

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_cases import config_with, cpus

from trainctl.config.keys import keys_of
from trainctl.config.registry import list_kinds, new_section
from trainctl.config.schema import ScheduleUnit
from trainctl.monitor.report.charts import points_of
from trainctl.options.schedule import WithInterval
from trainctl.options.schedule.wsd import DecayShape
from trainctl.plans.schedule import Curve, decay_length, warmup_length
from trainctl.plans.types import Batch, Batches, BatchPhase
from trainctl.rules.resolve import resolve

KINDS = list_kinds("schedule")

DECAYING = (
    "linear",
    "cosine",
    "polynomial",
    "exponential",
    "wsd",
    "one_cycle",
)
"""Schedules that fall from the peak to the floor; one_cycle also begins at the floor."""


def batch_of(size):
    return Batch(
        global_batch_size=size,
        micro_batch_size=1,
        gradient_accumulation_steps=size,
        sequence_length=10,
    )


CONSTANT = Batches.of((), batch_of(3))


def schedule_of(kind, **fields):
    """Return a schedule of this kind, with the fields that the kind has."""
    own = {
        name: value
        for name, value in fields.items()
        if f"schedule.{name}" in keys_of("schedule", kind)
    }
    return new_section("schedule", kind, **own)


def curve_of(schedule, total, warmup, batches=CONSTANT):
    decay, _ = decay_length(schedule, total, batches)
    return Curve(
        config=schedule,
        batches=batches,
        total_steps=total,
        warmup_steps=warmup,
        decay_steps=decay,
    )


@st.composite
def ramps(draw):
    """Batches that grow at up to three steps."""
    ends = sorted(draw(st.sets(st.integers(1, 300), max_size=3)))
    sizes = sorted(draw(st.sets(st.integers(1, 9), min_size=4, max_size=4)))
    firsts = [0, *ends]
    return Batches(
        tuple(
            BatchPhase(first_step=first, batch=batch_of(size))
            for first, size in zip(firsts, sizes, strict=False)
        )
    )


@st.composite
def schedules(draw, kinds=KINDS):
    schedule = schedule_of(
        draw(st.sampled_from(kinds)),
        unit=draw(st.sampled_from(ScheduleUnit)),
        floor_ratio=draw(st.floats(0.001, 1)),
        decay_fraction=draw(st.floats(0.1, 1)),
        decay_shape=draw(st.sampled_from(DecayShape)),
        power=draw(st.floats(0.5, 4)),
        step_every=draw(st.integers(1, 50)),
        step_every_tokens=draw(st.integers(1, 1500)),
        step_factor=draw(st.floats(0.01, 1)),
        restart_factor=draw(st.integers(1, 3)),
        milestones=sorted(draw(st.sets(st.integers(1, 400), max_size=3))),
    )
    total = draw(st.integers(0, 400))
    warmup = draw(st.integers(0, total))
    return curve_of(schedule, total, warmup, draw(ramps()))


def factors_of(curve):
    return [curve.factor(step) for step in range(curve.total_steps)]


@given(schedules())
def test_the_factor_stays_between_floor_and_peak_after_the_warmup(curve):
    factors = factors_of(curve)
    assert all(0 < factor <= 1 for factor in factors)
    assert all(curve.floor - 1e-12 <= f for f in factors[curve.warmup_steps :])


@given(schedules())
def test_the_warmup_is_straight_in_its_unit_up_to_where_the_shape_begins(curve):
    warmup = curve.warmup_steps
    start, low = curve.factor(warmup), 0.0
    if curve.config.kind == "inverse_sqrt":
        start = 1.0
    if curve.config.kind == "one_cycle":
        low = curve.config.floor_ratio
    for step, factor in enumerate(factors_of(curve)[:warmup]):
        risen = curve.position(step + 1) / curve.position(warmup)
        assert factor == pytest.approx(low + (start - low) * risen)
    if warmup:
        assert curve.factor(warmup - 1) == pytest.approx(start)


@given(schedules(DECAYING))
def test_a_decay_starts_at_the_peak_and_ends_exactly_at_the_floor(curve):
    factors = factors_of(curve)[curve.warmup_steps :]
    if len(factors) < 2 or (curve.config.kind == "wsd" and len(set(factors)) == 1):
        return
    assert factors[0] == 1
    assert factors[-1] == curve.config.floor_ratio
    # Up to the last bit, where the floor is next to the peak.
    assert all(later <= factor + 1e-15 for factor, later in pairwise(factors))


STEEPEST = {
    "constant": 0.0,
    "linear": 1.0,
    "one_cycle": 1.0,
    "cosine": pi / 2,
}
"""Largest slope of the share that is left, by the share of the way."""


@given(schedules(tuple(STEEPEST)))
def test_the_curve_has_no_jump(curve):
    """An update changes the factor by at most the steepest slope times the update's share of the
    run.
    """
    warmup, total = curve.warmup_steps, curve.total_steps
    steepest = STEEPEST[curve.config.kind]
    for step in range(total - 1):
        change = abs(curve.factor(step + 1) - curve.factor(step))
        way = curve.position(step + 1) - curve.position(step)
        if step >= warmup:
            whole = curve.position(total - 1) - curve.position(warmup)
        else:
            # The rise is counted at the end of an update.
            steepest_here, whole = 1.0, curve.position(warmup)
            way = curve.position(min(step + 2, warmup)) - curve.position(step + 1)
            assert change <= steepest_here * way / whole + 1e-9
            continue
        assert change <= steepest * way / whole + 1e-9


@given(schedules(("cyclic",)))
def test_triangles_have_no_jump_at_their_ends(curve):
    config, warmup = curve.config, curve.warmup_steps
    period = config.step_every if config.unit is ScheduleUnit.steps else config.step_every_tokens
    for step in range(warmup, curve.total_steps - 1):
        way = curve.position(step + 1) - curve.position(step)
        change = abs(curve.factor(step + 1) - curve.factor(step))
        assert change <= 2 * way / period + 1e-9


@given(schedules(("wsd",)))
def test_wsd_is_at_the_peak_up_to_its_last_stable_update(curve):
    if curve.total_steps == 0:
        return
    stable = min(curve.stable_steps, curve.total_steps)
    assert all(curve.factor(step) == 1 for step in range(curve.warmup_steps, stable))
    decaying = curve.total_steps - stable
    assert decaying <= curve.decay_steps
    if decaying and curve.config.floor_ratio < 0.99:
        assert curve.factor(stable) < 1


UNITLESS = tuple(
    kind
    for kind in KINDS
    if kind != "milestones" and not isinstance(new_section("schedule", kind), WithInterval)
)
"""No number of theirs is in the unit."""


@given(schedules(UNITLESS))
def test_without_a_ramp_steps_and_tokens_are_the_same_curve(curve):
    config, total = curve.config, curve.total_steps
    lengths = {
        unit: warmup_length(replace(config, unit=unit), total, CONSTANT)[0] for unit in ScheduleUnit
    }
    in_steps, in_tokens = (
        factors_of(curve_of(replace(config, unit=unit), total, lengths[unit]))
        for unit in ScheduleUnit
    )
    assert in_steps == in_tokens


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("total", [0, 1, 2])
def test_runs_of_hardly_any_steps(kind, total):
    curve = curve_of(schedule_of(kind, step_every=1), total, 0)
    for step in (0, total, total + 5):
        assert 0 <= curve.factor(step) <= 1


def factor_at(step, kind, **fields):
    schedule = schedule_of(kind, **{"floor_ratio": 0.0, **fields})
    return curve_of(schedule, 111, 10).factor(step)


@pytest.mark.parametrize(
    ("kind", "step", "expected"),
    [
        ("constant", 60, 1.0),
        ("linear", 60, 0.5),
        ("cosine", 35, 0.853553390593),
        ("polynomial", 60, 0.25),
        ("wsd", 88, 1.0),
        ("wsd", 99, 0.292893218813),
        ("step", 29, 1.0),
        ("step", 30, 0.1),
        ("inverse_sqrt", 9, 1.0),
        ("inverse_sqrt", 39, 0.5),
        ("one_cycle", 4, 0.5),
        ("one_cycle", 9, 1.0),
        ("one_cycle", 60, 0.5),
        ("cyclic", 40, 1.0),
        ("cyclic", 45, 0.5),
        ("cyclic", 50, 0.0),
    ],
)
def test_values_worked_out_by_hand(kind, step, expected):
    """T=111, W=10: p=0.5 at step 60. wsd decays over round(0.2 x 111)=22 steps, from 88 to 110."""
    period = {"step": 20, "cyclic": 20}.get(kind)
    actual = factor_at(step, kind=kind, power=2.0, step_every=period)
    assert actual == pytest.approx(expected, abs=1e-9)


def test_exponential_halves_the_logarithm_in_the_middle():
    assert factor_at(60, kind="exponential", floor_ratio=0.01) == pytest.approx(0.1)


def test_a_cosine_reaches_its_floor_and_no_less():
    """The floor of 0.1 is Chinchilla's (arXiv:2203.15556, appendix B): 0.55 half-way, 0.1 at the
    end.
    """
    halfway, end = (factor_at(s, kind="cosine", floor_ratio=0.1) for s in (60, 110))
    assert halfway == pytest.approx(0.55) and end == 0.1


def test_the_transformer_paper_schedule():
    """arXiv:1706.03762, eq. 3, over its peak, with steps counted from 1."""
    for step in range(111):
        number, warmup = step + 1, 10
        paper = min(number**-0.5, number * warmup**-1.5) / warmup**-0.5
        assert isclose(factor_at(step, kind="inverse_sqrt"), paper, rel_tol=1e-12)


def typed(step, kind, **fields):
    """Return the factor at a step without a configured floor; 400 steps, no warmup."""
    return curve_of(new_section("schedule", kind, **fields), 400, 0).factor(step)


def test_the_default_floor_does_not_apply_to_step_and_inverse_sqrt_schedules():
    """Expected factors follow the definitions: powers of the factor, and the inverse square root of
    the update's number. The default floor of decaying schedules does not apply.
    """
    for step in range(400):
        hundreds, number = step // 100, step + 1
        drops = typed(step, kind="step", step_every=100, step_factor=0.1)
        assert isclose(drops, (1, 0.1, 0.01, 0.001)[hundreds], rel_tol=1e-12)
        listed = typed(step, kind="milestones", milestones=[100, 300], step_factor=0.1)
        assert isclose(listed, (1, 0.1, 0.1, 0.01)[hundreds], rel_tol=1e-12)
        root = typed(step, kind="inverse_sqrt")
        assert isclose(root, number**-0.5, rel_tol=1e-12)
    kept = {"kind": "step", "step_every": 100, "step_factor": 0.1, "floor_ratio": 0.05}
    assert typed(399, **kept) == 0.05


def test_the_default_floor_of_a_schedule_is_shown():
    floors = {}
    for kind in set(KINDS) - {"constant"}:
        evaluated = {"training__evaluate_every_steps": 5}
        plan = plan_with(schedule__kind=kind, schedule__step_every=10, **evaluated)
        (shown,) = [item for item in plan.derived if item.key == "schedule.floor_ratio"]
        assert kind in shown.reason
        floors[kind] = shown.value
    assert {kind: floor for kind, floor in floors.items() if floor > 0} == {
        "cosine": 0.1,
        "polynomial": 0.1,
        "exponential": 0.1,
        "cyclic": 0.1,
        "one_cycle": 0.01,
    }
    asked = plan_with(schedule__kind="step", schedule__step_every=10, schedule__floor_ratio=0.2)
    assert "schedule.floor_ratio" not in {item.key for item in asked.derived}
    assert Curve.of(asked).floor == 0.2


@pytest.mark.parametrize("factor", [1, 2, 3])
def test_restarts_match_the_paper(factor):
    """SGDR (arXiv:1608.03983), eq. 5 with eta_min 0 and eta_max 1: cycles of 10 m^i."""
    expected, restarts, length = [], [], 10
    while len(expected) < 400:
        restarts.append(len(expected))
        expected += [0.5 * (1 + cos(pi * since / length)) for since in range(length)]
        length *= factor
    schedule = new_section("schedule", "cosine_restarts", step_every=10, restart_factor=factor)
    found = curve_of(schedule, 400, 0)
    assert factors_of(found) == pytest.approx(expected[:400], abs=1e-12)
    assert list(found.turns) == [step for step in restarts if 0 < step < 400]
    warmed = curve_of(replace(schedule, floor_ratio=0.2), 407, 7)
    assert factors_of(warmed)[7:] == pytest.approx([0.2 + 0.8 * x for x in expected[:400]])
    assert warmed.turns == tuple(7 + step for step in found.turns)


def test_milestones_are_steps_tokens_or_shares_of_the_run():
    """At 20, 40 and 80 tokens a step, step 10 has seen 200 tokens, and step 21 is the first past
    640.
    """
    milestones = {"schedule__kind": "milestones", "schedule__step_factor": 0.5}
    cases = {
        (25, 45): {"milestone_fractions": [0.5, 0.9]},
        (3, 7): {"milestones": [3, 7]},
        (10, 21): {"milestones": [200, 641], "unit": "tokens"},
    }
    for steps, given_as in cases.items():
        settings = {f"schedule__{name}": value for name, value in given_as.items()}
        plan = plan_with(**RAMPED, **milestones, **settings)
        curve = Curve.of(plan)
        assert curve.turns == steps
        (shown,) = [item for item in plan.derived if item.key == "drop_steps"]
        assert shown.value == list(steps)
        after = [curve.factor(step) for step in (steps[0] - 1, *steps, plan.total_steps - 1)]
        assert after == [1, 0.5, 0.25, 0.25]


def test_a_plateau_falls_by_its_drops_alone():
    schedule = new_section("schedule", "plateau", step_factor=0.5)
    assert [curve_of(schedule, 9, 2).factor(0, drops=drops) for drops in range(3)] == [
        0.5,
        0.25,
        0.125,
    ]
    assert {curve_of(schedule, 9, 2).factor(step, drops=3) for step in range(2, 9)} == {0.125}
    kept = curve_of(replace(schedule, floor_ratio=0.2), 9, 0)
    assert [kept.factor(8, drops=drops) for drops in range(4)] == [1, 0.5, 0.25, 0.2]


@pytest.mark.parametrize(("scaling", "scale"), [("none", 1), ("linear", 4), ("sqrt", 2)])
def test_the_learning_rate_follows_the_batch_if_asked_and_says_why(scaling, scale):
    """Four times the batch: 4 by arXiv:1706.02677, 2 by arXiv:2205.10287; in every number."""
    asked = {"optimizer__lr_scaling": scaling, "optimizer__lr_scaling_batch_size": 4}
    plan = plan_with(
        training__global_batch_size=16, optimizer__lr=1e-3, optimizer__kind="muon", **asked
    )
    assert plan.peak_lr == pytest.approx(1e-3 * scale)
    params = plan.deepspeed.get("optimizer", {}).get("params", {})
    assert all(params[key] == pytest.approx(1e-3 * scale) for key in params if key.endswith("lr"))
    assert points_of(plan)[plan.warmup_steps].learning_rate == pytest.approx(1e-3 * scale)
    shown = [item for item in plan.derived if item.key == "peak_lr"]
    assert len(shown) == (scaling != "none")
    for item in shown:
        assert item.value == plan.peak_lr
        assert "0.001" in item.reason and "16 / optimizer.lr_scaling_batch_size 4" in item.reason


@pytest.mark.parametrize(
    ("epochs", "tokens", "steps"),
    [(1.0, 81, 1), (1.0, 91, 2), (3.0, 91, 4), (0.5, 91, 1), (3.0, 90, 3), (2.5, 171, 6)],
)
def test_epochs_are_steps_in_which_every_sample_is_seen_so_often(epochs, tokens, steps):
    """Batches of 8 samples of 10 tokens; the last token of the text is only a label."""
    length = {"training__steps": None, "training__epochs": epochs, "training__epoch_tokens": tokens}
    batch = {"training__sequence_length": 10, "training__global_batch_size": 8}
    plan = plan_with(**length, **batch)
    assert plan.total_steps == steps
    (shown,) = [item for item in plan.derived if item.key == "total_steps"]
    assert f"training.epochs {epochs:g} x {(tokens - 1) // 10} samples" in shown.reason


def test_epochs_count_the_samples_of_a_ramp():
    """10 steps of 2 samples and 10 of 4 are 60; the other 340 of 400 take 43 steps of 8."""
    given = {**RAMPED, "training__tokens": None, "training__epochs": 4.0}
    plan = plan_with(**given, training__epoch_tokens=1001)
    assert plan.total_steps == 63 and plan.batches.samples_before(63) >= 400


def test_in_tokens_a_ramp_stretches_the_curve():
    """10 steps of 10 tokens, then 30 to the step: half of the way is at half of the tokens."""
    batches = Batches(
        (
            BatchPhase(first_step=0, batch=batch_of(1)),
            BatchPhase(first_step=10, batch=batch_of(3)),
        )
    )
    config = new_section("schedule", "cosine", floor_ratio=0.0)
    in_steps = curve_of(config, 31, 0, batches)
    in_tokens = curve_of(replace(config, unit=ScheduleUnit.tokens), 31, 0, batches)
    assert batches.tokens_before(30) == 100 + 20 * 30
    assert in_steps.factor(15) == pytest.approx(0.5)
    for step, tokens in ((5, 50), (10, 100), (15, 250), (25, 550), (30, 700)):
        assert in_tokens.factor(step) == pytest.approx((1 + cos(pi * tokens / 700)) / 2), step


@given(ramps(), st.integers(0, 20_000))
def test_steps_for_tokens_is_the_first_step_that_has_them(batches, tokens):
    steps = batches.steps_for(tokens)
    assert batches.tokens_before(steps) >= tokens
    assert steps == 0 or batches.tokens_before(steps - 1) < tokens
    assert batches.tokens_before(steps) == sum(
        batches.at(step).tokens_per_step for step in range(steps)
    )


def plan_with(**changes):
    plan = resolve(config_with(**changes), cpus()).plan
    assert plan is not None
    return plan


RAMPED = {
    "training__sequence_length": 10,
    "training__global_batch_size": 8,
    "training__micro_batch_size": 1,
    "training__steps": None,
    "training__tokens": 3000,
    "training__batch_ramp": [
        {"until_tokens": 200, "global_batch_size": 2},
        {"until_steps": 20, "global_batch_size": 4},
    ],
}


def test_a_ramp_and_lengths_in_tokens_become_steps_with_a_reason():
    """20 a step to 200 at step 10; 40 a step to 600 at step 20; 80 a step: 30 more steps."""
    plan = plan_with(
        **RAMPED,
        schedule__kind="wsd",
        schedule__unit="tokens",
        schedule__warmup_tokens=250,
        schedule__decay_tokens=790,
    )
    assert [(p.first_step, p.batch.gradient_accumulation_steps) for p in plan.ramp] == [
        (0, 1),
        (10, 2),
        (20, 4),
    ]
    assert plan.total_steps == 50 and plan.batches.tokens_before(50) == 3000
    assert plan.warmup_steps == 12
    derived = {item.key: item for item in plan.derived}
    assert derived["decay_steps"].value == 10 and derived["stable_steps"].value == 40
    assert "790" in derived["decay_steps"].reason and "250" in derived["warmup_steps"].reason
    assert derived["global_batch_size of steps 11 to 20"].value == 4
    curve = Curve.of(plan)
    assert curve.stable_steps == 40 and curve.factor(39) == 1 > curve.factor(40)
    assert curve.factor(10) == pytest.approx(240 / 280)
    assert curve.factor(44) == pytest.approx(1 - sqrt(0.5))


def test_a_share_is_of_the_unit():
    """A tenth of 3000 tokens lies midway between 280 and 320, at step 13; a tenth of 50 steps is
    5.
    """
    tenth = {"schedule__warmup_fraction": 0.1}
    assert plan_with(**RAMPED, **tenth).warmup_steps == 5
    assert plan_with(**RAMPED, **tenth, schedule__unit="tokens").warmup_steps == 13


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ({"until_steps": 5}, "has the keys until_steps"),
        ({"until_steps": 5, "until_tokens": 9, "global_batch_size": 2}, "has the keys"),
        ({"until_steps": 5, "global_batch_size": 3}, "not a multiple of micro 1 x data 2 = 2"),
        ({"until_steps": 5, "global_batch_size": 0}, "not a multiple"),
        ({"until_steps": 5, "global_batch_size": 8}, "not smaller than the next, 8"),
        ({"until_tokens": 0, "global_batch_size": 2}, "ends where"),
    ],
)
def test_a_ramp_that_cannot_be_is_refused(entry, says):
    changes = {**RAMPED, "training__batch_ramp": [entry]}
    resolution = resolve(config_with(**changes), cpus())
    (finding,) = [finding for finding in resolution.findings if finding.is_error]
    assert (finding.rule, finding.key) == ("TC065", "training.batch_ramp")
    assert says in finding.message and finding.hint


@pytest.mark.parametrize("unit", ["steps", "tokens"])
def test_an_interval_is_given_in_the_unit(unit):
    other = {"steps": "step_every_tokens", "tokens": "step_every"}[unit]
    changes = {"schedule__kind": "step", "schedule__unit": unit, f"schedule__{other}": 1000}
    resolution = resolve(config_with(**changes), cpus())
    (finding,) = [finding for finding in resolution.findings if finding.is_error]
    assert finding.rule == "TC025"
    assert finding.key != f"schedule.{other}" and finding.key in finding.hint


def test_a_decay_that_does_not_fit_is_cut_and_reported():
    resolution = resolve(
        config_with(schedule__kind="wsd", schedule__decay_steps=99, schedule__warmup_steps=10),
        cpus(),
    )
    assert [finding.rule for finding in resolution.findings] == ["TC066"]
    assert resolution.plan is not None and Curve.of(resolution.plan).stable_steps == 11
