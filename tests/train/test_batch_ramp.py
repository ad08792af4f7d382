"""A ramp of the batch size is the run that its batches, made by hand, would give."""

import json
from dataclasses import replace

import pytest
from rank_processes import Case, curve, tiny_config, tiny_plan, train_cases, with_stop

from trainctl.config.registry import new_section
from trainctl.config.schema import DataType, OffloadDevice, ScheduleUnit
from trainctl.runs.layout import RunPaths
from trainctl.runs.records import read_events, step_curve

SIZES = (4, 8, 16)
ENDS = (2, 4, 7)
"""Steps at which each size ends."""

LENGTH = 32


def of_batches(stage=2, compute=DataType.fp32, **training):
    return tiny_config(
        gradient_accumulation_steps=None,
        micro_batch_size=2,
        sequence_length=LENGTH,
        evaluate_every_steps=4,
        zero_stage__stage=stage,
        precision__compute=compute,
        schedule__warmup_steps=3,
        checkpoint__keep=9,
        **{"global_batch_size": SIZES[-1], "steps": ENDS[-1], **training},
    )


def ramped(stage=2, compute=DataType.fp32, offload=OffloadDevice.none, **parallelism):
    """Build a configuration whose batch ramp has one size until a step and one until a token
    count.
    """
    tokens = LENGTH * (ENDS[0] * SIZES[0] + (ENDS[1] - ENDS[0]) * SIZES[1])
    ramp = [
        {"until_steps": ENDS[0], "global_batch_size": SIZES[0]},
        {"until_tokens": tokens, "global_batch_size": SIZES[1]},
    ]
    config = of_batches(stage, compute, batch_ramp=ramp)
    config.offload.optimizer = offload
    for axis, size in parallelism.items():
        setattr(config.parallelism, axis, size)
    return config


def trained(folder, *plans, processes=2):
    """Train one run with one attempt for each plan, and return its paths."""
    run = RunPaths(folder)
    for attempt, plan in enumerate(plans, start=1):
        world = processes if isinstance(processes, int) else processes[attempt - 1]
        train_cases(world, [Case(plan, run, attempt=attempt)])
    return run


@pytest.fixture(scope="module")
def by_hand(tmp_path_factory):
    """Train the ramp as one attempt per batch size, each with an engine of its own."""
    plans = [
        with_stop(tiny_plan(of_batches(global_batch_size=size), 2), end)
        for size, end in zip(SIZES, ENDS, strict=True)
    ]
    return trained(tmp_path_factory.mktemp("hand") / "run", *plans)


def steps_of(run):
    return list(step_curve(read_events(run.events)).values())


@pytest.mark.slow
def test_a_batch_ramp_equals_manual_stages_also_resumed_on_another_layout(tmp_path, by_hand):
    plan = tiny_plan(ramped(), 2)
    run = trained(tmp_path / "run", plan)
    assert curve(run) == curve(by_hand)
    for ours, theirs in zip(steps_of(run), steps_of(by_hand), strict=True):
        for name in ("samples", "tokens", "learning_rate", "learning_rates"):
            assert ours[name] == theirs[name], name
    bounds = [event["samples"] for event in steps_of(run)]
    assert [end - start for start, end in bounds] == [4, 4, 8, 8, 16, 16, 16]
    # Stopped within the second size, gone on with on one process and then on two: the same samples.
    one = tiny_plan(ramped(), 1)
    moved = trained(
        tmp_path / "moved",
        with_stop(plan, 3),
        with_stop(one, 5),
        plan,
        processes=(2, 1, 2),
    )
    assert [event["samples"] for event in steps_of(moved)] == bounds
    assert_close(moved, by_hand)
    seen = [sample for line in seen_lines(moved) for sample in line["ids"]]
    assert len(seen) == bounds[-1][1] and len(set(seen)) == len(seen)


def seen_lines(run):
    return [
        json.loads(line)
        for file in sorted(run.root.glob("seen-*.jsonl"))
        for line in file.read_text().splitlines()
    ]


def assert_close(run, reference, loss=1e-6, norm=5e-6):
    found, expected = curve(run), curve(reference)
    assert list(found) == list(expected) == list(range(1, ENDS[-1] + 1))
    for step, (expected_loss, expected_norm) in expected.items():
        assert found[step][0] == pytest.approx(expected_loss, rel=loss), step
        assert found[step][1] == pytest.approx(expected_norm, rel=norm), step


LAYOUTS = {
    "ZeRO 0": ramped(0),
    "ZeRO 3": ramped(3),
    "ZeRO 2, states on the host": ramped(2, offload=OffloadDevice.cpu),
    "pipeline": ramped(1, pipeline=2),
    "sequence": ramped(1, sequence=2),
}


APART = ("ZeRO 2, states on the host", "sequence")
MOST = tuple(name for name in LAYOUTS if name not in APART)


@pytest.mark.slow
@pytest.mark.timeout(1800)  # CPUAdam is compiled when it is first used
@pytest.mark.parametrize("names", [MOST, APART], ids=["most", "apart"])
def test_every_layout_changes_at_the_same_step(tmp_path, by_hand, names):
    runs = {name: RunPaths(tmp_path / name) for name in names}
    cases = [Case(tiny_plan(LAYOUTS[name], 2), run) for name, run in runs.items()]
    train_cases(2, cases, together=True)
    for run in runs.values():
        assert_close(run, by_hand)


@pytest.mark.slow
def test_a_schedule_in_tokens_follows_the_tokens_seen(tmp_path):
    """bf16, ZeRO 1; half of the decay is at half of the tokens, not of the steps."""
    config = ramped(1, DataType.bf16)
    config.training = replace(config.training, evaluation_samples=0)
    config.schedule = new_section(
        "schedule", "linear", unit=ScheduleUnit.tokens, warmup_steps=0, floor_ratio=0.0
    )
    run = trained(tmp_path / "run", tiny_plan(config, 2))
    peak, last = config.optimizer.lr, 2 * 4 + 2 * 8 + 2 * 16  # sequences before the last step
    for event in steps_of(run):
        before = event["samples"][0]
        expected = peak * (1 - before / last)
        assert event["learning_rate"] == pytest.approx(expected, rel=1e-12)
        assert set(event["learning_rates"].values()) == {event["learning_rate"]}
