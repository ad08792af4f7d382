"""The verdict on a step, by numbers alone."""

import math
import random

import pytest

from trainctl.config.schema import OnBadLoss, StabilityConfig
from trainctl.runs.event_descriptions import describe_divergence, still_diverged
from trainctl.train.callbacks.steps import Divergence
from trainctl.train.stability import BadStepKind, StepGuard


def guard_of(policy=OnBadLoss.skip_batch, **settings):
    settings = {"spike_factor": 2.0, "norm_spike_factor": 3.0, "spike_after_steps": 2, **settings}
    return StepGuard(StabilityConfig(on_bad_loss=policy, **settings))


def accept(guard, *losses, start=1):
    for step, loss in enumerate(losses, start):
        assert guard.judge(loss, 1.0) is None
        guard.accept(step, loss, 1.0)


@pytest.mark.parametrize(
    ("loss", "norm", "kind", "limit"),
    [
        (math.nan, math.nan, BadStepKind.loss_not_finite, None),
        (math.inf, 1.0, BadStepKind.loss_not_finite, None),
        (4.0, math.inf, BadStepKind.norm_not_finite, None),
        (4.0, math.nan, BadStepKind.norm_not_finite, None),
        (8.1, 1.0, BadStepKind.loss_spike, 8.0),
        (8.1, 9.0, BadStepKind.loss_spike, 8.0),
        (4.0, 3.1, BadStepKind.norm_spike, 3.0),
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
        (9.1, 1.0, BadStepKind.loss_limit, 9.0),
        (8.1, 1.0, BadStepKind.loss_spike, 8.0),
        (4.0, 2.6, BadStepKind.norm_limit, 2.5),
        (9.1, 2.6, BadStepKind.loss_limit, 9.0),
        (math.nan, 9.0, BadStepKind.loss_not_finite, None),
        (8.0, 2.5, None, None),
    ],
)
def test_a_limit_holds_whatever_came_before(loss, norm, kind, limit):
    guard = guard_of(loss_limit=9.0, norm_limit=2.5)
    first = guard.judge(loss, norm)  # when there is no mean yet
    assert (first and first.kind) == (None if kind is BadStepKind.loss_spike else kind)
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
    guard = StepGuard(StabilityConfig(), norm_may_overflow=True)
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


# ------------------------------------------------------------------------------------ divergence

NOISE = random.Random(3)


def falling(first, last, steps, noise=0.05):
    """Yield a loss that falls as training losses do: fast at first, with proportional noise."""
    for step in range(steps):
        value = last + (first - last) * math.exp(-4 * step / steps)
        yield value * (1 + NOISE.gauss(0, noise))


def with_spike(losses, at, length, height):
    """Losses with a spike that comes down by half its height each step after `length` steps."""
    for step, loss in enumerate(losses):
        after = step - at - length
        extra = height * 0.5 ** max(0, after) if step >= at else 0.0
        yield loss + extra


def verdicts(losses, vocab_size=None):
    watch = Divergence(vocab_size)
    found = [watch.see(loss, step) for step, loss in enumerate(losses, 1)]
    return [(each["diverged"], each["step"]) for each in found if each]


ORDINARY = {
    "pre-training": (falling(10.5, 2.3, 2000), 32_000),
    "fresh weights somewhat above ignorance": (falling(14.0, 4.0, 400), 32_000),
    "bytes": (falling(5.6, 1.2, 500), 257),
    "an early spike far up": (with_spike(falling(10.4, 3.0, 600), 15, 3, 150.0), 32_000),
    "a broad spike to ignorance": (with_spike(falling(10.4, 3.0, 600), 60, 30, 4.0), 32_000),
    "a late spike": (with_spike(falling(10.4, 2.0, 900), 700, 5, 40.0), 32_000),
    "fine-tuning from a low loss": (falling(0.9, 0.05, 600, noise=0.5), 128_256),
    "a memorised epoch, then new text": ([*falling(1.0, 0.02, 300), *[2.6] * 50], 128_256),
    "small batches of answers": (falling(1.6, 0.8, 1000, noise=0.4), 32_000),
    "another stage of the data": ([*[1.1] * 300, *[2.9] * 300], 50_257),
    "dpo": (falling(0.69, 0.02, 800, noise=0.8), None),
    "dpo whose pairs become harder": ([*falling(0.69, 0.05, 300), *[0.9] * 100], None),
    "ipo": (falling(25.0, 3.0, 400, noise=0.3), None),
    "a loss that is negative": (falling(-1.0, -9.0, 300), None),
}


@pytest.mark.parametrize("losses, vocab_size", ORDINARY.values(), ids=ORDINARY)
def test_an_ordinary_curve_is_no_divergence(losses, vocab_size):
    assert verdicts(losses, vocab_size) == []


DIVERGED = {
    "at once": ([5.5, *(5.5 * 2.5**step for step in range(1, 14))], 257, 11),
    # a learning rate of 0.5 on bytes: far up within the first steps, and never back
    "to worse than it began": ([5.5, 6.1, 9.0, 22.9, 14.0, 9.0, 7.6, *[6.75] * 20], 257, 15),
    "to knowing only frequencies": ([*falling(10.4, 2.5, 500, 0.02), *[7.2] * 40], 32_000, 510),
    "fine-tuning": ([*falling(1.3, 1.1, 60), *[8.0] * 20], 128_256, 70),
    "dpo": ([*[0.69] * 20, *(0.69 * 1.5**step for step in range(1, 30))], None, 32),
}


@pytest.mark.parametrize("losses, vocab_size, step", DIVERGED.values(), ids=DIVERGED)
def test_a_divergence_is_reported_once(losses, vocab_size, step):
    assert verdicts(losses, vocab_size) == [(True, step)]


def test_a_loss_that_comes_down_again_is_reported_too():
    losses = [*[3.0] * 20, *[9.0] * 30, *[3.5] * 30, *[9.0] * 10]
    assert verdicts(losses, 32_000) == [(True, 30), (False, 60), (True, 90)]


def test_a_resumed_run_knows_how_good_it_was():
    before, after = Divergence(32_000), Divergence(32_000)
    assert before.state() == {}
    for step in range(1, 41):
        before.see(2.0, step)
    after.restore(before.state())
    found = [after.see(7.0, step) for step in range(41, 51)]
    assert [each is not None for each in found] == [False] * 9 + [True]
    assert found[-1]["reference"] == "vocabulary"


def test_what_a_divergence_is_told_as():
    watch = Divergence(257)
    found = [watch.see(600.0 + step, step) for step in range(1, 11)][-1]
    event = {"event": "divergence", "attempt": 2, "learning_rate": 5.0, **found}
    told = describe_divergence(event)
    assert told.startswith(
        "the loss diverges: the ten steps up to 10 are all above 8.324, 1.5 times"
    )
    assert "learning rate (5 there)" in told and "trainctl explain divergence" in told
    down = {**event, "diverged": False, "step": 40}
    assert "has come down" in describe_divergence(down)
    assert still_diverged([event], 2) == event
    assert still_diverged([event], 1) is None and still_diverged([event, down], 2) is None
